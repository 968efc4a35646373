// The kernels of lamb_step_ against LAMB in real numbers: moments, trust ratios, and weights.
#include "oracle.h"
#include "settings.h"

namespace ddpcore::test {
namespace {

struct LambSetting {
    LambRule rule;
    float weight_decay;
    bool adapt;
};

constexpr LambDecay kDecays[] = {LambDecay::kInUpdate, LambDecay::kCoupled, LambDecay::kDecoupled};

// An eps far above the rounding of a gradient: where the gradient and coupled decay cancel, what is left of them is
// rounding, and eps alone keeps the quotient of the moments from being nothing else.
LambRule rule_of(LambDecay decay, bool debias) {
    return {0.9, 0.999, 1e-3f, debias, decay, 0.0f, INFINITY, 0.0f, INFINITY};
}

std::vector<LambSetting> all_lamb_settings() {
    std::vector<LambSetting> settings;
    for (const LambDecay decay : kDecays) {
        for (int bits = 0; bits < 8; ++bits) {
            const auto has = [&](int bit) { return (bits >> bit & 1) != 0; };
            settings.push_back({rule_of(decay, has(0)), has(1) ? 0.03f : 0.0f, has(2)});
        }
    }
    return settings;
}

std::string name_of(const LambSetting& setting) {
    return "decay mode " + std::to_string(static_cast<int>(setting.rule.decay)) +
           (setting.rule.debias ? " debias" : "") + (setting.weight_decay != 0.0f ? " decay" : "") +
           (setting.adapt ? " adapt" : "");
}

// Moments as earlier steps leave them.
template <typename Kind>
void randomize_moments(LambProblem<Kind>& problem) {
    problem.exp_avgs.randomize(4000, 0.5f);
    problem.exp_avg_sqs.randomize(5000);
    for (size_t s = 0; s < problem.sizes.size(); ++s) {
        for (int64_t i = 0; i < problem.sizes[s]; ++i) {
            problem.exp_avg_sqs.set(s, i, std::abs(problem.exp_avg_sqs.at(s, i)));
        }
    }
}

template <typename Kind>
std::vector<std::vector<LambElement>> exact_updates(const LambProblem<Kind>& problem, const std::vector<int>& steps) {
    const Real factor = gradient_factor(problem.scaling);
    std::vector<std::vector<LambElement>> exact(problem.sizes.size());
    for (size_t s = 0; s < exact.size(); ++s) {
        const size_t g = problem.group_of[s];
        for (int64_t i = 0; i < problem.sizes[s]; ++i) {
            const LambElement from{
                {problem.weight(s, i)}, {problem.exp_avgs.at(s, i)}, {problem.exp_avg_sqs.at(s, i)}, {}};
            exact[s].push_back(exact_lamb_update(
                from, factor * Real{problem.grads.at(s, i)}, problem.settings[g], problem.rule, steps[g]));
        }
    }
    return exact;
}

// One step from what is stored, against the equations; see test_sgd.cpp. `steps` of each group, this one included.
template <typename Kind>
void expect_exact_step(LambProblem<Kind>& problem, const std::vector<int>& steps, uint32_t seed = 0) {
    const auto exact = exact_updates(problem, steps);
    const auto grads = problem.grads.copy();
    take_step(problem, seed);
    for (size_t s = 0; s < exact.size(); ++s) {
        const GroupSetting& group = problem.settings[problem.group_of[s]];
        const ExactTrust trust = exact_lamb_trust(exact[s], group, problem.rule);
        ASSERT_NO_FATAL_FAILURE(expect_trust(problem.trust[s], trust, s));
        for (int64_t i = 0; i < problem.sizes[s]; ++i) {
            const LambElement& element = exact[s][static_cast<size_t>(i)];
            if (!agrees<float>(problem.exp_avgs.at(s, i), element.exp_avg) ||
                !agrees<float>(problem.exp_avg_sqs.at(s, i), element.exp_avg_sq)) {
                FAIL() << "moments " << i << " of segment " << s << " are " << problem.exp_avgs.at(s, i) << " and "
                       << problem.exp_avg_sqs.at(s, i) << ", not " << element.exp_avg.value << " and "
                       << element.exp_avg_sq.value;
            }
            const Real weight = exact_lamb_weight(element, group, problem.rule, trust.ratio);
            ASSERT_NO_FATAL_FAILURE(problem.expect_weight(s, i, weight));
        }
    }
    ASSERT_TRUE(problem.guards_untouched());
    ASSERT_TRUE(problem.grads.same_bits(grads));
}

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
    for (const LambDecay decay : kDecays) {
        LambProblem<TypeParam> problem(
            {{.sizes = {5, 0, 4097}, .lr = 0.25f, .weight_decay = 0.0f, .lr_from_memory = true, .steps = 7.0f},
             {.sizes = {}, .steps = 3.0f},
             {.sizes = {0, 8193, 1}, .weight_decay = 0.2f, .adapt = false},
             {.sizes = {4099, 2}, .lr = 0.1f, .weight_decay = 0.1f, .steps = 1000.0f}},
            rule_of(decay, true));
        randomize_moments(problem);
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
        LambRule rule = rule_of(LambDecay::kInUpdate, true);
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
    for (const LambDecay decay : kDecays) {
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
        ASSERT_EQ(problem.trust[1].ratio == 1.0, decay == LambDecay::kDecoupled);
        ASSERT_NE(problem.params.at(0, 0), 0.0f);
        ASSERT_NE(problem.params.at(1, 0), before);
    }
}

TYPED_TEST(LambTest, OverflowSkipsTheStepAlsoTheFirst) {
    LambProblem<TypeParam> problem({{.sizes = {4097, 3}}}, rule_of(LambDecay::kInUpdate, true));
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
        for (const LambDecay decay : kDecays) {
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
                    {{.sizes = {3, kNumel, 3}, .adapt = adapt}}, rule_of(LambDecay::kInUpdate, true));
                LambProblem<TypeParam> clean(
                    {{.sizes = {3, kNumel, 3}, .adapt = adapt}}, rule_of(LambDecay::kInUpdate, true));
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
