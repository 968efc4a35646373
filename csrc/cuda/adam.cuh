// What adamw_step_ and lamb_step_ share.
#pragma once

#include "states.cuh"

namespace ddpcore::cuda {

// The addresses of a block's elements. All vectors have 4 elements, as fp32 vectors do: the moments are fp32, or bf16
// if they are rounded.
template <typename T, bool Master, bool Rounded>
struct AdamPlace {
    static constexpr int kWidth = kVector<float>;
    using Moment = std::conditional_t<Rounded, __nv_bfloat16, float>;
    using Words = ShareWords<Rounded, kWidth>;

    T* param;
    float* master;
    const T* grad;
    Moment* exp_avg;
    Moment* exp_avg_sq;
    int64_t index;  // of the first element among the random numbers
    int numel;
    bool whole;  // complete, and all pointers aligned

    __device__ __forceinline__ AdamPlace(const AdamSegment& segment, int64_t first)
        : param(static_cast<T*>(segment.param) + first),
          master(Master ? segment.master + first : nullptr),
          grad(static_cast<const T*>(segment.grad) + first),
          exp_avg(static_cast<Moment*>(segment.exp_avg) + first),
          exp_avg_sq(static_cast<Moment*>(segment.exp_avg_sq) + first),
          index(Rounded ? segment.first_index + first : 0),
          numel(static_cast<int>(min(kBlock, segment.numel - first))),
          whole(
              numel == kBlock && is_aligned(param) && is_aligned(master) && is_aligned(grad) && is_aligned(exp_avg) &&
              is_aligned(exp_avg_sq)) {}
};

// Steps the moments of one element. The update is formed of them as they are stored, so that the passes of LAMB agree.
template <bool Rounded, typename Moment>
__device__ __forceinline__ void step_moments(
    float weight, float grad, Moment& exp_avg, Moment& exp_avg_sq, const AdamScales& scales, uint32_t word) {
    float first = load(exp_avg), second = load(exp_avg_sq);
    adam_moments(weight, grad, first, second, scales);
    exp_avg = store_state<Moment, Rounded>(State::kFirst, first, word);
    exp_avg_sq = store_state<Moment, Rounded>(State::kSecond, second, word);
}

}  // namespace ddpcore::cuda
