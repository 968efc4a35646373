// noise_sums: the Gram matrix of a few rows for each segment, by blocks aligned to the start of the segment.
#include <algorithm>
#include <vector>

#include "dispatch.h"
#include "kernels.h"
#include "states.h"

namespace ddpcore::cpu {

namespace {

inline constexpr int kTile = 4;  // rows that are read together: ten pairs of 16 lanes fill AVX-512's registers

// sum + left * right. Products of fp32 values are exact in double, so a fused operation has the bits of two operations.
template <bool kFused>
DDPCORE_INLINE double add_product(double sum, double left, double right) {
    if constexpr (kFused) return __builtin_fma(left, right, sum);
    return sum + left * right;
}

// The rows of a tile, and the origin that is subtracted from each.
template <bool kOrigin>
struct Tile {
    const float* rows[kTile + 1];  // the last one is for the row that comes after the tile
    const float* origin;

    DDPCORE_INLINE double operator()(int row, int64_t i) const {
        if constexpr (!kOrigin) return rows[row][i];
        return rows[row][i] - origin[i];
    }
};

// Sixteen neighbouring elements of a row in double.
template <bool kOrigin>
DDPCORE_INLINE void read_lanes(double* __restrict lanes, const Tile<kOrigin>& tile, int row, int64_t i) {
    DDPCORE_IVDEP
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = tile(row, i + lane);
}

template <bool kFused>
DDPCORE_INLINE void add_products(double* __restrict sums, const double* left, const double* right) {
    DDPCORE_IVDEP
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] = add_product<kFused>(sums[lane], left[lane], right[lane]);
}

// Calls out(a, b, sum) for all pairs a <= b of a tile of kRows rows. Each element is read once.
template <int kRows, bool kFused, bool kOrigin, typename Out>
DDPCORE_INLINE void products_within(const Tile<kOrigin>& tile, int64_t numel, Out&& out) {
    double sums[kRows][kRows][kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= numel; i += kLanes) {
        double own[kRows][kLanes];
        for (int a = 0; a < kRows; ++a) read_lanes(own[a], tile, a, i);
        for (int a = 0; a < kRows; ++a) {
            for (int b = a; b < kRows; ++b) add_products<kFused>(sums[a][b], own[a], own[b]);
        }
    }
    for (int lane = 0; i < numel; ++i, ++lane) {
        for (int a = 0; a < kRows; ++a) {
            for (int b = a; b < kRows; ++b) {
                sums[a][b][lane] = add_product<kFused>(sums[a][b][lane], tile(a, i), tile(b, i));
            }
        }
    }
    for (int a = 0; a < kRows; ++a) {
        for (int b = a; b < kRows; ++b) out(a, b, sum_lanes(sums[a][b]));
    }
}

// Calls out(a, sum) for the pairs of each row of a whole tile with the one that comes after it.
template <bool kFused, bool kOrigin, typename Out>
DDPCORE_INLINE void products_with_last(const Tile<kOrigin>& tile, int64_t numel, Out&& out) {
    double sums[kTile][kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= numel; i += kLanes) {
        double own[kLanes], last[kLanes];
        read_lanes(last, tile, kTile, i);
        for (int a = 0; a < kTile; ++a) {
            read_lanes(own, tile, a, i);
            add_products<kFused>(sums[a], own, last);
        }
    }
    for (int lane = 0; i < numel; ++i, ++lane) {
        for (int a = 0; a < kTile; ++a) sums[a][lane] = add_product<kFused>(sums[a][lane], tile(a, i), tile(kTile, i));
    }
    for (int a = 0; a < kTile; ++a) out(a, sum_lanes(sums[a]));
}

// Elements [first, first + numel) of a row in fp32. The sums are compiled for fp32 alone: rows of 16 bits are converted
// to a place in `space` first.
DDPCORE_INLINE const float* row_of(
    DType dtype, const void* row, int64_t first, int64_t numel, float* space, int place) {
    if (dtype == DType::kFloat32) return static_cast<const float*>(row) + first;
    float* to = space + place * kBlock;
    widen(dtype, row, first, to, numel);
    return to;
}

// A block of a segment: its elements [first, first + numel).
template <bool kFused, bool kOrigin>
DDPCORE_INLINE void products_of_block(
    const GramArgs& args, int64_t first, int64_t numel, double* partials, float* space) {
    const auto read = [=, &args](const void* row, int place) __attribute__((always_inline)) {
        return row_of(args.dtype, row, first, numel, space, place);
    };
    Tile<kOrigin> tile{};
    if constexpr (kOrigin) tile.origin = read(args.origin, kTile + 1);
    for (int64_t row = 0; row < args.num_rows; row += kTile) {
        const int num_own = static_cast<int>(std::min<int64_t>(kTile, args.num_rows - row));
        for (int a = 0; a < num_own; ++a) tile.rows[a] = read(args.rows[row + a], a);
        const auto out = [=, &args](int a, int b, double sum) __attribute__((always_inline)) {
            partials[pair_of(row + a, row + b, args.num_rows)] = sum;
        };
        switch (num_own) {
            case 1: products_within<1, kFused>(tile, numel, out); break;
            case 2: products_within<2, kFused>(tile, numel, out); break;
            case 3: products_within<3, kFused>(tile, numel, out); break;
            default: products_within<kTile, kFused>(tile, numel, out);
        }
        for (int64_t other = row + kTile; other < args.num_rows; ++other) {
            tile.rows[kTile] = read(args.rows[other], kTile);
            products_with_last<kFused>(tile, numel, [=, &args](int a, double sum) __attribute__((always_inline)) {
                partials[pair_of(row + a, other, args.num_rows)] = sum;
            });
        }
    }
}

template <bool kFused>
DDPCORE_INLINE void noise_sums_blocks(const GramArgs& args, int64_t begin_block, int64_t end_block) {
    std::vector<float> space(args.dtype == DType::kFloat32 ? 0 : static_cast<size_t>((kTile + 2) * kBlock));
    for_each_part(
        args.segments, args.num_segments, begin_block, end_block, 1,
        [&](const GramSegment& segment, int64_t begin, int64_t end) __attribute__((always_inline)) {
            const int64_t block = segment.first_block + begin / kBlock, first = segment.first + begin;
            double* partials = args.partials + block * num_pairs_of(args.num_rows);
            if (args.origin == nullptr) {
                products_of_block<kFused, false>(args, first, end - begin, partials, space.data());
            } else {
                products_of_block<kFused, true>(args, first, end - begin, partials, space.data());
            }
        });
}

}  // namespace

DDPCORE_FUSED_VERSIONS(noise_sums, noise_sums_blocks, GramArgs)

}  // namespace ddpcore::cpu
