// sgd_step_ against momentum SGD in real numbers, element by element.
#include "exact_steps.h"
#include "settings.h"

namespace ddpcore::test {
namespace {

template <typename Kind>
class SgdTest : public ::testing::Test {};
TYPED_TEST_SUITE(SgdTest, Kinds);

TYPED_TEST(SgdTest, EverySettingSizeAndAlignment) {
    size_t turn = 0;
    for (const SgdSetting& setting : all_settings()) {
        const int64_t offset = kOffsets[turn++ % kOffsets.size()];
        SCOPED_TRACE(::testing::Message() << setting.name() << " at " << offset);
        SgdProblem<TypeParam> problem(
            {{.sizes = kSizes, .weight_decay = setting.weight_decay}}, setting.rule, {.maximize = setting.maximize},
            {.offset = offset});
        ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, true));
        ASSERT_EQ(problem.steps[0], 1.0f);
        ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, false));
        ASSERT_EQ(problem.steps[0], 2.0f);
    }
}

TYPED_TEST(SgdTest, TwentyStepsUnderEveryScaling) {
    for (const ScalingSetting& scaling : all_scalings()) {
        for (const SgdSetting& setting : all_settings()) {
            SCOPED_TRACE(setting.name());
            ScalingSetting both = scaling;
            both.maximize = setting.maximize;
            SgdProblem<TypeParam> problem(
                {{.sizes = {257, 33}, .weight_decay = setting.weight_decay}}, setting.rule, both);
            for (uint32_t step = 0; step < 20; ++step) {
                problem.grads.randomize(step);
                ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, step == 0)) << "step " << step;
            }
        }
    }
}

// A learning rate that is read when the step runs and changes in between, beside one that is passed; a group that has
// taken steps before, and one that does not count and so has no first step.
TYPED_TEST(SgdTest, GroupsDifferInEverything) {
    for (const SgdSetting& setting : all_settings()) {
        SgdProblem<TypeParam> problem(
            {{.sizes = {5, 0, 4097}, .lr = 0.25f, .weight_decay = 0.0f, .lr_from_memory = true, .steps = 7.0f},
             {.sizes = {}},
             {.sizes = {0, 8193, 1}, .lr = 0.1f, .weight_decay = 0.2f, .steps = std::nullopt}},
            setting.rule, {.maximize = setting.maximize});
        ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, false));
        problem.lrs[0] = problem.settings[0].lr = 0.0625f;
        ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, false, 5));
        ASSERT_EQ(problem.steps, (std::vector<float>{9.0f, 2.0f, -1.0f}));
    }
}

TYPED_TEST(SgdTest, NoSegmentsAndOnlyEmptyOnes) {
    const SgdRule rule = all_settings().back().rule;
    for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{}, std::vector<int64_t>{0, 0}}) {
        SgdProblem<TypeParam> problem({{.sizes = sizes}}, rule);
        ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, true));
        ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, false, 3));
    }
}

// A step that is skipped leaves everything, and the step after it is the first one.
TYPED_TEST(SgdTest, OverflowSkipsTheStepAlsoTheFirst) {
    const SgdRule rule{0.9f, 0.7f, false, false};
    SgdProblem<TypeParam> problem({{.sizes = kManySizes}}, rule), untouched({{.sizes = kManySizes}}, rule);
    bool first_step = true;
    for (const float found_inf : {1.0f, 0.0f, 2.0f, NAN, 0.0f, 1.0f}) {
        problem.scaling.found_inf = found_inf;
        const auto params = problem.params.copy();
        const auto momenta = problem.momenta.copy();
        const float steps = problem.steps[0];
        if (found_inf == 0.0f) {
            ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, first_step));
            first_step = false;
        } else {
            take_step(problem);
            ASSERT_TRUE(problem.params.same_bits(params) && problem.momenta.same_bits(momenta));
            ASSERT_EQ(problem.steps[0], steps);
        }
    }
    ASSERT_EQ(problem.steps[0], 2.0f);
}

// A weight that somebody has written is no longer its master, rounded: then the weight counts. A master within the
// rounding of its weight counts itself, up to the last value that rounds to it.
TYPED_TEST(SgdTest, AWeightThatMovedOverridesItsMaster) {
    if constexpr (TypeParam::kMaster) {
        using T = typename TypeParam::Param;
        constexpr int64_t kNumel = 5000;
        SgdProblem<TypeParam> problem(
            {{.sizes = {kNumel}, .lr = 0.0f, .weight_decay = 0.0f}}, {0.0f, 1.0f, false, false});
        std::vector<float> expected(kNumel);
        for (int64_t i = 0; i < kNumel; ++i) {
            // A step that moves nothing leaves in the master the weight that it started from.
            const float param = problem.params.at(0, i);
            // Away from zero where positive; below a power of two the neighbours stand twice as close.
            const float half = std::copysign(static_cast<float>(half_ulp<T>(std::abs(param))), param);
            const float kept = param + (i % 2 == 0 ? 0.99f : -0.49f) * half, stale = param + 2.5f * half;
            problem.masters.set(0, i, i % 3 == 0 ? stale : kept);
            expected[static_cast<size_t>(i)] = i % 3 == 0 ? param : kept;
        }
        const auto params = problem.params.copy();
        take_step(problem);
        ASSERT_TRUE(same_bits(problem.masters.data(0), expected.data(), kNumel));
        ASSERT_TRUE(problem.params.same_bits(params));
    }
}

