// mix_: weights <- self_weight * weights + sum_k peer_weights[k] * peers[k] + noise; 12 bytes an element with one peer
// in fp32. mix_stacked_: the same for a stack of learners held in one process.
#include "mix.h"

#include <algorithm>
#include <vector>

#include "kernels.h"

namespace ddpcore::cpu {

DDPCORE_CLONES void mix_(const MixArgs& args, int64_t begin_block, int64_t end_block) {
    with_storage(args.dtype, [&](auto* tag) __attribute__((always_inline)) {
        using T = std::remove_pointer_t<decltype(tag)>;
        T* weights = static_cast<T*>(args.weights);
        if (args.num_peers == 1 && args.noise.std == 0.0f) {
            mix_one_peer<T>(args, begin_block, end_block, [=](int64_t, T* out) __attribute__((always_inline)) {
                return [=](int64_t i, float mixed) __attribute__((always_inline)) { out[i] = store<T>(mixed); };
            });
            return;
        }
        mix_tiles<T>(
            args, begin_block, end_block,
            [=](int64_t first, int64_t numel, const float* mixed) __attribute__((always_inline)) {
                for (int64_t i = 0; i < numel; ++i) weights[first + i] = store<T>(mixed[i]);
            });
    });
}

DDPCORE_CLONES void mix_elements(const MixArgs& args, int64_t first, int64_t last) {
    with_storage(args.dtype, [&](auto* tag) __attribute__((always_inline)) {
        using T = std::remove_pointer_t<decltype(tag)>;
        T* weights = static_cast<T*>(args.weights);
        const T* source = args.source == nullptr ? weights : static_cast<const T*>(args.source);
        float mixed[kTile];
        for (; first < last; first += kTile) {
            const int64_t numel = std::min(kTile, last - first);
            for (int64_t i = 0; i < numel; ++i) mixed[i] = args.self_weight * load(source[first + i]);
            for (int64_t k = 0; k < args.num_peers; ++k) {
                const T* peer = static_cast<const T*>(args.peers[k]) + first;
                const float peer_weight = args.peer_weights[k];
                for (int64_t i = 0; i < numel; ++i) mixed[i] = mix_element(mixed[i], peer_weight, load(peer[i]));
            }
            if (args.noise.std != 0.0f) add_noise(args.noise, first, numel, mixed);
            for (int64_t i = 0; i < numel; ++i) weights[first + i] = store<T>(mixed[i]);
        }
    });
}

namespace {

inline constexpr int64_t kStackTile = 32768;  // elements of a tile of columns: 128 KiB, which a core's L2 holds

// The columns of a tile: a power of two that divides the block, and at least a cache line of a row. So a tile of 4096
// learners has 256 KiB, or 512 KiB if elements have 16 bits.
template <typename T>
int64_t tile_columns(int64_t num_learners) {
    constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
    static_assert(kLine % kLanes == 0);
    int64_t columns = kBlock;
    while (columns > kLine && columns * num_learners > kStackTile) columns /= 2;
    return columns;
}

// row += value * source, or row = value * source for the first entry of a row.
template <typename T>
DDPCORE_INLINE void add_entry(float* __restrict row, bool is_first, float value, const T* source, int64_t numel) {
    if (is_first) {
        for (int64_t i = 0; i < numel; ++i) row[i] = value * load(source[i]);
    } else {
        for (int64_t i = 0; i < numel; ++i) row[i] = mix_element(row[i], value, load(source[i]));
    }
}

// Mixes one tile of columns. `tile` holds the old rows, so that no new row overwrites an old one that is still needed.
// The cost is proportional to the number of entries. Adds each row's squared distance to the mean to `sums`.
template <typename T>
DDPCORE_INLINE void mix_stacked_tile(
    const StackedMixArgs& args, int64_t first, int64_t numel, float* __restrict tile, float* __restrict row,
    double* __restrict sums) {
    const int64_t n = args.num_learners;
    T* weights = static_cast<T*>(args.weights) + first;
    for (int64_t i = 0; i < numel; ++i) row[i] = 0.0f;
    for (int64_t j = 0; j < n; ++j) {
        for (int64_t i = 0; i < numel; ++i) {
            tile[j * numel + i] = load(weights[j * args.numel + i]);
            row[i] = row[i] + tile[j * numel + i];
        }
    }
    const float share = 1.0f / static_cast<float>(n);
    for (int64_t i = 0; i < numel; ++i) row[i] = share * row[i];
    for (int64_t j = 0; j < n; ++j) {
        const float* own = tile + j * numel;
        double lanes[kLanes] = {};
        add_squares(lanes, numel, [=](int64_t i) __attribute__((always_inline)) { return own[i] - row[i]; });
        sums[j] += sum_lanes(lanes);
    }
    for (int64_t j = 0; j < n; ++j) {
        const int64_t begin = args.offsets[j], end = args.offsets[j + 1];
        if (begin == end) std::fill_n(row, numel, 0.0f);
        for (int64_t entry = begin; entry < end; ++entry) {
            const int64_t column = args.columns[entry];
            if (column < n) {
                add_entry(row, entry == begin, args.values[entry], tile + column * numel, numel);
            } else {
                const T* other = static_cast<const T*>(args.others[column - n]) + first;
                add_entry(row, entry == begin, args.values[entry], other, numel);
            }
        }
        for (int64_t i = 0; i < numel; ++i) weights[j * args.numel + i] = store<T>(row[i]);
    }
}

}  // namespace

DDPCORE_CLONES void mix_stacked_(const StackedMixArgs& args, int64_t begin_block, int64_t end_block) {
    with_storage(args.dtype, [&](auto* tag) __attribute__((always_inline)) {
        using T = std::remove_pointer_t<decltype(tag)>;
        const int64_t n = args.num_learners, width = tile_columns<T>(n);
        std::vector<float> tile(static_cast<size_t>(n * width)), row(static_cast<size_t>(width));
        for (int64_t block = begin_block; block < end_block; ++block) {
            double* sums = args.partials + block * n;
            std::fill_n(sums, n, 0.0);
            const int64_t end = std::min((block + 1) * kBlock, args.numel);
            for (int64_t first = block * kBlock; first < end; first += width) {
                mix_stacked_tile<T>(args, first, std::min(width, end - first), tile.data(), row.data(), sums);
            }
        }
    });
}

}  // namespace ddpcore::cpu
