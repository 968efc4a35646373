// The kernel of adamw_step_ against Adam in real numbers, and against LAMB without a ratio, bit for bit.
#include "exact_steps.h"
#include "settings.h"

namespace ddpcore::test {
namespace {

template <typename Kind>
class AdamwTest : public ::testing::Test {};
TYPED_TEST_SUITE(AdamwTest, Kinds);

TYPED_TEST(AdamwTest, EverySettingSizeAndAlignment) {
    size_t turn = 0;
    for (const AdamSetting& setting : all_adam_settings()) {
        for (const int64_t offset : kOffsets) {
            AdamProblem<TypeParam> problem(
                {{.sizes = kSizes, .weight_decay = setting.weight_decay}}, setting.rule, {.maximize = turn++ % 2 != 0},
                {.offset = offset});
            ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, {1}));
            ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, {2}));
            ASSERT_EQ(problem.steps[0], 2.0f);
        }
    }
}

TYPED_TEST(AdamwTest, TwentyStepsUnderEveryScaling) {
    for (const ScalingSetting& scaling : all_scalings()) {
        for (const AdamSetting& setting : all_adam_settings()) {
            AdamProblem<TypeParam> problem(
                {{.sizes = {65, 17}, .weight_decay = setting.weight_decay}}, setting.rule, scaling);
            for (int step = 1; step <= 20; ++step) {
                problem.grads.randomize(static_cast<uint32_t>(step));
                ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, {step})) << "step " << step;
            }
        }
    }
}

TYPED_TEST(AdamwTest, GroupsDifferInEverything) {
    AdamProblem<TypeParam> problem(
        {{.sizes = {5, 0, 4097}, .lr = 0.25f, .weight_decay = 0.0f, .lr_from_memory = true, .steps = 7.0f},
         {.sizes = {}, .steps = 3.0f},
         {.sizes = {0, 8193, 1}, .weight_decay = 0.2f},
         {.sizes = {4099, 2}, .lr = 0.1f, .weight_decay = 0.1f, .steps = 1000.0f}},
        rule_of(AdamDecay::kDecoupled, true));
    problem.randomize_moments();
    ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, {8, 4, 1, 1001}));
    problem.lrs[0] = problem.settings[0].lr = 0.0625f;
    ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, {9, 5, 2, 1002}, 5));
    ASSERT_EQ(problem.steps, (std::vector<float>{9.0f, 5.0f, 2.0f, 1002.0f}));
}

TYPED_TEST(AdamwTest, OverflowSkipsTheStepAlsoTheFirst) {
    AdamProblem<TypeParam> problem({{.sizes = {4097, 3}}}, rule_of(AdamDecay::kDecoupled, true));
    int step = 0;
    for (const float found_inf : {1.0f, 0.0f, NAN, 0.0f}) {
        problem.scaling.found_inf = found_inf;
        const auto params = problem.params.copy();
        const auto exp_avg_sqs = problem.exp_avg_sqs.copy();
        if (found_inf == 0.0f) {
            ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, {++step}));
        } else {
            take_step(problem);
            ASSERT_TRUE(problem.params.same_bits(params) && problem.exp_avg_sqs.same_bits(exp_avg_sqs));
        }
        ASSERT_EQ(problem.steps[0], static_cast<float>(step));
    }
}

// inf and NaN of a gradient reach their own element only.
TYPED_TEST(AdamwTest, SpecialGradientsStayWhereTheyAre) {
    constexpr int64_t kNumel = 8200;
    for (const float special : {INFINITY, NAN}) {
        for (const int64_t place : {int64_t{0}, int64_t{4100}, kNumel - 1}) {
            AdamProblem<TypeParam> problem({{.sizes = {3, kNumel, 3}}}, rule_of(AdamDecay::kDecoupled, true));
            problem.grads.set(1, place, special);
            take_step(problem);
            for (int64_t i = 0; i < kNumel; ++i) {
                ASSERT_EQ(std::isnan(problem.params.at(1, i)), i == place) << i;
                ASSERT_EQ(std::isfinite(problem.exp_avgs.at(1, i)), i != place) << i;
            }
        }
    }
}

TYPED_TEST(AdamwTest, IsLambWithoutARatio) {
    for (const AdamSetting& setting : all_adam_settings()) {
        const std::vector<GroupSetting> groups = {
            {.sizes = kManySizes, .weight_decay = setting.weight_decay, .adapt = false}};
        AdamProblem<TypeParam> adamw(groups, setting.rule);
        LambProblem<TypeParam> lamb(groups, {setting.rule, 0.0f, INFINITY, 0.0f, INFINITY});
        for (int step = 0; step < 3; ++step) {
            take_step(adamw);
            take_step(lamb);
            ASSERT_TRUE(adamw.same_bits(lamb)) << "step " << step;
        }
    }
}

TYPED_TEST(AdamwTest, AnySplitIntoRangesAndAnyAddressHasTheSameBits) {
    uint32_t seed = 1;
    for (const AdamSetting& setting : all_adam_settings()) {
        const std::vector<GroupSetting> groups = {{.sizes = kManySizes, .weight_decay = setting.weight_decay}};
        AdamProblem<TypeParam> whole(groups, setting.rule), split(groups, setting.rule, {}, {.offset = 3});
        AdamProblem<TypeParam> flat(groups, setting.rule, {}, {.offset = 1, .flat = true});
        for (int step = 0; step < 3; ++step) {
            take_step(whole);
            take_step(split, seed += 2);
            take_step(flat, seed += 2);
        }
        for (auto* other : {&split, &flat}) ASSERT_TRUE(other->same_bits(whole) && other->guards_untouched());
    }
}

}  // namespace
}  // namespace ddpcore::test
