// The hyperparameters that tests of the optimizers go through.
#pragma once

#include "take_steps.h"

namespace ddpcore::test {

struct SgdSetting {
    SgdRule rule;
    float weight_decay;
    bool maximize;

    // For SCOPED_TRACE.
    std::string name() const {
        return std::string(rule.momentum != 0.0f ? "momentum " : "") + (rule.nesterov ? "nesterov " : "") +
               (rule.one_minus_dampening != 1.0f ? "dampening " : "") + (rule.decoupled ? "decoupled " : "") +
               (weight_decay != 0.0f ? "decay " : "") + (maximize ? "maximize" : "");
    }
};

// Every combination; without momentum there is neither Nesterov nor dampening.
inline std::vector<SgdSetting> all_settings() {
    std::vector<SgdSetting> settings;
    for (int bits = 0; bits < 64; ++bits) {
        const auto has = [&](int bit) { return (bits >> bit & 1) != 0; };
        const bool momentum = has(0), nesterov = has(1), dampening = has(2);
        if (!momentum && (nesterov || dampening)) continue;
        const SgdRule rule{momentum ? 0.9f : 0.0f, dampening ? 0.7f : 1.0f, nesterov, has(3)};
        settings.push_back({rule, has(4) ? 0.03f : 0.0f, has(5)});
    }
    return settings;
}

// Gradients 1024 times too large, and too long; the same, short enough; a scale that is no power of two.
inline std::vector<ScalingSetting> all_scalings() {
    return {
        {},
        {.grad_scale = 1024.0f, .found_inf = 0.0f},
        {.grad_scale = 3.0f, .norm_squared = 1e4, .max_norm = 2.5f},
        {.norm_squared = 4.0, .max_norm = 2.5f},
        {.norm_squared = 1e4, .max_norm = 0.0f},
        {.grad_scale = 0.7f, .norm_squared = 0.0, .max_norm = 1.0f}};
}

inline constexpr LarsVariant kVariants[] = {LarsVariant::kYou2017, LarsVariant::kScaledGrad, LarsVariant::kScaledLr};

struct LambSetting {
    LambRule rule;
    float weight_decay;
    bool adapt;
};

inline constexpr AdamDecay kDecays[] = {AdamDecay::kInUpdate, AdamDecay::kCoupled, AdamDecay::kDecoupled};

// An eps far above the rounding of a gradient: where the gradient and coupled decay cancel, what is left of them is
// rounding, and eps alone keeps the quotient of the moments from being nothing else.
inline LambRule rule_of(AdamDecay decay, bool debias) {
    return {0.9, 0.999, 1e-3f, debias, decay, 0.0f, INFINITY, 0.0f, INFINITY};
}

struct AdamSetting {
    AdamRule rule;
    float weight_decay;
};

inline std::vector<AdamSetting> all_adam_settings() {
    std::vector<AdamSetting> settings;
    for (const AdamDecay decay : {AdamDecay::kCoupled, AdamDecay::kDecoupled}) {
        for (const float weight_decay : {0.0f, 0.03f}) settings.push_back({rule_of(decay, true), weight_decay});
    }
    return settings;
}

inline std::vector<LambSetting> all_lamb_settings() {
    std::vector<LambSetting> settings;
    for (const AdamDecay decay : kDecays) {
        for (int bits = 0; bits < 8; ++bits) {
            const auto has = [&](int bit) { return (bits >> bit & 1) != 0; };
            settings.push_back({rule_of(decay, has(0)), has(1) ? 0.03f : 0.0f, has(2)});
        }
    }
    return settings;
}

inline std::string name_of(const LambSetting& setting) {
    return "decay mode " + std::to_string(static_cast<int>(setting.rule.decay)) +
           (setting.rule.debias ? " debias" : "") + (setting.weight_decay != 0.0f ? " decay" : "") +
           (setting.adapt ? " adapt" : "");
}

// Calls expect(problem) with a problem of each optimizer; `turn` picks its hyperparameters.
template <typename Kind, typename Expect>
void for_each_optimizer(
    const std::vector<GroupSetting>& groups, const ScalingSetting& scaling, size_t turn, Expect&& expect,
    const Placement& placement = {}) {
    const std::vector<SgdSetting> settings = all_settings();
    const SgdSetting& setting = settings[turn % settings.size()];
    SCOPED_TRACE(::testing::Message() << "turn " << turn << ": " << setting.name());
    SgdProblem<Kind> sgd(groups, setting.rule, scaling, placement);
    ASSERT_NO_FATAL_FAILURE(expect(sgd)) << "SGD";
    LarsProblem<Kind> lars(groups, setting.rule, {kVariants[turn % 3], 0.02f, 1e-8f}, scaling, placement);
    ASSERT_NO_FATAL_FAILURE(expect(lars)) << "LARS";
    const float bound = turn % 4 < 2 ? INFINITY : 2.0f;
    std::vector<GroupSetting> counted = groups;
    for (GroupSetting& group : counted) group.steps = group.steps.value_or(0.0f);
    const AdamDecay decay = turn % 2 == 0 ? AdamDecay::kCoupled : AdamDecay::kDecoupled;
    AdamProblem<Kind> adamw(counted, {0.9, 0.999, 1e-6f, true, decay}, scaling, placement);
    ASSERT_NO_FATAL_FAILURE(expect(adamw)) << "AdamW";
    LambProblem<Kind> lamb(
        counted, {0.9, 0.999, 1e-6f, turn % 2 == 0, kDecays[turn % 3], 0.0f, bound, 0.0f, bound}, scaling, placement);
    ASSERT_NO_FATAL_FAILURE(expect(lamb)) << "LAMB";
}

}  // namespace ddpcore::test