// inf and NaN of a weight, a gradient or the momentum reach their own element only.
TYPED_TEST(SgdTest, SpecialValuesStayWhereTheyAre) {
    constexpr int64_t kNumel = 8200;
    const SgdRule rule{0.9f, 1.0f, true, false};
    for (const float special : {INFINITY, -INFINITY, NAN}) {
        for (const int64_t place : {int64_t{0}, int64_t{4100}, kNumel - 1}) {
            SgdProblem<TypeParam> clean({{.sizes = {3, kNumel, 3}, .steps = 1.0f}}, rule);
            SgdProblem<TypeParam> poisoned({{.sizes = {3, kNumel, 3}, .steps = 1.0f}}, rule);
            poisoned.grads.set(1, place, special);
            for (auto* problem : {&clean, &poisoned}) take_step(*problem);
            ASSERT_EQ(std::isnan(poisoned.params.at(1, place)), std::isnan(special));
            ASSERT_EQ(std::isnan(poisoned.momenta.at(1, place)), std::isnan(special));
            if (!std::isnan(special)) {
                ASSERT_EQ(poisoned.params.at(1, place), -special);
                ASSERT_EQ(poisoned.momenta.at(1, place), special);
            }
            poisoned.params.data(1)[place] = clean.params.data(1)[place];
            poisoned.momenta.data(1)[place] = clean.momenta.data(1)[place];
            if (TypeParam::kMaster) poisoned.masters.set(1, place, clean.masters.at(1, place));
            ASSERT_TRUE(poisoned.same_bits(clean));
        }
    }
}

TYPED_TEST(SgdTest, AnySplitIntoRangesAndAnyAddressHasTheSameBits) {
    uint32_t seed = 1;
    for (const SgdSetting& setting : all_settings()) {
        const std::vector<GroupSetting> groups = {{.sizes = kManySizes, .weight_decay = setting.weight_decay}};
        SgdProblem<TypeParam> whole(groups, setting.rule), split(groups, setting.rule, {}, {.offset = 3});
        SgdProblem<TypeParam> flat(groups, setting.rule, {}, {.offset = 1, .flat = true});
        for (int step = 0; step < 3; ++step) {
            take_step(whole);
            take_step(split, seed++);
            take_step(flat, seed++);
        }
        ASSERT_TRUE(split.same_bits(whole));
        ASSERT_TRUE(flat.same_bits(whole));
        ASSERT_TRUE(flat.guards_untouched() && split.guards_untouched());
    }
}

// SGD knows no tensors: which blocks and groups the elements of a buffer fall into does not matter.
TYPED_TEST(SgdTest, OneTensorAndItsPiecesInTwoGroupsHaveTheSameBits) {
    constexpr int64_t kFirst = 5003, kSecond = 9001;
    for (const SgdSetting& setting : all_settings()) {
        const float decay = setting.weight_decay;
        SgdProblem<TypeParam> whole({{.sizes = {kFirst + kSecond}, .weight_decay = decay}}, setting.rule);
        SgdProblem<TypeParam> pieces(
            {{.sizes = {kFirst}, .weight_decay = decay}, {.sizes = {kSecond}, .weight_decay = decay}}, setting.rule, {},
            {.flat = true});
        const auto refill = [](auto& to, const auto& from) {
            if (from.size() > 0) std::copy_n(from.data(0), kFirst + kSecond, to.data(0));
        };
        refill(pieces.params, whole.params);
        refill(pieces.grads, whole.grads);
        refill(pieces.masters, whole.masters);
        refill(pieces.momenta, whole.momenta);
        for (auto* problem : {&whole, &pieces}) take_step(*problem);
        ASSERT_TRUE(same_bits(pieces.params.data(0), whole.params.data(0), kFirst + kSecond));
        ASSERT_TRUE(same_bits(pieces.momenta.data(0), whole.momenta.data(0), kFirst + kSecond));
        if (TypeParam::kMaster) {
            ASSERT_TRUE(same_bits(pieces.masters.data(0), whole.masters.data(0), kFirst + kSecond));
        }
    }
}

}  // namespace
}  // namespace ddpcore::test
