// The kernels of lars_step_ against LARS in real numbers: trust ratios, and then element by element.
#include "exact_steps.h"
#include "settings.h"

namespace ddpcore::test {
namespace {

template <typename Kind>
class LarsTest : public ::testing::Test {};
TYPED_TEST_SUITE(LarsTest, Kinds);

TYPED_TEST(LarsTest, EverySettingSizeAndAlignment) {
    size_t turn = 0;
    for (const LarsVariant variant : kVariants) {
        for (const SgdSetting& setting : all_settings()) {
            const int64_t offset = kOffsets[turn++ % kOffsets.size()];
            SCOPED_TRACE(
                ::testing::Message() << "variant " << static_cast<int>(variant) << " " << setting.name() << " at "
                                     << offset);
            // Each size under two of the settings only, so that all take no longer than they must.
            std::vector<int64_t> sizes;
            for (size_t k = 0; k < kSizes.size(); ++k) {
                if (kSizes[k] < 5000 || turn % 20 == 0) sizes.push_back(kSizes[k]);
            }
            LarsProblem<TypeParam> problem(
                {{.sizes = sizes, .weight_decay = setting.weight_decay}}, setting.rule, {variant, 0.02f, 1e-8f},
                {.maximize = setting.maximize}, {.offset = offset});
            ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, true));
            ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, false));
            ASSERT_EQ(problem.steps[0], 2.0f);
        }
    }
}

TYPED_TEST(LarsTest, TwentyStepsUnderEveryScaling) {
    for (const LarsVariant variant : kVariants) {
        for (const ScalingSetting& scaling : all_scalings()) {
            for (const SgdSetting& setting : all_settings()) {
                SCOPED_TRACE(::testing::Message() << "variant " << static_cast<int>(variant) << " " << setting.name());
                ScalingSetting both = scaling;
                both.maximize = setting.maximize;
                LarsProblem<TypeParam> problem(
                    {{.sizes = {65, 17}, .weight_decay = setting.weight_decay}}, setting.rule, {variant, 0.5f, 0.25f},
                    both);
                for (uint32_t step = 0; step < 20; ++step) {
                    problem.grads.randomize(step, step % 2 == 0 ? 2.0f : 0.125f);
                    ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, step == 0)) << "step " << step;
                }
            }
        }
    }
}

TYPED_TEST(LarsTest, GroupsDifferInEverything) {
    for (const LarsVariant variant : kVariants) {
        LarsProblem<TypeParam> problem(
            {{.sizes = {5, 0, 4097}, .lr = 0.25f, .weight_decay = 0.0f, .lr_from_memory = true, .steps = 7.0f},
             {.sizes = {}},
             {.sizes = {0, 8193, 1}, .weight_decay = 0.2f, .adapt = false, .steps = std::nullopt},
             {.sizes = {4099, 2}, .lr = 0.1f, .weight_decay = 0.1f, .steps = 1.0f}},
            {0.9f, 0.7f, false, false}, {variant, 0.02f, 1e-8f});
        ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, false));
        problem.lrs[0] = problem.settings[0].lr = 0.0625f;
        ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, false, 5));
        for (const size_t s : {size_t{3}, size_t{4}, size_t{5}}) ASSERT_EQ(problem.trust[s].ratio, 1.0);
        ASSERT_NE(problem.trust[6].ratio, 1.0);
        ASSERT_EQ(problem.steps, (std::vector<float>{9.0f, 2.0f, -1.0f, 3.0f}));
    }
}

// Where a norm is zero the ratio is 1, and weight decay goes on.
TYPED_TEST(LarsTest, ZeroWeightsAndZeroGradients) {
    for (const LarsVariant variant : kVariants) {
        for (const bool decoupled : {false, true}) {
            LarsProblem<TypeParam> problem(
                {{.sizes = {4100, 4100, 4100}, .weight_decay = 0.25f}}, {0.9f, 1.0f, false, decoupled},
                {variant, 0.02f, 0.0f});
            problem.params.fill(0, 0.0f);
            if (TypeParam::kMaster) problem.masters.fill(0, 0.0f);
            problem.grads.fill(1, 0.0f);
            const float before = problem.params.at(1, 0);
            ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, true));
            ASSERT_EQ(problem.trust[0].ratio, 1.0);
            ASSERT_EQ(problem.trust[1].ratio, 1.0);
            ASSERT_NE(problem.trust[2].ratio, 1.0);
            ASSERT_NE(problem.params.at(0, 0), 0.0f);
            ASSERT_LT(std::abs(problem.params.at(1, 0)), std::abs(before));
        }
    }
}

TYPED_TEST(LarsTest, OverflowSkipsTheStepAlsoTheFirst) {
    LarsProblem<TypeParam> problem({{.sizes = {4097, 3}}}, {0.9f, 0.7f, false, false}, {kVariants[0], 0.02f, 0.0f});
    bool first_step = true;
    for (const float found_inf : {1.0f, 0.0f, 1.0f, 0.0f}) {
        problem.scaling.found_inf = found_inf;
        const auto params = problem.params.copy();
        const auto momenta = problem.momenta.copy();
        if (found_inf == 0.0f) {
            ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, first_step));
            first_step = false;
        } else {
            take_step(problem);
            ASSERT_TRUE(problem.params.same_bits(params) && problem.momenta.same_bits(momenta));
        }
    }
    ASSERT_EQ(problem.steps[0], 2.0f);
}

