// The mix of one block, for mix_ and for steps that begin with a mix, and the peers as kernel arguments.
#pragma once

#include "../random.h"
#include "sum.cuh"

namespace ddpcore::cuda {

inline constexpr int kFewPeers = static_cast<int>(kMaxStepPeers);
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
    bool aligned;  // weights, source and all peers
    const void* peers[capacity];
    float peer_weights[capacity];
    Noise noise;
};

// Calls fn.template operator()<capacity>() with the capacity of a table for this number of peers or rows of others.
template <typename Fn>
cudaError_t with_peers(int64_t num_peers, Fn&& fn) {
    if (num_peers <= kFewPeers) return fn.template operator()<kFewPeers>();
    return fn.template operator()<kManyPeers>();
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
template <int width>
__device__ __forceinline__ void add_noise(float (&mixed)[kShare], const Noise& noise, int64_t first) {
#pragma unroll 1
    for (int four = 0; four < kShare; four += 4) {
        float normals[4];
        normals_from(noise, static_cast<uint64_t>(noise.first + first + place_of<width>(four)), normals);
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
            if (i / 4 * 4 == four) mixed[i] = mix_element(mixed[i], noise.std, normals[i % 4]);
        }
    }
}

// weights <- the mix, rounded to the storage type, of this thread's share of `numel` elements from `first` on. Calls
// distance(k, sum) with the thread's part of the squared distance to peer k. It loads one peer at a time: to load the
// next one ahead would take 16 more registers in fp32, and fewer CUDA blocks would fit on a multiprocessor. The loads
// of the first peer are issued before the weights are used, so that both are in flight together.
template <bool whole, typename T, int width, int capacity, typename Distance>
__device__ __forceinline__ void mix_share(
    Share<T, width>& weights, const MixTable<capacity>& table, int64_t first, int numel, Distance&& distance) {
    float mixed[kShare];
#pragma unroll 1
    for (int k = 0; k < table.num_peers; ++k) {
        Share<T, width> peer;
        read<whole>(peer, static_cast<const T*>(table.peers[k]) + first, numel);
        convert_after(weights);
        const float peer_weight = table.peer_weights[k];
        double sum = 0.0;
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
            const float weight = load(weights[i]), before = k == 0 ? table.self_weight * weight : mixed[i];
            sum = add_square(sum, weight - load(peer[i]));
            mixed[i] = mix_element(before, peer_weight, load(peer[i]));
        }
        distance(k, sum);
    }
    if (table.num_peers == 0) {
#pragma unroll
        for (int i = 0; i < kShare; ++i) mixed[i] = table.self_weight * load(weights[i]);
    }
    if (table.noise.std != 0.0f) add_noise<width>(mixed, table.noise, first);
#pragma unroll
    for (int i = 0; i < kShare; ++i) weights[i] = store<T>(mixed[i]);
}

template <int capacity>
MixTable<capacity> mix_table(const MixArgs& args) {
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
    table.aligned = is_aligned(args.weights) && is_aligned(table.source) &&
                    std::all_of(args.peers, args.peers + args.num_peers, is_aligned);
    return table;
}

// ---- in a step ----

// The weights that a step starts from: those that are stored,
struct NoMix {
    static constexpr int kResident = 8;  // no bound of its own
    bool aligned = true;

    template <typename T, bool Master, int width, typename Place>
    __device__ __forceinline__ void read_weights(Weights<T, Master, width>& weights, const Place& at) const {
        read(weights, at.param, at.master);
    }
    template <typename T, bool Master, int width, typename Place>
    __device__ __forceinline__ void mix_weights(Weights<T, Master, width>&, const Place&) const {}
    template <typename Place>
    __device__ __forceinline__ void mix_block(const Place&) const {}
};

// or their mix, which is computed between read_weights() and the step. A block that is not whole is mixed in memory.
struct StepMix : MixTable<kFewPeers> {
    static constexpr int kResident = 2;  // 128 registers

    template <typename T, int width, typename Place>
    __device__ __forceinline__ void read_weights(Weights<T, false, width>& weights, const Place& at) const {
        read<true>(weights.values, source_of<T>(at), at.numel);
    }
    template <typename T, int width, typename Place>
    __device__ __forceinline__ void mix_weights(Weights<T, false, width>& weights, const Place& at) const {
        mix_share<true>(weights.values, *this, first_of<T>(at), at.numel, [](int, double) {});
    }
    template <typename Place>
    __device__ __forceinline__ void mix_block(const Place& at) const {
        using T = std::remove_pointer_t<decltype(at.param)>;
        Share<T> share;
        read<false>(share, source_of<T>(at), at.numel);
        mix_share<false>(share, *this, first_of<T>(at), at.numel, [](int, double) {});
        write<false>(share, at.param, at.numel);
        __syncthreads();  // the step of the block may give its elements to other threads
    }

  private:
    template <typename T, typename Place>
    __device__ __forceinline__ int64_t first_of(const Place& at) const {
        return at.param - static_cast<const T*>(weights);
    }
    template <typename T, typename Place>
    __device__ __forceinline__ const T* source_of(const Place& at) const {
        return static_cast<const T*>(source) + first_of<T>(at);
    }
};

// Calls fn.template operator()<T, Master, Rounded>(mix) for the storage of a step's weights and states, and its mix.
template <typename Segment, typename Fn>
cudaError_t with_mix(const StepArgs<Segment>& args, Fn&& fn) {
    if (args.rounded_states) {
        if (args.masters || args.mix != nullptr) return cudaErrorInvalidValue;
        return with_storage(args.dtype, [&](auto* tag) {
            return fn.template operator()<std::remove_pointer_t<decltype(tag)>, false, true>(NoMix{});
        });
    }
    if (args.mix == nullptr) {
        return with_weights(args.dtype, args.masters, [&]<typename T, bool Master>() {
            return fn.template operator()<T, Master, false>(NoMix{});
        });
    }
    if (args.masters || args.mix->num_peers > kFewPeers) return cudaErrorInvalidValue;
    const StepMix mix{mix_table<kFewPeers>(*args.mix)};
    return with_storage(args.dtype, [&](auto* tag) {
        return fn.template operator()<std::remove_pointer_t<decltype(tag)>, false, false>(mix);
    });
}

}  // namespace ddpcore::cuda
