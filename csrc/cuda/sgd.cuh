// One thread's share of an SGD step, for sgd_step_ and lars_step_.
#pragma once

#include "storage.cuh"

namespace ddpcore::cuda {

// The scales of a group.
struct SgdGroupScales {
    SgdScales sgd;
    int flags;
};

DDPCORE_HOST_DEVICE SgdGroupScales sgd_group_scales(const SgdRule& rule, const StepGroup& group, float grad) {
    return {sgd_scales(rule, group, grad), sgd_flags(rule, group)};
}

// The addresses of a block's elements.
template <typename T, bool Master>
struct SgdPlace {
    using Momentum = std::conditional_t<Master, float, T>;  // the storage type
    static constexpr int kWidth = Master ? kVector<float> : kVector<T>;

    T* param;
    float* master;
    const T* grad;
    Momentum* momentum;
    int numel;
    bool whole;  // complete, and all pointers aligned

    __device__ __forceinline__ SgdPlace(const SgdSegment& segment, int64_t first)
        : param(static_cast<T*>(segment.param) + first),
          master(Master ? segment.master + first : nullptr),
          grad(static_cast<const T*>(segment.grad) + first),
          momentum(segment.momentum == nullptr ? nullptr : static_cast<Momentum*>(segment.momentum) + first),
          numel(static_cast<int>(min(kBlock, segment.numel - first))),
          whole(
              numel == kBlock && is_aligned(param) && is_aligned(master) && is_aligned(grad) && is_aligned(momentum)) {}
};

template <typename T, bool Master, int width, typename M>
__device__ __forceinline__ void sgd_share(
    Weights<T, Master, width>& weights, const Share<T, width>& grads, Share<M, width>& momenta, const SgdScales& scales,
    int flags) {
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
        float momentum = (flags & kMomentum) ? load(momenta[i]) : 0.0f;
        weights.set(i, sgd_element(weights[i], load(grads[i]), momentum, scales, flags));
        if (flags & kMomentum) momenta[i] = store<M>(momentum);
    }
}

// The step of an incomplete or misaligned block.
template <typename T, bool Master>
__device__ __forceinline__ void sgd_by_element(const SgdPlace<T, Master>& at, const SgdScales& scales, int flags) {
    using Momentum = typename SgdPlace<T, Master>::Momentum;
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
            if (flags & kMomentum) at.momentum[i] = store<Momentum>(momentum);
        }
    }
}

}  // namespace ddpcore::cuda
