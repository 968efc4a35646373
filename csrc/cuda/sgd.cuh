// One thread's share of an SGD step, used by sgd_step_ (weights from memory) and mix_sgd_step_ (weights just mixed).
#pragma once

#include "storage.cuh"

namespace ddpcore::cuda {

template <typename T>
__device__ __forceinline__ void sgd_share(
    Share<T>& weights, const Share<T>& grads, Share<T>& momenta, const SgdRule& rule, int flags) {
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
        float momentum = reads_momentum(flags) ? load(momenta[i]) : 0.0f;
        weights[i] = store<T>(sgd_element(load(weights[i]), load(grads[i]), momentum, rule, flags));
        if (flags & kMomentum) momenta[i] = store<T>(momentum);
    }
}

}  // namespace ddpcore::cuda
