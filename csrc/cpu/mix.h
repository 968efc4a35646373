// The loop of a mix, shared by mix_ and mix_sgd_step_: tile by tile, so that a tile of the mix and of all that it is
// made from stays in L1 until it is used.
#pragma once

#include <algorithm>
#include <vector>

#include "dispatch.h"

namespace ddpcore::cpu {

inline constexpr int64_t kTile = 1024;  // elements; divides kBlock, and a multiple of kLanes

// For every tile of the blocks: forms the mix of elements [first, first + numel) and calls use(first, numel, mixed).
// After each block, writes the block's row of partial sums.
template <typename T, typename Use>
DDPCORE_INLINE void mix_blocks(const MixArgs& args, int64_t begin_block, int64_t end_block, Use&& use) {
    std::vector<double> lanes(static_cast<size_t>(args.num_peers * kLanes));
    float mixed[kTile];
    for (int64_t block = begin_block; block < end_block; ++block) {
        std::fill(lanes.begin(), lanes.end(), 0.0);
        const int64_t end = std::min((block + 1) * kBlock, args.numel);
        for (int64_t first = block * kBlock; first < end; first += kTile) {
            const int64_t numel = std::min(kTile, end - first);
            const T* weights = static_cast<const T*>(args.weights) + first;
            const float self_weight = args.self_weight;
            for (int64_t i = 0; i < numel; ++i) mixed[i] = self_weight * load(weights[i]);
            for (int64_t k = 0; k < args.num_peers; ++k) {
                const T* peer = static_cast<const T*>(args.peers[k]) + first;
                const float peer_weight = args.peer_weights[k];
                add_squares(lanes.data() + k * kLanes, numel, [=](int64_t i) __attribute__((always_inline)) {
                    return load(weights[i]) - load(peer[i]);
                });
                for (int64_t i = 0; i < numel; ++i) mixed[i] = mix_element(mixed[i], peer_weight, load(peer[i]));
            }
            use(first, numel, mixed);
        }
        for (int64_t k = 0; k < args.num_peers; ++k) {
            args.partials[block * args.num_peers + k] = sum_lanes(lanes.data() + k * kLanes);
        }
    }
}

}  // namespace ddpcore::cpu
