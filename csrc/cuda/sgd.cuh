// One thread's share of an SGD step, used by sgd_step_ (weights from memory) and mix_sgd_step_ (weights just mixed).
#pragma once

#include "storage.cuh"

namespace ddpcore::cuda {

template <int flags>
inline constexpr bool kReadsMomentum = (flags & kMomentum) != 0 && (flags & kFirstStep) == 0;

template <int flags, typename T>
__device__ __forceinline__ void sgd_share(
    Share<T>& weights, const Share<T>& grads, Share<T>& momenta, const SgdRule& rule) {
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
        float momentum = 0.0f;
        if constexpr (kReadsMomentum<flags>) momentum = load(momenta[i]);
        weights[i] = store<T>(sgd_element<flags>(load(weights[i]), load(grads[i]), momentum, rule));
        if constexpr ((flags & kMomentum) != 0) momenta[i] = store<T>(momentum);
    }
}

}  // namespace ddpcore::cuda
