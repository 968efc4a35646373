// SGD over one part of a tensor, for sgd_step_ and lars_step_.
#pragma once

#include <type_traits>

#include "dispatch.h"

namespace ddpcore::cpu {

template <int flags, typename M>
DDPCORE_INLINE float sgd_at(float weight, float grad, M* momentum, int64_t i, const SgdScales& scales) {
    float buffer = 0.0f;
    if constexpr ((flags & kMomentum) != 0) buffer = load(momentum[i]);
    const float result = sgd_element(weight, grad, buffer, scales, flags);
    if constexpr ((flags & kMomentum) != 0) momentum[i] = store<M>(buffer);
    return result;
}

// Elements [first, last) of a segment.
template <typename T, bool Master>
DDPCORE_INLINE void sgd_part(const SgdSegment& segment, int64_t first, int64_t last, SgdScales scales, int flags) {
    using M = std::conditional_t<Master, float, T>;  // the storage type of the momentum
    const Weights<T, Master> weights{static_cast<T*>(segment.param) + first, Master ? segment.master + first : nullptr};
    const T* grad = static_cast<const T*>(segment.grad) + first;
    M* momentum = segment.momentum ? static_cast<M*>(segment.momentum) + first : nullptr;
    with_sgd_flags(flags, [&]<int constant>() __attribute__((always_inline)) {
        DDPCORE_IVDEP
        for (int64_t i = 0; i < last - first; ++i) {
            weights.set(i, sgd_at<constant>(weights[i], load(grad[i]), momentum, i, scales));
        }
    });
}

}  // namespace ddpcore::cpu
