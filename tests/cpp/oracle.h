// What the optimizers' equations say, in real numbers; written from the equations and not by csrc/math.h.
#pragma once

#include "rounding.h"
#include "take_steps.h"

namespace ddpcore::test {

// The gradient's true size is the stored one over the scale. Where it is longer than max_norm it is shortened to it (by
// torch's formula, whose 1e-6 keeps a zero norm from dividing by zero); ascent goes against it.
inline Real gradient_factor(const ScalingSetting& scaling) {
    double factor = 1.0 / scaling.grad_scale.value_or(1.0f);
    if (scaling.norm_squared && scaling.max_norm > 0.0f) {
        const double true_norm = std::sqrt(*scaling.norm_squared) * factor;
        factor *= std::min(1.0, scaling.max_norm / (true_norm + 1e-6));
    }
    return constant(scaling.maximize ? -factor : factor);
}

// What is left of a weight under decoupled decay.
inline Real left_by_decay(const GroupSetting& group) {
    return constant(1.0 - static_cast<double>(group.lr) * group.weight_decay);
}

struct Moved {
    Real direction, momentum;
};

// Momentum of torch.optim.SGD: m = mu*m + (1 - dampening)*d, or d at the first step; the direction is m, or d + mu*m
// with Nesterov.
inline Moved heavy_ball(const Real& d, const Real& momentum, const SgdRule& rule, bool first_step) {
    if (rule.momentum == 0.0f) return {d, momentum};
    const Real mu{rule.momentum}, fresh{rule.one_minus_dampening};
    const Real moved = first_step ? d : mu * momentum + fresh * d;
    return {rule.nesterov ? d + mu * moved : moved, moved};
}

// One element before a step, and after it.
struct SgdElement {
    Real weight, momentum;
};

// The gradient with what L2 decay adds to it.
inline Real decayed_gradient(const Real& weight, const Real& grad, const GroupSetting& group, bool decoupled) {
    return decoupled ? grad : grad + Real{group.weight_decay} * weight;
}

inline SgdElement exact_sgd(
    const SgdElement& from, const Real& grad, const GroupSetting& group, const SgdRule& rule, bool first_step) {
    const Real d = decayed_gradient(from.weight, grad, group, rule.decoupled);
    const Moved moved = heavy_ball(d, from.momentum, rule, first_step);
    const Real kept = rule.decoupled ? left_by_decay(group) * from.weight : from.weight;
    return {kept - Real{group.lr} * moved.direction, moved.momentum};
}

// The three places of the learning rate and the trust ratio R, which agree only while both are constant.
inline SgdElement exact_lars(
    const SgdElement& from, const Real& grad, const GroupSetting& group, const SgdRule& rule, bool first_step,
    LarsVariant variant, const Real& ratio) {
    const Real d = decayed_gradient(from.weight, grad, group, rule.decoupled);
    const Real kept = rule.decoupled ? left_by_decay(group) * from.weight : from.weight;
    const Real lr{group.lr}, lr_ratio = rounded(group.lr * ratio.value, group.lr * ratio.error);
    if (variant == LarsVariant::kYou2017) {
        const Moved moved = heavy_ball(lr_ratio * d, from.momentum, rule, first_step);
        return {kept - moved.direction, moved.momentum};
    }
    if (variant == LarsVariant::kScaledGrad) {
        const Moved moved = heavy_ball(rounded(ratio.value, ratio.error) * d, from.momentum, rule, first_step);
        return {kept - lr * moved.direction, moved.momentum};
    }
    const Moved moved = heavy_ball(d, from.momentum, rule, first_step);
    return {kept - lr_ratio * moved.direction, moved.momentum};
}

// How far a norm that is formed in double may be from exact, relative to it: the squares of fp32 values are exact, each
// addition and the root err by 2^-53 at most.
inline double norm_tolerance(int64_t numel) {
    return static_cast<double>(numel + 2) * 0x1p-53;
}

// |values| of count elements.
template <typename Value>
double exact_norm(int64_t numel, Value&& value) {
    long double sum = 0.0L;
    for (int64_t i = 0; i < numel; ++i) sum += static_cast<long double>(value(i)) * static_cast<long double>(value(i));
    return static_cast<double>(std::sqrt(sum));
}

// R of one tensor; its error is that of double arithmetic and of the gradients' rounded factor.
struct ExactTrust {
    Real ratio, weight_norm, update_norm;
};

inline Real in_double(double value, double relative_error) {
    return {value, std::abs(value) * relative_error};
}

template <typename Problem>
ExactTrust exact_lars_trust(const Problem& problem, size_t s) {
    const GroupSetting& group = problem.settings[problem.group_of[s]];
    const int64_t numel = problem.sizes[s];
    const Real factor = gradient_factor(problem.scaling);
    const double weight_norm = exact_norm(numel, [&](int64_t i) { return problem.weight(s, i); });
    const double grad_norm =
        std::abs(factor.value) * exact_norm(numel, [&](int64_t i) { return problem.grads.at(s, i); });
    const double decay = problem.rule.decoupled ? 0.0 : group.weight_decay;
    // All terms are positive, so their relative errors do not grow; numerator and denominator, and five operations.
    const double of_grad = norm_tolerance(numel) + std::abs(factor.error / factor.value);
    const double of_ratio = norm_tolerance(numel) + of_grad + 5 * 0x1p-53;
    Real ratio{1.0};
    if (group.adapt && weight_norm > 0.0 && grad_norm > 0.0) {
        const LarsRule& lars = problem.lars;
        ratio =
            in_double(lars.trust_coefficient * weight_norm / (grad_norm + decay * weight_norm + lars.eps), of_ratio);
    }
    return {ratio, in_double(weight_norm, norm_tolerance(numel)), in_double(grad_norm, of_grad)};
}

// ---- Adam and LAMB ----

struct AdamElement {
    Real weight, exp_avg, exp_avg_sq, update;
};

// All but the weight, which in LAMB waits for the trust ratio. beta^step by repeated multiplication.
inline AdamElement exact_adam_update(
    const AdamElement& from, const Real& grad, const GroupSetting& group, const AdamRule& rule, int step) {
    const Real decay{group.weight_decay};
    const Real g = rule.decay == AdamDecay::kCoupled ? grad + decay * from.weight : grad;
    const Real m = constant(rule.beta1) * from.exp_avg + constant(1.0 - rule.beta1) * g;
    const Real v = constant(rule.beta2) * from.exp_avg_sq + constant(1.0 - rule.beta2) * (g * g);
    long double power1 = 1.0L, power2 = 1.0L;
    for (int i = 0; i < step; ++i) power1 *= rule.beta1, power2 *= rule.beta2;
    // A division by 1 - beta^step, which the reciprocal turns into one rounding more.
    const Real m_hat = rule.debias ? constant(static_cast<double>(1.0L / (1.0L - power1))) * m : m;
    const Real v_hat = rule.debias ? constant(static_cast<double>(1.0L / (1.0L - power2))) * v : v;
    const Real adam = m_hat / (square_root(v_hat) + Real{rule.eps});
    return {from.weight, m, v, rule.decay == AdamDecay::kInUpdate ? adam + decay * from.weight : adam};
}

inline Real exact_adam_weight(
    const AdamElement& element, const GroupSetting& group, const AdamRule& rule, const Real& ratio) {
    const Real kept = rule.decay == AdamDecay::kDecoupled ? left_by_decay(group) * element.weight : element.weight;
    return kept - rounded(group.lr * ratio.value, group.lr * ratio.error) * element.update;
}

inline ExactTrust exact_lamb_trust(
    const std::vector<AdamElement>& elements, const GroupSetting& group, const LambRule& rule) {
    const auto numel = static_cast<int64_t>(elements.size());
    const auto at = [&](int64_t i) { return elements[static_cast<size_t>(i)]; };
    const Real weight_norm =
        in_double(exact_norm(numel, [&](int64_t i) { return at(i).weight.value; }), norm_tolerance(numel));
    // The norm of a sum is at most the sum of the norms: the updates' errors move it by no more than their own norm.
    Real update_norm =
        in_double(exact_norm(numel, [&](int64_t i) { return at(i).update.value; }), norm_tolerance(numel));
    update_norm.error += exact_norm(numel, [&](int64_t i) { return at(i).update.error; });
    if (!group.adapt || weight_norm.value == 0.0 || update_norm.value == 0.0) {
        return {Real{1.0}, weight_norm, update_norm};
    }
    // Bounds bring two numbers no further apart.
    const double phi =
        std::min<double>(std::max<double>(weight_norm.value, rule.min_weight_norm), rule.max_weight_norm);
    const double ratio = phi / update_norm.value;
    const double error =
        (weight_norm.error + ratio * update_norm.error) / (update_norm.value - update_norm.error) + ratio * 0x1p-52;
    return {
        {std::min<double>(std::max<double>(ratio, rule.min_ratio), rule.max_ratio), error}, weight_norm, update_norm};
}

inline void expect_trust(const Trust& trust, const ExactTrust& exact, size_t s) {
    ASSERT_NEAR(trust.ratio, exact.ratio.value, exact.ratio.error) << "ratio of segment " << s;
    ASSERT_NEAR(trust.weight_norm, exact.weight_norm.value, exact.weight_norm.error) << "segment " << s;
    ASSERT_NEAR(trust.update_norm, exact.update_norm.value, exact.update_norm.error) << "segment " << s;
}

}  // namespace ddpcore::test
