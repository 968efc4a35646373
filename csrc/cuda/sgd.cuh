// One thread's share of an SGD step, for sgd_step_ and lars_step_.
#pragma once

#include "states.cuh"

namespace ddpcore::cuda {

// The scales of a group.
template <bool Rounded>
struct SgdGroupScales {
    SgdScales sgd;
    int flags;
    StateKey<Rounded> key;
};

template <bool Rounded>
DDPCORE_HOST_DEVICE SgdGroupScales<Rounded> sgd_group_scales(
    const SgdRule& rule, const StepGroup& group, float grad, uint64_t seed) {
    return {sgd_scales(rule, group, grad), sgd_flags(rule, group), state_key<Rounded>(seed, group)};
}

// The addresses of a block's elements.
template <typename T, bool Master, bool Rounded>
struct SgdPlace {
    using Momentum = std::conditional_t<Rounded, __nv_bfloat16, std::conditional_t<Master, float, T>>;  // as stored
    static constexpr int kWidth = Master ? kVector<float> : kVector<T>;

    T* param;
    float* master;
    const T* grad;
    Momentum* momentum;
    int64_t index;  // of the first element among the random numbers
    int numel;
    bool whole;  // complete, and all pointers aligned

    __device__ __forceinline__ SgdPlace(const SgdSegment& segment, int64_t first)
        : param(static_cast<T*>(segment.param) + first),
          master(Master ? segment.master + first : nullptr),
          grad(static_cast<const T*>(segment.grad) + first),
          momentum(segment.momentum == nullptr ? nullptr : static_cast<Momentum*>(segment.momentum) + first),
          index(Rounded ? segment.first_index + first : 0),
          numel(static_cast<int>(min(kBlock, segment.numel - first))),
          whole(
              numel == kBlock && is_aligned(param) && is_aligned(master) && is_aligned(grad) && is_aligned(momentum)) {}
};

// The step of a thread's share of a block, whose first element has this index among the random numbers.
template <typename T, bool Master, int width, typename M, bool Rounded>
__device__ __forceinline__ void sgd_share(
    Weights<T, Master, width>& weights, const Share<T, width>& grads, Share<M, width>& momenta, const SgdScales& scales,
    int flags, const StateKey<Rounded>& key, int64_t index) {
    ShareWords<Rounded, width> words(key, index);
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
        float momentum = (flags & kMomentum) ? load(momenta[i]) : 0.0f;
        weights.set(i, sgd_element(weights[i], load(grads[i]), momentum, scales, flags));
        const uint32_t word = words.of(i);
        if (flags & kMomentum) momenta[i] = store_state<M, Rounded>(State::kFirst, momentum, word);
    }
}

// The step of an incomplete or misaligned block.
template <typename T, bool Master, bool Rounded>
__device__ __forceinline__ void sgd_by_element(
    const SgdPlace<T, Master, Rounded>& at, const SgdScales& scales, int flags, const StateKey<Rounded>& key) {
    using Momentum = typename SgdPlace<T, Master, Rounded>::Momentum;
#pragma unroll 1
    for (int first = static_cast<int>(threadIdx.x); first < at.numel; first += kAhead * kThreads) {
        StoredWeight<T, Master> weights[kAhead]{};
        T grads[kAhead]{};
        Momentum momenta[kAhead]{};
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
            const int i = first + k * kThreads;
            if (i >= at.numel) continue;
            weights[k] = read_weight<Master>(at.param, at.master, i);
            grads[k] = at.grad[i];
            if (flags & kMomentum) momenta[k] = at.momentum[i];
        }
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
            const int i = first + k * kThreads;
            if (i >= at.numel) break;
            float momentum = load(momenta[k]);
            const float weight = sgd_element(weights[k].value(), load(grads[k]), momentum, scales, flags);
            write_weight<Master>(weight, at.param, at.master, i);
            const uint32_t word = state_word<Rounded>(key, at.index + i);
            if (flags & kMomentum) at.momentum[i] = store_state<Momentum, Rounded>(State::kFirst, momentum, word);
        }
    }
}

}  // namespace ddpcore::cuda
