// The loops of mix_. The argument `use` is a function that takes the mixed elements.
#pragma once

#include <algorithm>
#include <vector>

#include "../random.h"
#include "dispatch.h"

namespace ddpcore::cpu {

inline constexpr int64_t kTile = 256;  // elements of a tile of the mix, which stays in L1

// Copies the weights from args.source to args.weights, from where the loops below read them. It copies vectors: memcpy
// of large data bypasses the cache, from which the loops then read.
template <typename T>
DDPCORE_INLINE void copy_source(const MixArgs& args, int64_t first, int64_t numel) {
    if (args.source == nullptr || args.source == args.weights) return;
    T* to = static_cast<T*>(args.weights) + first;
    const T* from = static_cast<const T*>(args.source) + first;
    int64_t i = 0;
    for (; i + kLanes <= numel; i += kLanes) {
        DDPCORE_IVDEP
        for (int lane = 0; lane < kLanes; ++lane) to[i + lane] = from[i + lane];
        asm volatile("" ::: "memory");  // else the compiler makes a memcpy of the loop
    }
    for (; i < numel; ++i) to[i] = from[i];
}

// The mix with one peer and without noise, the common case, in a single loop over all buffers, which is faster than one
// loop after the other. use_at(first, weights) returns a function of (i, mixed element first + i) that may write
// weights[i]. It must write through this pointer, so that the compiler knows that no buffers overlap.
template <typename T, typename UseAt>
DDPCORE_INLINE void mix_one_peer(const MixArgs& args, int64_t begin_block, int64_t end_block, UseAt&& use_at) {
    const float self_weight = args.self_weight, peer_weight = args.peer_weights[0];
    T* const base = static_cast<T*>(args.weights);
    const T* const peers = static_cast<const T*>(args.peers[0]);
    const int64_t step = args.source == nullptr ? kBlock : kTile;
    for (int64_t block = begin_block; block < end_block; ++block) {
        const int64_t end = std::min((block + 1) * kBlock, args.numel);
        double lanes[kLanes] = {};
        for (int64_t first = block * kBlock; first < end; first += step) {
            const int64_t numel = std::min(step, end - first);
            T* weights = base + first;
            const T* peer = peers + first;
            copy_source<T>(args, first, numel);
            const auto use = use_at(first, weights);
            add_squares(lanes, numel, [=](int64_t i) __attribute__((always_inline)) {
                const float own = load(weights[i]), theirs = load(peer[i]);
                use(i, mix_element(self_weight * own, peer_weight, theirs));
                return own - theirs;
            });
        }
        args.partials[block] = sum_lanes(lanes);
    }
}

// mixed[0:numel] = the mix of elements [first, first + numel), one peer after the other.
template <typename T>
DDPCORE_INLINE void mix_tile(const MixArgs& args, int64_t first, int64_t numel, float* mixed, double* lanes) {
    const T* weights = static_cast<const T*>(args.weights) + first;
    const float self_weight = args.self_weight;
    for (int64_t i = 0; i < numel; ++i) mixed[i] = self_weight * load(weights[i]);
    for (int64_t k = 0; k < args.num_peers; ++k) {
        const T* peer = static_cast<const T*>(args.peers[k]) + first;
        const float peer_weight = args.peer_weights[k];
        add_squares(lanes + k * kLanes, numel, [=](int64_t i) __attribute__((always_inline)) {
            const float theirs = load(peer[i]);
            mixed[i] = mix_element(mixed[i], peer_weight, theirs);
            return load(weights[i]) - theirs;
        });
    }
}

// mixed[0:numel] += the noise of elements [first, first + numel), numel <= kTile. A draw gives four numbers, so the
// first and the last draw may have numbers outside of the range.
DDPCORE_INLINE void add_noise(const Noise& noise, int64_t first, int64_t numel, float* mixed) {
    const auto index = static_cast<uint64_t>(noise.first + first), skipped = index % 4;
    const uint64_t num_fours = (skipped + static_cast<uint64_t>(numel) + 3) / 4;
    float normals[kTile + 4];
    for (uint64_t i = 0; i < num_fours; ++i) {
        const Normals four = four_normals(noise.seed, noise.step, index / 4 + i);
        for (int k = 0; k < 4; ++k) normals[4 * i + k] = four.values[k];
    }
    for (int64_t i = 0; i < numel; ++i) mixed[i] = mix_element(mixed[i], noise.std, (normals + skipped)[i]);
}

// The mix with any number of peers, and with noise. It calls use(first, numel, mixed) for each tile.
template <typename T, typename Use>
DDPCORE_INLINE void mix_tiles(const MixArgs& args, int64_t begin_block, int64_t end_block, Use&& use) {
    std::vector<double> lanes(static_cast<size_t>(args.num_peers * kLanes));
    float mixed[kTile];
    for (int64_t block = begin_block; block < end_block; ++block) {
        const int64_t end = std::min((block + 1) * kBlock, args.numel);
        std::fill(lanes.begin(), lanes.end(), 0.0);
        for (int64_t first = block * kBlock; first < end; first += kTile) {
            const int64_t numel = std::min(kTile, end - first);
            copy_source<T>(args, first, numel);
            mix_tile<T>(args, first, numel, mixed, lanes.data());
            if (args.noise.std != 0.0f) add_noise(args.noise, first, numel, mixed);
            use(first, numel, mixed);
        }
        for (int64_t k = 0; k < args.num_peers; ++k) {
            args.partials[block * args.num_peers + k] = sum_lanes(lanes.data() + k * kLanes);
        }
    }
}

}  // namespace ddpcore::cpu
