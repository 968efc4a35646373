// The kernels of lamb_step_ against LAMB in real numbers: moments, trust ratios, and weights.
#include "exact_steps.h"
#include "settings.h"

namespace ddpcore::test {
namespace {

template <typename Kind>
class LambTest : public ::testing::Test {};
TYPED_TEST_SUITE(LambTest, Kinds);

TYPED_TEST(LambTest, EverySettingSizeAndAlignment) {
    size_t turn = 0;
    for (const LambSetting& setting : all_lamb_settings()) {
        const int64_t offset = kOffsets[turn++ % kOffsets.size()];
        SCOPED_TRACE(::testing::Message() << name_of(setting) << " at " << offset);
        LambProblem<TypeParam> problem(
            {{.sizes = kSizes, .weight_decay = setting.weight_decay, .adapt = setting.adapt}}, setting.rule, {},
            {.offset = offset});
        ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, {1}));
        ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, {2}));
        ASSERT_EQ(problem.steps[0], 2.0f);
    }
}

TYPED_TEST(LambTest, TwentyStepsUnderEveryScaling) {
    for (const bool maximize : {false, true}) {
        for (const ScalingSetting& scaling : all_scalings()) {
            for (const LambSetting& setting : all_lamb_settings()) {
                SCOPED_TRACE(name_of(setting));
                ScalingSetting both = scaling;
                both.maximize = maximize;
                LambProblem<TypeParam> problem(
                    {{.sizes = {65, 17}, .weight_decay = setting.weight_decay, .adapt = setting.adapt}}, setting.rule,
                    both);
                for (int step = 1; step <= 20; ++step) {
                    problem.grads.randomize(static_cast<uint32_t>(step));
                    ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, {step})) << "step " << step;
                }
            }
        }
    }
}

TYPED_TEST(LambTest, GroupsDifferInEverything) {
    for (const AdamDecay decay : kDecays) {
        LambProblem<TypeParam> problem(
            {{.sizes = {5, 0, 4097}, .lr = 0.25f, .weight_decay = 0.0f, .lr_from_memory = true, .steps = 7.0f},
             {.sizes = {}, .steps = 3.0f},
             {.sizes = {0, 8193, 1}, .weight_decay = 0.2f, .adapt = false},
             {.sizes = {4099, 2}, .lr = 0.1f, .weight_decay = 0.1f, .steps = 1000.0f}},
            rule_of(decay, true));
        problem.randomize_moments();
        ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, {8, 4, 1, 1001}));
        problem.lrs[0] = problem.settings[0].lr = 0.0625f;
        ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, {9, 5, 2, 1002}, 5));
        for (const size_t s : {size_t{3}, size_t{4}, size_t{5}}) ASSERT_EQ(problem.trust[s].ratio, 1.0);
        ASSERT_NE(problem.trust[6].ratio, 1.0);
        ASSERT_EQ(problem.steps, (std::vector<float>{9.0f, 5.0f, 2.0f, 1002.0f}));
    }
}

// Bounds of the ratio and of the weights' norm that bind, from above and from below, and one that does not.
TYPED_TEST(LambTest, BoundsOfTheRatioAndOfTheWeightNorm) {
    const auto ratio_with = [](float min_ratio, float max_ratio, float min_norm, float max_norm, Trust& trust) {
        LambRule rule = rule_of(AdamDecay::kInUpdate, true);
        rule.min_ratio = min_ratio, rule.max_ratio = max_ratio;
        rule.min_weight_norm = min_norm, rule.max_weight_norm = max_norm;
        LambProblem<TypeParam> problem({{.sizes = {5000}}}, rule);
        ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, {1}));
        trust = problem.trust[0];
    };
    Trust free, bound;
    ASSERT_NO_FATAL_FAILURE(ratio_with(0.0f, INFINITY, 0.0f, INFINITY, free));
    ASSERT_EQ(free.ratio, free.weight_norm / free.update_norm);
    ASSERT_NO_FATAL_FAILURE(ratio_with(8.0f, 16.0f, 0.0f, INFINITY, bound));
    ASSERT_EQ(bound.ratio, 8.0);
    ASSERT_NO_FATAL_FAILURE(ratio_with(0.0f, 0.25f, 0.0f, INFINITY, bound));
    ASSERT_EQ(bound.ratio, 0.25);
    ASSERT_NO_FATAL_FAILURE(ratio_with(0.0f, INFINITY, 512.0f, 1024.0f, bound));
    ASSERT_EQ(bound.ratio, 512.0 / free.update_norm);
    ASSERT_NO_FATAL_FAILURE(ratio_with(0.0f, INFINITY, 0.0f, 10.0f, bound));
    ASSERT_EQ(bound.ratio, 10.0 / free.update_norm);
    ASSERT_EQ(bound.weight_norm, free.weight_norm);
    ASSERT_NO_FATAL_FAILURE(ratio_with(0.25f, 4.0f, 1.0f, 1000.0f, bound));
    ASSERT_EQ(bound.ratio, free.ratio);
}

