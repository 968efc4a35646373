// The update rules for one element. The CPU kernels and the CUDA kernels both include this file.
//
// Both are compiled without contraction of a*b+c into one rounding (-ffp-contract=off, -fmad=false). So an element has
// the same bits on every instruction set and device. This costs no time, because memory limits the kernels.
#pragma once

#include <cmath>
#include <cstring>

#include "args.h"

namespace ddpcore {

DDPCORE_HOST_DEVICE double squared(float value) {
    return static_cast<double>(value) * static_cast<double>(value);
}

// base^exponent for exponent >= 0. It uses multiplications only, so that host and device compute the same bits.
DDPCORE_HOST_DEVICE double power(double base, int64_t exponent) {
    double result = 1.0;
    for (; exponent > 0; exponent /= 2, base *= base) {
        if (exponent % 2 != 0) result *= base;
    }
    return result;
}

// ---- values of a whole group or tensor ----

DDPCORE_HOST_DEVICE bool skips_step(const GradScaling& scaling) {
    return scaling.found_inf != nullptr && *scaling.found_inf != 0.0f;
}

// The factor of all gradients: it removes grad_scale, clips the norm as torch.nn.utils.clip_grad_norm_ does, and has
// the sign of ascent or descent.
DDPCORE_HOST_DEVICE float grad_factor(const GradScaling& scaling) {
    double factor = scaling.grad_scale == nullptr ? 1.0 : 1.0 / static_cast<double>(*scaling.grad_scale);
    if (scaling.norm_squared != nullptr && scaling.max_norm != 0.0f) {
        const double clip = scaling.max_norm / (sqrt(*scaling.norm_squared) * factor + 1e-6);
        if (!(clip >= 1.0)) factor *= clip;  // a NaN norm makes all gradients NaN
    }
    return static_cast<float>(scaling.maximize ? -factor : factor);
}

// The count of steps after one more. With 2^24 steps an fp32 number cannot count on by ones, and stays there. Where the
// count is part of the key of random numbers it goes on to the next fp32 number, so that no two steps draw the same
// numbers, up to 2^62 (320 million steps).
DDPCORE_HOST_DEVICE float next_count(float step, bool rounded_states) {
    if (!rounded_states || step < 0x1p24f || step >= 0x1p62f) return step + 1.0f;
    uint32_t bits;
    memcpy(&bits, &step, sizeof bits);
    ++bits;
    memcpy(&step, &bits, sizeof step);
    return step;
}

// The step in the key of random numbers.
DDPCORE_HOST_DEVICE uint64_t step_of(const StepGroup& group) {
    return group.step == nullptr ? 0 : static_cast<uint64_t>(*group.step);
}

DDPCORE_HOST_DEVICE float lr_of(const StepGroup& group) {
    return group.device_lr == nullptr ? group.lr : *group.device_lr;
}

// The factor of the weights under decoupled weight decay.
DDPCORE_HOST_DEVICE float kept_share(const StepGroup& group) {
    return static_cast<float>(1.0 - static_cast<double>(lr_of(group)) * static_cast<double>(group.weight_decay));
}

// ---- SGD and LARS ----

// The options of a group. The CPU kernels take them as constants, so that the loop over elements has no branch. The
// CUDA kernels branch on them: all threads take the same branch, and there are fewer kernels to compile.
enum SgdFlags : int { kDecay = 1, kMomentum = 2, kNesterov = 4 };

DDPCORE_HOST_DEVICE int sgd_flags(const SgdRule& rule, const StepGroup& group) {
    const bool momentum = rule.momentum != 0.0f;
    return (group.weight_decay != 0.0f && !rule.decoupled ? kDecay : 0) | (momentum ? kMomentum : 0) |
           (momentum && rule.nesterov ? kNesterov : 0);
}

// The factors of one tensor's elements.
struct SgdScales {
    float grad;
    float decay;
    float momentum;
    float one_minus_dampening;
    float inner;      // factor of the direction before the momentum
    float outer;      // factor of the direction after the momentum: the learning rate in SGD
    float keep;       // factor of the weight: not 1 under decoupled decay
    bool first_step;  // the momentum is not set yet: it becomes the direction, without dampening
};

DDPCORE_HOST_DEVICE SgdScales sgd_scales(const SgdRule& rule, const StepGroup& group, float grad) {
    return {
        grad,
        rule.decoupled ? 0.0f : group.weight_decay,
        rule.momentum,
        rule.one_minus_dampening,
        1.0f,
        lr_of(group),
        rule.decoupled ? kept_share(group) : 1.0f,
        group.step != nullptr && *group.step == 0.0f};
}

// d = g + decay*w;  m = momentum*m + (1-dampening)*d;  d = nesterov ? d + momentum*m : m;  w -= lr*d
DDPCORE_HOST_DEVICE float sgd_element(float weight, float grad, float& momentum, const SgdScales& scales, int flags) {
    float direction = scales.grad * grad;
    if (flags & kDecay) direction = direction + scales.decay * weight;
    direction = scales.inner * direction;
    if (flags & kMomentum) {
        const float moving = scales.momentum * momentum + scales.one_minus_dampening * direction;
        momentum = scales.first_step ? direction : moving;
        direction = (flags & kNesterov) ? direction + scales.momentum * momentum : momentum;
    }
    return scales.keep * weight - scales.outer * direction;
}

// R = trust_coefficient*|w| / (|g| + decay*|w| + eps); 1 if a norm is zero or the group is not adapted. Decoupled decay
// is not part of the direction, so R does not contain it.
DDPCORE_HOST_DEVICE Trust
lars_trust(const LarsRule& rule, const SgdRule& sgd, const StepGroup& group, float grad, const NormPartials& squares) {
    const double weight_norm = sqrt(squares.weight);
    const double grad_norm = sqrt(squares.update) * fabs(static_cast<double>(grad));
    const double decay = sgd.decoupled ? 0.0 : static_cast<double>(group.weight_decay);
    const bool adapt = group.adapt && weight_norm != 0.0 && grad_norm != 0.0;
    const double ratio = static_cast<double>(rule.trust_coefficient) * weight_norm /
                         (grad_norm + decay * weight_norm + static_cast<double>(rule.eps));
    return {adapt ? ratio : 1.0, weight_norm, grad_norm};
}

DDPCORE_HOST_DEVICE SgdScales lars_scales(SgdScales scales, LarsVariant variant, double ratio) {
    const double lr = scales.outer;
    switch (variant) {
        case LarsVariant::kYou2017:
            scales.inner = static_cast<float>(lr * ratio);
            scales.outer = 1.0f;
            break;
        case LarsVariant::kScaledGrad: scales.inner = static_cast<float>(ratio); break;
        case LarsVariant::kScaledLr: scales.outer = static_cast<float>(lr * ratio); break;
    }
    return scales;
}

// ---- Adam and LAMB ----

// The factors of a group's elements, computed in double and rounded.
struct AdamScales {
    float grad;
    float beta1, one_minus_beta1;
    float beta2, one_minus_beta2;
    float debias1, debias2;  // 1 / (1 - beta^step), or 1
    float eps;
    float coupled_decay;
    float update_decay;
    float keep;
};

DDPCORE_HOST_DEVICE AdamScales adam_scales(const AdamRule& rule, const StepGroup& group, float grad) {
    const int64_t step = static_cast<int64_t>(*group.step) + 1;
    return {
        grad,
        static_cast<float>(rule.beta1),
        static_cast<float>(1.0 - rule.beta1),
        static_cast<float>(rule.beta2),
        static_cast<float>(1.0 - rule.beta2),
        rule.debias ? static_cast<float>(1.0 / (1.0 - power(rule.beta1, step))) : 1.0f,
        rule.debias ? static_cast<float>(1.0 / (1.0 - power(rule.beta2, step))) : 1.0f,
        rule.eps,
        rule.decay == AdamDecay::kCoupled ? group.weight_decay : 0.0f,
        rule.decay == AdamDecay::kInUpdate ? group.weight_decay : 0.0f,
        rule.decay == AdamDecay::kDecoupled ? kept_share(group) : 1.0f};
}

// m = beta1*m + (1-beta1)*g;  v = beta2*v + (1-beta2)*g^2
DDPCORE_HOST_DEVICE void adam_moments(
    float weight, float grad, float& exp_avg, float& exp_avg_sq, const AdamScales& scales) {
    const float direction = scales.grad * grad + scales.coupled_decay * weight;
    exp_avg = scales.beta1 * exp_avg + scales.one_minus_beta1 * direction;
    exp_avg_sq = scales.beta2 * exp_avg_sq + scales.one_minus_beta2 * (direction * direction);
}

// u = m_hat / (sqrt(v_hat) + eps) + decay*w. Both passes of LAMB over a tensor compute it, from the same values.
DDPCORE_HOST_DEVICE float adam_update(float weight, float exp_avg, float exp_avg_sq, const AdamScales& scales) {
    const float denominator = sqrtf(scales.debias2 * exp_avg_sq) + scales.eps;
    return (scales.debias1 * exp_avg) / denominator + scales.update_decay * weight;
}

// step_size: the learning rate, in LAMB times the trust ratio.
DDPCORE_HOST_DEVICE float adam_element(float weight, float update, float step_size, float keep) {
    return keep * weight - step_size * update;
}

// phi(|w|) / |u|, clamped to [min_ratio, max_ratio]; 1 if a norm is zero or the group is not adapted.
DDPCORE_HOST_DEVICE Trust lamb_trust(const LambRule& rule, const StepGroup& group, const NormPartials& squares) {
    const double weight_norm = sqrt(squares.weight), update_norm = sqrt(squares.update);
    double ratio = 1.0;
    if (group.adapt && weight_norm != 0.0 && update_norm != 0.0) {
        double phi = weight_norm;
        if (phi < static_cast<double>(rule.min_weight_norm)) phi = static_cast<double>(rule.min_weight_norm);
        if (phi > static_cast<double>(rule.max_weight_norm)) phi = static_cast<double>(rule.max_weight_norm);
        ratio = phi / update_norm;
        if (ratio < static_cast<double>(rule.min_ratio)) ratio = static_cast<double>(rule.min_ratio);
        if (ratio > static_cast<double>(rule.max_ratio)) ratio = static_cast<double>(rule.max_ratio);
    }
    return {ratio, weight_norm, update_norm};
}

DDPCORE_HOST_DEVICE float lamb_step_size(const StepGroup& group, const Trust& trust) {
    return static_cast<float>(static_cast<double>(lr_of(group)) * trust.ratio);
}

// ---- averaging ----

// Adds one term of a mix. The order of the terms decides the bits.
DDPCORE_HOST_DEVICE float mix_element(float mixed, float peer_weight, float peer) {
    return mixed + peer_weight * peer;
}

}  // namespace ddpcore
