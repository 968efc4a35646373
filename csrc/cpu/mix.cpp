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
            mix_one_peer<T>(args, begin_block, end_block, [=](int64_t first) __attribute__((always_inline)) {
                T* out = weights + first;
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

namespace {

// One tile of columns: `tile` holds the old rows, so that every new row is formed before any old one is lost.
template <typename T>
DDPCORE_INLINE void mix_stacked_tile(
    const StackedMixArgs& args, int64_t first, int64_t numel, float* __restrict tile, float* __restrict row,
    double* __restrict lanes) {
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
        add_squares(
            lanes + j * kLanes, numel, [=](int64_t i) __attribute__((always_inline)) { return own[i] - row[i]; });
    }
    for (int64_t j = 0; j < n; ++j) {
        const float* entries = args.matrix + j * n;
        for (int64_t i = 0; i < numel; ++i) row[i] = entries[j] * tile[j * numel + i];
        for (int64_t k = 0; k < n; ++k) {
            if (k == j || entries[k] == 0.0f) continue;  // cost follows the edges, not n^2
            for (int64_t i = 0; i < numel; ++i) row[i] = mix_element(row[i], entries[k], tile[k * numel + i]);
        }
        for (int64_t i = 0; i < numel; ++i) weights[j * args.numel + i] = store<T>(row[i]);
    }
}

}  // namespace

DDPCORE_CLONES void mix_stacked_(const StackedMixArgs& args, int64_t begin_block, int64_t end_block) {
    with_storage(args.dtype, [&](auto* tag) __attribute__((always_inline)) {
        using T = std::remove_pointer_t<decltype(tag)>;
        const int64_t n = args.num_learners;
        // At most 128 KiB of tile, a power of two of columns between kLanes and kBlock: a divisor of the block.
        int64_t width = kBlock;
        while (width > kLanes && width * n > 32768) width /= 2;
        std::vector<float> tile(static_cast<size_t>(n * width)), row(static_cast<size_t>(width));
        std::vector<double> lanes(static_cast<size_t>(n * kLanes));
        for (int64_t block = begin_block; block < end_block; ++block) {
            std::fill(lanes.begin(), lanes.end(), 0.0);
            const int64_t end = std::min((block + 1) * kBlock, args.numel);
            for (int64_t first = block * kBlock; first < end; first += width) {
                mix_stacked_tile<T>(args, first, std::min(width, end - first), tile.data(), row.data(), lanes.data());
            }
            for (int64_t j = 0; j < n; ++j) args.partials[block * n + j] = sum_lanes(lanes.data() + j * kLanes);
        }
    });
}

}  // namespace ddpcore::cpu
