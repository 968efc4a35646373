// SGD over one part of a tensor, for sgd_step_ and lars_step_.
#pragma once

#include <type_traits>

#include "states.h"

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

// The same, and if states are rounded, of at most a block: it is stepped on copies in fp32, as beside a master, and the
// momentum is rounded.
template <typename T, bool Master>
DDPCORE_INLINE void sgd_part(
    const SgdArgs& args, const SgdSegment& segment, int64_t first, int64_t last, const SgdScales& scales, int flags) {
    SgdSegment part = segment;
    int64_t begin = first, end = last;
    float momentum[kBlock], weights[kBlock];
    if (args.rounded_states) {
        begin = 0;
        end = last - first;
        part.param = static_cast<T*>(segment.param) + first;
        part.grad = static_cast<const T*>(segment.grad) + first;
        part.momentum = momentum;
        part.master = weights;
        widen_states(static_cast<BFloat16*>(segment.momentum) + first, momentum, end);
        if (Master) widen(args.dtype, segment.param, first, weights, end);
    }
    sgd_part<T, Master>(part, begin, end, scales, flags);
    if (args.rounded_states) {
        BFloat16* stored = static_cast<BFloat16*>(segment.momentum) + first;
        round_states(draw_of(args, segment, first), end, momentum, stored, nullptr, nullptr);
    }
}

// Blocks of a part for sgd_part, of at most `run`.
DDPCORE_INLINE int64_t run_of(const SgdArgs& args, int64_t run) {
    return args.rounded_states ? 1 : run;
}

// Calls fn.template operator()<T, Master>(): if states are rounded, 16-bit weights are stepped as beside a master.
template <typename Fn>
DDPCORE_INLINE void with_stepped_weights(const SgdArgs& args, Fn&& fn) {
    with_weights(args.dtype, args.masters || args.rounded_states, fn);
}

}  // namespace ddpcore::cpu
