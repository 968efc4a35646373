// noise_sums: the Gram matrix of a few rows for each segment, by blocks aligned to the start of the segment.
#include <algorithm>

#include "dispatch.h"
#include "kernels.h"

namespace ddpcore::cpu {

namespace {

inline constexpr int kTile = 4;  // rows that are read together: ten pairs of 16 lanes fill AVX-512's registers

// sum + left * right. Products of fp32 values are exact in double, so a fused operation has the bits of two operations.
template <bool kFused>
DDPCORE_INLINE double add_product(double sum, double left, double right) {
    if constexpr (kFused) return __builtin_fma(left, right, sum);
    return sum + left * right;
}

// Element i of row k of a block, minus the origin.
template <typename T, bool kOrigin>
struct Block {
    const void* const* rows;
    const void* origin;
    int64_t first;

    DDPCORE_INLINE double operator()(int64_t k, int64_t i) const {
        const float value = load(static_cast<const T*>(rows[k])[first + i]);
        if constexpr (!kOrigin) return value;
        return value - load(static_cast<const T*>(origin)[first + i]);
    }
};

// Sixteen neighbouring elements of a row in double.
template <typename Values>
DDPCORE_INLINE void read_lanes(double* __restrict lanes, const Values& values, int64_t row, int64_t i) {
    DDPCORE_IVDEP
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = values(row, i + lane);
}

template <bool kFused>
DDPCORE_INLINE void add_products(double* __restrict sums, const double* left, const double* right) {
    DDPCORE_IVDEP
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] = add_product<kFused>(sums[lane], left[lane], right[lane]);
}

// Calls out(a, b, sum) for all pairs a <= b of kRows neighbouring rows. Each element is read once.
template <int kRows, bool kFused, typename Values, typename Out>
DDPCORE_INLINE void products_within(const Values& values, int64_t first_row, int64_t numel, Out&& out) {
    double sums[kRows][kRows][kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= numel; i += kLanes) {
        double own[kRows][kLanes];
        for (int a = 0; a < kRows; ++a) read_lanes(own[a], values, first_row + a, i);
        for (int a = 0; a < kRows; ++a) {
            for (int b = a; b < kRows; ++b) add_products<kFused>(sums[a][b], own[a], own[b]);
        }
    }
    for (int lane = 0; i < numel; ++i, ++lane) {
        for (int a = 0; a < kRows; ++a) {
            for (int b = a; b < kRows; ++b) {
                const double left = values(first_row + a, i), right = values(first_row + b, i);
                sums[a][b][lane] = add_product<kFused>(sums[a][b][lane], left, right);
            }
        }
    }
    for (int a = 0; a < kRows; ++a) {
        for (int b = a; b < kRows; ++b) out(first_row + a, first_row + b, sum_lanes(sums[a][b]));
    }
}

// The same for the pairs of kTile neighbouring rows and one that comes after them.
template <bool kFused, typename Values, typename Out>
DDPCORE_INLINE void products_with(const Values& values, int64_t first_row, int64_t other, int64_t numel, Out&& out) {
    double sums[kTile][kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= numel; i += kLanes) {
        double own[kLanes], right[kLanes];
        read_lanes(right, values, other, i);
        for (int a = 0; a < kTile; ++a) {
            read_lanes(own, values, first_row + a, i);
            add_products<kFused>(sums[a], own, right);
        }
    }
    for (int lane = 0; i < numel; ++i, ++lane) {
        for (int a = 0; a < kTile; ++a) {
            sums[a][lane] = add_product<kFused>(sums[a][lane], values(first_row + a, i), values(other, i));
        }
    }
    for (int a = 0; a < kTile; ++a) out(first_row + a, other, sum_lanes(sums[a]));
}

template <bool kFused, typename Values>
DDPCORE_INLINE void products_of_block(const Values& values, int64_t num_rows, int64_t numel, double* partials) {
    const auto out = [=](int64_t i, int64_t j, double sum)
                         __attribute__((always_inline)) { partials[pair_of(i, j, num_rows)] = sum; };
    for (int64_t row = 0; row < num_rows; row += kTile) {
        switch (std::min<int64_t>(kTile, num_rows - row)) {
            case 1: products_within<1, kFused>(values, row, numel, out); break;
            case 2: products_within<2, kFused>(values, row, numel, out); break;
            case 3: products_within<3, kFused>(values, row, numel, out); break;
            default: products_within<kTile, kFused>(values, row, numel, out);
        }
        for (int64_t other = row + kTile; other < num_rows; ++other) {
            products_with<kFused>(values, row, other, numel, out);
        }
    }
}

template <typename T, bool kOrigin, bool kFused>
DDPCORE_INLINE void products(const GramArgs& args, int64_t begin_block, int64_t end_block) {
    for_each_part(
        args.segments, args.num_segments, begin_block, end_block, 1,
        [&](const GramSegment& segment, int64_t first, int64_t last) __attribute__((always_inline)) {
            const Block<T, kOrigin> values{args.rows, args.origin, segment.first + first};
            const int64_t block = segment.first_block + first / kBlock;
            double* partials = args.partials + block * num_pairs_of(args.num_rows);
            products_of_block<kFused>(values, args.num_rows, last - first, partials);
        });
}

template <bool kFused>
DDPCORE_INLINE void noise_sums_blocks(const GramArgs& args, int64_t begin_block, int64_t end_block) {
    with_storage(args.dtype, [&](auto* tag) __attribute__((always_inline)) {
        using T = std::remove_pointer_t<decltype(tag)>;
        if (args.origin == nullptr) return products<T, false, kFused>(args, begin_block, end_block);
        products<T, true, kFused>(args, begin_block, end_block);
    });
}

}  // namespace

DDPCORE_FUSED_VERSIONS(noise_sums, noise_sums_blocks, GramArgs)

}  // namespace ddpcore::cpu
