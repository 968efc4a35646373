// The formulas of csrc/math.h that whole tensors share, against themselves in long double.
#include "testing.h"

namespace ddpcore::test {
namespace {

constexpr float kLr = 0.1f, kWeightDecay = 0.03f;

StepGroup group_of(float* step, bool adapt = true) {
    return {kLr, kWeightDecay, nullptr, step, adapt};
}

GradScaling scaling_of(const float* scale, const double* norm_squared, float max_norm, bool maximize = false) {
    return {scale, nullptr, norm_squared, max_norm, maximize};
}

// `count` roundings of a double on the way to `exact`, and the one to float.
void expect_float_near(float actual, long double exact, int count) {
    const double reference = static_cast<double>(exact);
    ASSERT_NEAR(actual, reference, half_ulp<float>(std::abs(reference)) + std::abs(reference) * count * 0x1p-53);
}

TEST(MathTest, PowerOfEveryExponent) {
    for (const double base : {0.9, 0.999, 0.5, 1.0, 0.0, 0.9999999}) {
        long double exact = 1.0L;
        for (int64_t exponent = 0; exponent < 5000; ++exponent, exact *= base) {
            // Squaring doubles the relative error of the base and adds one rounding: `exponent` of them at most, and
            // one for the product of every bit set, at most 13. Below the normal range errors are absolute.
            const double bound = static_cast<double>(exact) * static_cast<double>(exponent + 13) * 0x1p-53;
            ASSERT_NEAR(power(base, exponent), static_cast<double>(exact), bound + 0x1p-1070)
                << base << "^" << exponent;
        }
    }
    ASSERT_EQ(power(0.5, 1000), std::ldexp(1.0, -1000));
    ASSERT_EQ(power(0.999, int64_t{1} << 24), 0.0);
}

TEST(MathTest, StepsAreSkippedWhereAnOverflowWasFound) {
    for (const float found_inf : {0.0f, -0.0f, 1.0f, 3.0f, INFINITY, NAN}) {
        ASSERT_EQ(skips_step({nullptr, &found_inf, nullptr, 0.0f, false}), !(found_inf == 0.0f)) << found_inf;
    }
    ASSERT_FALSE(skips_step({nullptr, nullptr, nullptr, 0.0f, false}));
}

TEST(MathTest, FactorOfScaleAndSign) {
    for (const bool maximize : {false, true}) {
        const float sign = maximize ? -1.0f : 1.0f;
        ASSERT_EQ(grad_factor(scaling_of(nullptr, nullptr, 0.0f, maximize)), sign);
        for (const float scale : {1.0f, 65536.0f, 3.0f, 0.7f, 1e-20f, 1e20f}) {
            ASSERT_NO_FATAL_FAILURE(expect_float_near(
                grad_factor(scaling_of(&scale, nullptr, 2.0f, maximize)), sign / static_cast<long double>(scale), 1));
        }
    }
}

TEST(MathTest, FactorOfClipping) {
    for (const bool maximize : {false, true}) {
        for (const float scale : {1.0f, 3.0f, 1024.0f}) {
            for (const double norm_squared : {0.0, 1e-30, 1.0, 4.0, 1e4, 1e30}) {
                for (const float max_norm : {0.0f, 0.25f, 1.0f, 2.5f, 1e9f}) {
                    long double factor = 1.0L / scale;
                    const long double norm = std::sqrt(static_cast<long double>(norm_squared)) / scale;
                    if (max_norm != 0.0f) factor *= std::min(1.0L, max_norm / (norm + 1e-6L));
                    const float actual = grad_factor(scaling_of(&scale, &norm_squared, max_norm, maximize));
                    ASSERT_NO_FATAL_FAILURE(expect_float_near(actual, maximize ? -factor : factor, 6))
                        << scale << " " << norm_squared << " " << max_norm;
                }
            }
        }
    }
}

// An infinite norm leaves nothing of finite gradients, as torch.nn.utils.clip_grad_norm_ does; NaN makes all NaN.
TEST(MathTest, FactorOfSpecialNorms) {
    const double infinite = INFINITY, nan = NAN;
    ASSERT_EQ(grad_factor(scaling_of(nullptr, &infinite, 1.0f)), 0.0f);
    ASSERT_TRUE(std::isnan(grad_factor(scaling_of(nullptr, &nan, 1.0f))));
    ASSERT_EQ(grad_factor(scaling_of(nullptr, &nan, 0.0f)), 1.0f);
}

TEST(MathTest, LearningRateAndWhatDecayLeaves) {
    const float stored = 0.7f;
    StepGroup group = group_of(nullptr);
    ASSERT_EQ(lr_of(group), kLr);
    ASSERT_NO_FATAL_FAILURE(
        expect_float_near(kept_share(group), 1.0L - static_cast<long double>(kLr) * kWeightDecay, 2));
    group.device_lr = &stored;
    ASSERT_EQ(lr_of(group), stored);
    ASSERT_NO_FATAL_FAILURE(
        expect_float_near(kept_share(group), 1.0L - static_cast<long double>(stored) * kWeightDecay, 2));
    // A product that is rounded to fp32 before it is subtracted would show in some of these.
    for (int i = 1; i < 1000; ++i) {
        group = {0.9f / static_cast<float>(i), 0.37f * static_cast<float>(i % 13), nullptr, nullptr, false};
        const auto product = static_cast<long double>(group.lr) * group.weight_decay;
        ASSERT_NO_FATAL_FAILURE(expect_float_near(kept_share(group), 1.0L - product, 2)) << i;
    }
}

TEST(MathTest, FlagsOfAGroup) {
    const StepGroup decays = group_of(nullptr), plain{kLr, 0.0f, nullptr, nullptr, false};
    ASSERT_EQ(sgd_flags({0.0f, 1.0f, true, false}, plain), 0);
    ASSERT_EQ(sgd_flags({0.0f, 1.0f, true, false}, decays), kDecay);
    ASSERT_EQ(sgd_flags({0.0f, 1.0f, true, true}, decays), 0);
    ASSERT_EQ(sgd_flags({0.9f, 1.0f, false, false}, plain), kMomentum);
    ASSERT_EQ(sgd_flags({0.9f, 1.0f, true, false}, decays), kDecay | kMomentum | kNesterov);
}

TEST(MathTest, FirstStepIsTheOneWithNothingCounted) {
    float step = 0.0f;
    const SgdRule rule{0.9f, 0.7f, false, false};
    ASSERT_TRUE(sgd_scales(rule, group_of(&step), 1.0f).first_step);
    step = 1.0f;
    ASSERT_FALSE(sgd_scales(rule, group_of(&step), 1.0f).first_step);
    ASSERT_FALSE(sgd_scales(rule, group_of(nullptr), 1.0f).first_step);
}

TEST(MathTest, LarsTrust) {
    const LarsRule rule{LarsVariant::kYou2017, 0.02f, 1e-8f};
    for (const double weights : {1e-30, 4.0, 1e30}) {
        for (const double grads : {1e-20, 9.0}) {
            for (const float factor : {1.0f, -0.25f}) {
                for (const bool decoupled : {false, true}) {
                    const Trust trust =
                        lars_trust(rule, {0.9f, 1.0f, false, decoupled}, group_of(nullptr), factor, {weights, grads});
                    const long double weight_norm = std::sqrt(static_cast<long double>(weights));
                    const long double grad_norm = std::sqrt(static_cast<long double>(grads)) * std::abs(factor);
                    const long double decay = decoupled ? 0.0L : static_cast<long double>(kWeightDecay);
                    const auto ratio = static_cast<double>(
                        rule.trust_coefficient * weight_norm / (grad_norm + decay * weight_norm + rule.eps));
                    ASSERT_NEAR(trust.ratio, ratio, ratio * 8 * 0x1p-53);  // two roots and six operations
                    ASSERT_NEAR(trust.weight_norm, static_cast<double>(weight_norm), trust.weight_norm * 0x1p-53);
                    ASSERT_NEAR(trust.update_norm, static_cast<double>(grad_norm), trust.update_norm * 0x1p-52);
                }
            }
        }
    }
}

TEST(MathTest, TrustIsOneWhereNothingAdapts) {
    const LarsRule lars{LarsVariant::kYou2017, 0.02f, 0.0f};
    const LambRule lamb{0.9, 0.999, 1e-6f, true, AdamDecay::kInUpdate, 2.0f, 3.0f, 4.0f, 5.0f};
    const SgdRule sgd{0.9f, 1.0f, false, false};
    for (const bool adapt : {false, true}) {
        for (const NormPartials squares : {NormPartials{0.0, 1.0}, {1.0, 0.0}, {0.0, 0.0}, {1.0, 1.0}}) {
            if (adapt && squares.weight * squares.update != 0.0) continue;
            ASSERT_EQ(ddpcore::lars_trust(lars, sgd, group_of(nullptr, adapt), 1.0f, squares).ratio, 1.0);
            ASSERT_EQ(ddpcore::lamb_trust(lamb, group_of(nullptr, adapt), squares).ratio, 1.0);
        }
    }
    // A factor of zero (all gradients clipped away) is a gradient of zero.
    ASSERT_EQ(ddpcore::lars_trust(lars, sgd, group_of(nullptr), 0.0f, {1.0, 1.0}).ratio, 1.0);
}

TEST(MathTest, LambTrustBetweenItsBounds) {
    LambRule rule{0.9, 0.999, 1e-6f, true, AdamDecay::kInUpdate, 0.0f, INFINITY, 0.0f, INFINITY};
    const auto ratio = [&](double weight_norm, double update_norm) {
        const Trust trust = lamb_trust(rule, group_of(nullptr), {weight_norm * weight_norm, update_norm * update_norm});
        EXPECT_EQ(trust.weight_norm, weight_norm);
        EXPECT_EQ(trust.update_norm, update_norm);
        return trust.ratio;
    };
    ASSERT_EQ(ratio(3.0, 4.0), 0.75);
    rule.min_weight_norm = 5.0f, rule.max_weight_norm = 10.0f;
    ASSERT_EQ(ratio(3.0, 4.0), 1.25);
    ASSERT_EQ(ratio(6.0, 4.0), 1.5);
    ASSERT_EQ(ratio(60.0, 4.0), 2.5);
    rule.min_ratio = 2.0f, rule.max_ratio = 3.0f;
    ASSERT_EQ(ratio(6.0, 4.0), 2.0);
    ASSERT_EQ(ratio(10.0, 4.0), 2.5);
    ASSERT_EQ(ratio(10.0, 2.0), 3.0);
    ASSERT_TRUE(std::isnan(lamb_trust(rule, group_of(nullptr), {36.0, NAN}).ratio));
}

TEST(MathTest, LarsScalesOfEveryVariant) {
    SgdScales scales = sgd_scales({0.9f, 0.7f, false, true}, group_of(nullptr), 0.5f);
    ASSERT_EQ(scales.inner, 1.0f);
    ASSERT_EQ(scales.outer, kLr);
    constexpr double kRatio = 1.0 / 3.0;
    const auto both = static_cast<long double>(kLr) * kRatio;
    const SgdScales you = lars_scales(scales, LarsVariant::kYou2017, kRatio);
    ASSERT_NO_FATAL_FAILURE(expect_float_near(you.inner, both, 1));
    ASSERT_EQ(you.outer, 1.0f);
    const SgdScales grad = lars_scales(scales, LarsVariant::kScaledGrad, kRatio);
    ASSERT_NO_FATAL_FAILURE(expect_float_near(grad.inner, kRatio, 0));
    ASSERT_EQ(grad.outer, kLr);
    const SgdScales lr = lars_scales(scales, LarsVariant::kScaledLr, kRatio);
    ASSERT_EQ(lr.inner, 1.0f);
    ASSERT_NO_FATAL_FAILURE(expect_float_near(lr.outer, both, 1));
    for (const SgdScales& each : {you, grad, lr}) {
        ASSERT_EQ(each.keep, scales.keep);
        ASSERT_EQ(each.grad, 0.5f);
        ASSERT_EQ(each.momentum, 0.9f);
        ASSERT_EQ(each.one_minus_dampening, 0.7f);
    }
}

TEST(MathTest, AdamScalesOfEveryModeAndStep) {
    for (const AdamDecay decay : {AdamDecay::kInUpdate, AdamDecay::kCoupled, AdamDecay::kDecoupled}) {
        for (const bool debias : {false, true}) {
            const LambRule rule{0.9, 0.999, 1e-6f, debias, decay, 0.0f, INFINITY, 0.0f, INFINITY};
            long double power1 = 1.0L, power2 = 1.0L;
            for (int taken = 0; taken < 2000; ++taken) {
                float step = static_cast<float>(taken);
                power1 *= rule.beta1, power2 *= rule.beta2;
                const AdamScales scales = adam_scales(rule, group_of(&step), -0.5f);
                // 1 - beta^step loses what cancels: beta^step / (1 - beta^step) <= 999 times the error of the power,
                // which is at most `step` roundings and 11 for the bits.
                const int roundings = debias ? 1000 * (taken + 12) + 3 : 0;
                ASSERT_NO_FATAL_FAILURE(
                    expect_float_near(scales.debias1, debias ? 1.0L / (1.0L - power1) : 1.0L, roundings));
                ASSERT_NO_FATAL_FAILURE(
                    expect_float_near(scales.debias2, debias ? 1.0L / (1.0L - power2) : 1.0L, roundings));
                ASSERT_EQ(scales.grad, -0.5f);
                ASSERT_EQ(scales.eps, rule.eps);
                ASSERT_EQ(scales.coupled_decay, decay == AdamDecay::kCoupled ? kWeightDecay : 0.0f);
                ASSERT_EQ(scales.update_decay, decay == AdamDecay::kInUpdate ? kWeightDecay : 0.0f);
                ASSERT_EQ(scales.keep, decay == AdamDecay::kDecoupled ? kept_share(group_of(&step)) : 1.0f);
            }
        }
    }
}

TEST(MathTest, LambBetasAreRoundedOnce) {
    float step = 0.0f;
    const LambRule rule{0.9, 0.999, 1e-6f, true, AdamDecay::kInUpdate, 0.0f, INFINITY, 0.0f, INFINITY};
    const AdamScales scales = adam_scales(rule, group_of(&step), 1.0f);
    ASSERT_NO_FATAL_FAILURE(expect_float_near(scales.beta1, 0.9, 0));
    ASSERT_NO_FATAL_FAILURE(expect_float_near(scales.one_minus_beta1, 1.0L - static_cast<long double>(0.9), 1));
    ASSERT_NO_FATAL_FAILURE(expect_float_near(scales.beta2, 0.999, 0));
    ASSERT_NO_FATAL_FAILURE(expect_float_near(scales.one_minus_beta2, 1.0L - static_cast<long double>(0.999), 1));
}

TEST(MathTest, LambStepSizeIsRoundedOnce) {
    const float stored = 0.3f;
    StepGroup group = group_of(nullptr);
    const Trust trust{1.0 / 3.0, 1.0, 3.0};
    ASSERT_NO_FATAL_FAILURE(
        expect_float_near(lamb_step_size(group, trust), static_cast<long double>(kLr) * trust.ratio, 1));
    group.device_lr = &stored;
    ASSERT_NO_FATAL_FAILURE(
        expect_float_near(lamb_step_size(group, trust), static_cast<long double>(stored) * trust.ratio, 1));
}

}  // namespace
}  // namespace ddpcore::test
