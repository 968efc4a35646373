// The loop of an SGD step over one run of elements, shared by sgd_step_ (weights in memory) and mix_sgd_step_ (weights
// just mixed, still in cache).
#pragma once

#include "dispatch.h"

namespace ddpcore::cpu {

#if defined(__GNUC__) && !defined(__clang__)
#define DDPCORE_IVDEP _Pragma("GCC ivdep")
#else
#define DDPCORE_IVDEP
#endif

template <int flags, typename Weight, typename T>
DDPCORE_INLINE void sgd_run(
    T* param, const Weight* weight, const T* __restrict grad, T* __restrict momentum, int64_t numel,
    SgdRule rule) {  // by value: a store to param could otherwise change the rule, and the loop would not vectorise
    // `weight` may be `param` itself: element i is read before it is written, and no other element is touched.
    DDPCORE_IVDEP
    for (int64_t i = 0; i < numel; ++i) {
        float buffer = 0.0f;
        if constexpr (reads_momentum(flags)) buffer = load(momentum[i]);
        const float updated = sgd_element(load(weight[i]), load(grad[i]), buffer, rule, flags);
        param[i] = store<T>(updated);
        if constexpr ((flags & kMomentum) != 0) momentum[i] = store<T>(buffer);
    }
}

}  // namespace ddpcore::cpu
