// The update rules, one element at a time, written once: the CPU kernels and the CUDA kernels compile this same file.
//
// Both sides are compiled without contraction of a*b+c into one rounding (-ffp-contract=off, -fmad=false). The kernels
// are bound by memory, so this costs nothing, and every element has the same bits on every instruction set and device.
#pragma once

#include "args.h"

namespace ddpcore {

// The switches of SgdRule. The CPU kernels pass them as constants, so that the loop over elements has no branch; on
// CUDA they are the same for all threads, and a branch costs less than ten times as many kernels.
enum SgdFlags : int { kDecay = 1, kMomentum = 2, kFirstStep = 4, kNesterov = 8 };

inline int sgd_flags(const SgdRule& rule) {
    const bool momentum = rule.momentum != 0.0f;
    return (rule.weight_decay != 0.0f ? kDecay : 0) | (momentum ? kMomentum : 0) |
           (momentum && rule.first_step ? kFirstStep : 0) | (momentum && rule.nesterov ? kNesterov : 0);
}

// torch.optim.SGD:  d = g + decay*w;  m = momentum*m + (1-dampening)*d;  d = nesterov ? d + momentum*m : m;  w -= lr*d
DDPCORE_HOST_DEVICE float sgd_element(float weight, float grad, float& momentum, const SgdRule& rule, int flags) {
    float direction = rule.grad_sign * grad;
    if (flags & kDecay) direction = direction + rule.weight_decay * weight;
    if (flags & kMomentum) {
        momentum = (flags & kFirstStep) ? direction : rule.momentum * momentum + rule.one_minus_dampening * direction;
        direction = (flags & kNesterov) ? direction + rule.momentum * momentum : momentum;
    }
    return weight - rule.lr * direction;
}

// Whether a step reads the momentum buffer: the first one only writes it.
constexpr DDPCORE_HOST_DEVICE bool reads_momentum(int flags) {
    return (flags & kMomentum) != 0 && (flags & kFirstStep) == 0;
}

// One term of a mix, in the order in which the terms are given.
DDPCORE_HOST_DEVICE float mix_element(float mixed, float peer_weight, float peer) {
    return mixed + peer_weight * peer;
}

DDPCORE_HOST_DEVICE double squared(float difference) {
    return static_cast<double>(difference) * static_cast<double>(difference);
}

}  // namespace ddpcore
