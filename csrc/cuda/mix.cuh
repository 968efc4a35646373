// The mix of one block, for mix_ and mix_sgd_step_, and the peers as kernel arguments.
#pragma once

#include "../random.h"
#include "sum.cuh"

namespace ddpcore::cuda {

inline constexpr int kFewPeers = 8;
inline constexpr int kOldPeers = 320;                           // in kOldArgumentBytes
inline constexpr int kManyPeers = static_cast<int>(kMaxPeers);  // 12 KiB of kernel arguments

template <int capacity>
struct MixTable {
    void* weights;
    const void* source;  // the weights before the mix
    double* partials;
    int64_t numel;
    int64_t num_blocks;
    int32_t num_peers;
    float self_weight;
    bool aligned;  // weights, source, all peers and, in mix_sgd_step_, the gradient and momentum
    const void* peers[capacity];
    float peer_weights[capacity];
    Noise noise;
};

// Calls fn.template operator()<capacity>() with the capacity of a table for this number of peers or rows of others.
template <typename Fn>
cudaError_t with_peers(int64_t num_peers, Fn&& fn) {
    if (num_peers <= kFewPeers) return fn.template operator()<kFewPeers>();
    return has_large_arguments() ? fn.template operator()<kManyPeers>() : fn.template operator()<kOldPeers>();
}

// The block of the tensors that a CUDA block processes.
struct Place {
    int64_t block;
    int64_t first;  // element
    int numel;
};

template <int capacity>
__device__ __forceinline__ Place place_of_block(const MixTable<capacity>& table, int64_t block) {
    const int64_t first = block * kBlock;
    return {block, first, static_cast<int>(min(kBlock, table.numel - first))};
}

// values[k] = normal number index + k. One draw is enough if index is a multiple of 4, which holds for all shares of a
// block or for none.
__device__ __forceinline__ void normals_from(const Noise& noise, uint64_t index, float (&values)[4]) {
    const Normals here = four_normals(noise.seed, noise.step, index / 4);
    Normals next{};
    if (index % 4 != 0) next = four_normals(noise.seed, noise.step, index / 4 + 1);
    float both[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) both[k] = k < 4 ? here.values[k] : next.values[k - 4];
#pragma unroll
    for (int k = 0; k < 7; ++k) both[k] = (index & 1) != 0 ? both[k + 1] : both[k];
#pragma unroll
    for (int k = 0; k < 4; ++k) values[k] = (index & 2) != 0 ? both[k + 2] : both[k];
}

// Four elements of the share at a time, in a loop that is not unrolled, because four normals take about two hundred
// instructions. Every iteration names all elements of `mixed`, so that the array stays in registers.
template <typename T>
__device__ __forceinline__ void add_noise(float (&mixed)[kShare], const Noise& noise, int64_t first) {
#pragma unroll 1
    for (int four = 0; four < kShare; four += 4) {
        float normals[4];
        normals_from(noise, static_cast<uint64_t>(noise.first + first + place_of<kVector<T>>(four)), normals);
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
            if (i / 4 * 4 == four) mixed[i] = mix_element(mixed[i], noise.std, normals[i % 4]);
        }
    }
}

// weights <- the mix, rounded to the storage type. Writes the block's row of partial sums. It loads one peer at a time:
// to load the next one ahead would take 16 more registers in fp32, and fewer CUDA blocks would fit on a multiprocessor.
// The loads of the first peer are issued before the weights are used, so that both are in flight together.
template <bool whole, typename T, int capacity>
__device__ __forceinline__ void mix_share(
    Share<T>& weights, const MixTable<capacity>& table, const Place& place, BlockSum<kThreads>& block_sum) {
    float mixed[kShare];
#pragma unroll 1
    for (int k = 0; k < table.num_peers; ++k) {
        Share<T> peer;
        read<whole>(peer, static_cast<const T*>(table.peers[k]) + place.first, place.numel);
        convert_after(weights);
        const float peer_weight = table.peer_weights[k];
        double sum = 0.0;
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
            const float weight = load(weights[i]), before = k == 0 ? table.self_weight * weight : mixed[i];
            sum = add_square(sum, weight - load(peer[i]));
            mixed[i] = mix_element(before, peer_weight, load(peer[i]));
        }
        const double total = block_sum(sum);
        if (threadIdx.x == 0) table.partials[place.block * table.num_peers + k] = total;
    }
    if (table.num_peers == 0) {
#pragma unroll
        for (int i = 0; i < kShare; ++i) mixed[i] = table.self_weight * load(weights[i]);
    }
    if (table.noise.std != 0.0f) add_noise<T>(mixed, table.noise, place.first);
#pragma unroll
    for (int i = 0; i < kShare; ++i) weights[i] = store<T>(mixed[i]);
}

template <int capacity>
MixTable<capacity> mix_table(const MixArgs& args, bool aligned) {
    MixTable<capacity> table;
    table.weights = args.weights;
    table.source = args.source != nullptr ? args.source : args.weights;
    table.partials = args.partials;
    table.numel = args.numel;
    table.num_blocks = num_blocks_of(args.numel);
    table.num_peers = static_cast<int32_t>(args.num_peers);
    table.self_weight = args.self_weight;
    table.noise = args.noise;
    std::copy(args.peers, args.peers + args.num_peers, table.peers);
    std::copy(args.peer_weights, args.peer_weights + args.num_peers, table.peer_weights);
    table.aligned = aligned && is_aligned(args.weights) && is_aligned(table.source) &&
                    std::all_of(args.peers, args.peers + args.num_peers, is_aligned);
    return table;
}

}  // namespace ddpcore::cuda
