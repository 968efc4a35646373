// One element of an SGD step, shared by sgd_step_ (the weight from memory) and mix_sgd_step_ (the weight just mixed).
#pragma once

#include "dispatch.h"

namespace ddpcore::cpu {

template <int flags, typename T>
DDPCORE_INLINE void sgd_at(T* param, float weight, const T* grad, T* momentum, int64_t i, const SgdRule& rule) {
    float buffer = 0.0f;
    if constexpr (reads_momentum(flags)) buffer = load(momentum[i]);
    param[i] = store<T>(sgd_element(weight, load(grad[i]), buffer, rule, flags));
    if constexpr ((flags & kMomentum) != 0) momentum[i] = store<T>(buffer);
}

}  // namespace ddpcore::cpu