// The weight that overrides its master is the one whose norm counts.
TYPED_TEST(LarsTest, AWeightThatMovedOverridesItsMaster) {
    if constexpr (TypeParam::kMaster) {
        LarsProblem<TypeParam> problem({{.sizes = {5000}}}, {0.9f, 1.0f, false, false}, {kVariants[1], 0.02f, 1e-8f});
        for (int64_t i = 0; i < 5000; i += 3) problem.params.set(0, i, 4.0f + static_cast<float>(i % 7));
        ASSERT_NO_FATAL_FAILURE(expect_exact_step(problem, true));
    }
}

// A NaN among the gradients makes the ratio NaN, and with it the tensor. An infinite gradient makes the ratio zero: the
// others stand still where their momentum does, and the element itself is 0 * inf. Other tensors never notice.
TYPED_TEST(LarsTest, SpecialGradientsReachTheirTensorThroughTheRatio) {
    constexpr int64_t kNumel = 8200;
    const SgdRule rule{0.9f, 1.0f, false, false};
    for (const float special : {INFINITY, NAN}) {
        for (const int64_t place : {int64_t{0}, int64_t{4100}, kNumel - 1}) {
            const std::vector<GroupSetting> groups = {{.sizes = {3, kNumel, 3}, .weight_decay = 0.0f, .steps = 1.0f}};
            LarsProblem<TypeParam> clean(groups, rule, {kVariants[0], 0.02f, 1e-8f});
            LarsProblem<TypeParam> poisoned(groups, rule, {kVariants[0], 0.02f, 1e-8f});
            poisoned.momenta.fill(1, 0.0f);
            poisoned.grads.set(1, place, special);
            const auto before = poisoned.params.copy();
            for (auto* problem : {&clean, &poisoned}) take_step(*problem);
            for (const size_t s : {size_t{0}, size_t{2}}) ASSERT_TRUE(poisoned.params.same_bits(s, clean.params));
            if (std::isnan(special)) {
                ASSERT_TRUE(std::isnan(poisoned.trust[1].ratio));
            } else {
                ASSERT_EQ(poisoned.trust[1].ratio, 0.0);
            }
            for (int64_t i = 0; i < kNumel; ++i) {
                const bool expected_nan = std::isnan(special) || i == place;
                ASSERT_EQ(std::isnan(poisoned.params.at(1, i)), expected_nan) << i;
                ASSERT_EQ(std::isnan(poisoned.momenta.at(1, i)), expected_nan) << i;
                if (expected_nan) continue;
                ASSERT_TRUE(same_bits(poisoned.params.data(1) + i, &before[1][static_cast<size_t>(i)], 1)) << i;
            }
        }
    }
}

// Without the ratio LARS is SGD, to the bit; the variants differ only in where the learning rate stands.
TYPED_TEST(LarsTest, GroupsThatAreNotAdaptedTakeAnSgdStep) {
    for (const SgdSetting& setting : all_settings()) {
        for (const LarsVariant variant : {LarsVariant::kScaledGrad, LarsVariant::kScaledLr}) {
            const std::vector<GroupSetting> groups = {
                {.sizes = kManySizes, .weight_decay = setting.weight_decay, .adapt = false}};
            SgdProblem<TypeParam> sgd(groups, setting.rule, {.grad_scale = 3.0f, .maximize = setting.maximize});
            LarsProblem<TypeParam> lars(
                groups, setting.rule, {variant, 0.02f, 0.0f}, {.grad_scale = 3.0f, .maximize = setting.maximize});
            for (int step = 0; step < 2; ++step) {
                take_step(sgd);
                take_step(lars);
            }
            ASSERT_TRUE(lars.same_bits(sgd));
        }
    }
}

TYPED_TEST(LarsTest, AnySplitAnyBatchesAndAnyAddressHaveTheSameBits) {
    uint32_t seed = 1;
    for (const LarsVariant variant : kVariants) {
        for (int repeat = 0; repeat < 10; ++repeat) {
            const SgdRule rule{0.9f, 0.7f, repeat % 2 == 0, repeat % 3 == 0};
            const LarsRule lars{variant, 0.02f, 1e-8f};
            const std::vector<int64_t> front(kManySizes.begin(), kManySizes.begin() + 6);
            const std::vector<int64_t> back(kManySizes.begin() + 6, kManySizes.end());
            LarsProblem<TypeParam> whole({{.sizes = kManySizes}}, rule, lars);
            LarsProblem<TypeParam> split({{.sizes = kManySizes}}, rule, lars, {}, {.offset = 3});
            LarsProblem<TypeParam> flat(
                {{.sizes = front}, {.sizes = back}}, rule, lars, {}, {.offset = 1, .flat = true});
            for (int step = 0; step < 3; ++step) {
                take_step(whole);
                take_step(split, seed += 2);
                take_step(flat, seed += 2);
            }
            for (auto* other : {&split, &flat}) {
                ASSERT_TRUE(
                    other->weights_same_bits(whole) && other->momenta.same_bits(whole.momenta) &&
                    other->guards_untouched());
                ASSERT_TRUE(same_bits(other->trust.data(), whole.trust.data(), std::ssize(whole.trust)));
                ASSERT_TRUE(same_bits(other->partials.data(), whole.partials.data(), whole.num_blocks));
            }
        }
    }
}

}  // namespace
}  // namespace ddpcore::test
