// What adamw_step_ and lamb_step_ share.
#pragma once

#include "storage.cuh"

namespace ddpcore::cuda {

// The addresses of a block's elements. The moments are fp32, so all vectors have 4 elements, as those of fp32.
template <typename T, bool Master>
struct AdamPlace {
    static constexpr int kWidth = kVector<float>;

    T* param;
    float* master;
    const T* grad;
    float* exp_avg;
    float* exp_avg_sq;
    int numel;
    bool whole;  // complete, and all pointers aligned

    __device__ __forceinline__ AdamPlace(const AdamSegment& segment, int64_t first)
        : param(static_cast<T*>(segment.param) + first),
          master(Master ? segment.master + first : nullptr),
          grad(static_cast<const T*>(segment.grad) + first),
          exp_avg(segment.exp_avg + first),
          exp_avg_sq(segment.exp_avg_sq + first),
          numel(static_cast<int>(min(kBlock, segment.numel - first))),
          whole(
              numel == kBlock && is_aligned(param) && is_aligned(master) && is_aligned(grad) && is_aligned(exp_avg) &&
              is_aligned(exp_avg_sq)) {}
};

}  // namespace ddpcore::cuda