// Where a norm is zero the ratio is 1, whatever its bounds, and weight decay goes on.
TYPED_TEST(LambTest, ZeroWeightsAndZeroGradients) {
    for (const AdamDecay decay : kDecays) {
        LambRule rule = rule_of(decay, true);
        rule.min_ratio = 2.0f, rule.max_ratio = 4.0f, rule.min_weight_norm = 3.0f;
        LambProblem<TypeParam> problem({{.sizes = {4100, 4100, 4100}, .weight_decay = 0.25f}}, rule);
        problem.params.fill(0, 0.0f);
        if (TypeParam::kMaster) problem.masters.fill(0, 0.0f);
        problem.grads.fill(1, 0.0f);
        const float before = problem.params.at(1, 0);
        ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, {1}));
        ASSERT_EQ(problem.trust[0].ratio, 1.0);
        // In the other modes decay is an update, of some length.
        ASSERT_EQ(problem.trust[1].ratio == 1.0, decay == AdamDecay::kDecoupled);
        ASSERT_NE(problem.params.at(0, 0), 0.0f);
        ASSERT_NE(problem.params.at(1, 0), before);
    }
}

TYPED_TEST(LambTest, OverflowSkipsTheStepAlsoTheFirst) {
    LambProblem<TypeParam> problem({{.sizes = {4097, 3}}}, rule_of(AdamDecay::kInUpdate, true));
    int step = 0;
    for (const float found_inf : {1.0f, 0.0f, 1.0f, 0.0f}) {
        problem.scaling.found_inf = found_inf;
        const auto params = problem.params.copy();
        const auto exp_avgs = problem.exp_avgs.copy(), exp_avg_sqs = problem.exp_avg_sqs.copy();
        if (found_inf == 0.0f) {
            ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, {++step}));
        } else {
            take_step(problem);
            ASSERT_TRUE(problem.params.same_bits(params));
            ASSERT_TRUE(problem.exp_avgs.same_bits(exp_avgs) && problem.exp_avg_sqs.same_bits(exp_avg_sqs));
        }
        ASSERT_EQ(problem.steps[0], static_cast<float>(step));
    }
}

// The weight that overrides its master is the one that decays and whose norm counts.
TYPED_TEST(LambTest, AWeightThatMovedOverridesItsMaster) {
    if constexpr (TypeParam::kMaster) {
        for (const AdamDecay decay : kDecays) {
            LambProblem<TypeParam> problem({{.sizes = {5000}}}, rule_of(decay, true));
            for (int64_t i = 0; i < 5000; i += 3) problem.params.set(0, i, 4.0f + static_cast<float>(i % 7));
            ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, {1}));
        }
    }
}

// The update of an inf or a NaN among the gradients is NaN: so is the ratio and, through it, the tensor. The moments
// keep it where it was, and so do the weights where no ratio is formed. Other tensors never notice.
TYPED_TEST(LambTest, SpecialGradientsReachTheirTensorThroughTheRatio) {
    constexpr int64_t kNumel = 8200;
    for (const float special : {INFINITY, NAN}) {
        for (const bool adapt : {false, true}) {
            for (const int64_t place : {int64_t{0}, int64_t{4100}, kNumel - 1}) {
                LambProblem<TypeParam> problem(
                    {{.sizes = {3, kNumel, 3}, .adapt = adapt}}, rule_of(AdamDecay::kInUpdate, true));
                LambProblem<TypeParam> clean(
                    {{.sizes = {3, kNumel, 3}, .adapt = adapt}}, rule_of(AdamDecay::kInUpdate, true));
                problem.grads.set(1, place, special);
                for (auto* each : {&problem, &clean}) take_step(*each);
                for (const size_t s : {size_t{0}, size_t{2}}) ASSERT_TRUE(problem.params.same_bits(s, clean.params));
                ASSERT_EQ(std::isnan(problem.trust[1].ratio), adapt);
                for (int64_t i = 0; i < kNumel; ++i) {
                    ASSERT_EQ(std::isnan(problem.params.at(1, i)), adapt || i == place) << i;
                    ASSERT_EQ(std::isfinite(problem.exp_avgs.at(1, i)), i != place) << i;
                    ASSERT_EQ(std::isfinite(problem.exp_avg_sqs.at(1, i)), i != place) << i;
                }
            }
        }
    }
}

TYPED_TEST(LambTest, AnySplitAnyBatchesAndAnyAddressHaveTheSameBits) {
    uint32_t seed = 1;
    for (const LambSetting& setting : all_lamb_settings()) {
        const std::vector<int64_t> front(kManySizes.begin(), kManySizes.begin() + 6);
        const std::vector<int64_t> back(kManySizes.begin() + 6, kManySizes.end());
        LambProblem<TypeParam> whole({{.sizes = kManySizes}}, setting.rule);
        LambProblem<TypeParam> split({{.sizes = kManySizes}}, setting.rule, {}, {.offset = 3});
        LambProblem<TypeParam> flat({{.sizes = front}, {.sizes = back}}, setting.rule, {}, {.offset = 1, .flat = true});
        for (int step = 0; step < 3; ++step) {
            take_step(whole);
            take_step(split, seed += 2);
            take_step(flat, seed += 2);
        }
        for (auto* other : {&split, &flat}) {
            ASSERT_TRUE(
                other->weights_same_bits(whole) && other->exp_avgs.same_bits(whole.exp_avgs) &&
                other->exp_avg_sqs.same_bits(whole.exp_avg_sqs) && other->guards_untouched());
            ASSERT_TRUE(same_bits(other->trust.data(), whole.trust.data(), std::ssize(whole.trust)));
            ASSERT_TRUE(same_bits(other->partials.data(), whole.partials.data(), whole.num_blocks));
        }
    }
}

}  // namespace
}  // namespace ddpcore::test
