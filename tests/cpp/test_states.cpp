// States of bf16: how they are rounded, and a step with them against the step with states of fp32.
#include "random.h"

#include "exact_steps.h"
#include "settings.h"

namespace ddpcore::test {
namespace {

float float_of_bf16(uint16_t bits) {
    return cpu::load(BFloat16{bits});
}

// Over all random numbers: the two neighbours, each as often as the value is near it.
TEST(RoundingTest, EveryRandomNumberIsUsedOnce) {
    for (const float value : {1.0f, 1.00390625f, -3.1415927f, 1e-40f, 3.0e38f, 0.1f}) {
        const uint32_t bits = cpu::bits_of(value), dropped = bits & 0xffffu;
        uint32_t num_lower = 0, num_upper = 0;
        for (uint32_t random = 0; random < 1u << 16; ++random) {
            const uint16_t rounded = round_to_bf16(value, random);
            num_lower += rounded == bits >> 16;
            num_upper += rounded == (bits >> 16) + 1;
        }
        ASSERT_EQ(num_upper, dropped) << value;
        ASSERT_EQ(num_lower, (1u << 16) - dropped) << value;
    }
}

TEST(RoundingTest, SpecialValuesStayWhatTheyAre) {
    for (const uint32_t random : {0u, 1u, 0x8000u, 0xffffu}) {
        for (const float value : {0.0f, -0.0f, INFINITY, -INFINITY, 1.5f, 0x1p-133f}) {
            ASSERT_EQ(cpu::bits_of(float_of_bf16(round_to_bf16(value, random))), cpu::bits_of(value));
        }
        for (const uint32_t nan : {0x7f800001u, 0x7fffffffu, 0xffffffffu, 0xff800001u}) {
            ASSERT_TRUE(std::isnan(float_of_bf16(round_to_bf16(cpu::float_of(nan), random))));
        }
        for (const float sign : {1.0f, -1.0f}) {  // beyond the largest bf16 number
            ASSERT_EQ(round_to_bf16(sign * 0x1.fffffep127f, random) & 0x7fff, 0x7f7f);
            ASSERT_EQ(round_to_bf16(sign * 0x1.fe0002p127f, random) & 0x7fff, 0x7f7f);
        }
    }
}

TEST(RoundingTest, AWordIsThatOfItsDraw) {
    for (const uint64_t index : {uint64_t{0}, uint64_t{4}, (uint64_t{5} << 40) + 8}) {
        const Words four = four_words(7, 11, index / 4);
        for (uint64_t k = 0; k < 4; ++k) ASSERT_EQ(random_word(7, 11, index + k), four.words[k]);
    }
    ASSERT_EQ(bits_for(State::kFirst, 0x12345678u), 0x5678u);
    ASSERT_EQ(bits_for(State::kSecond, 0x12345678u), 0x1234u);
}

TEST(RoundingTest, CountsGoOnBeyondThoseOfFp32) {
    for (const float step : {0.0f, 1.0f, 0x1p24f - 1.0f}) {
        ASSERT_EQ(next_count(step, true), step + 1.0f);
        ASSERT_EQ(next_count(step, false), step + 1.0f);
    }
    ASSERT_EQ(next_count(0x1p24f, false), 0x1p24f);
    float step = 0x1p24f;
    for (int i = 0; i < 100; ++i, step = next_count(step, true)) {
        ASSERT_EQ(next_count(step, true), std::nextafter(step, INFINITY));
    }
    ASSERT_EQ(next_count(0x1p62f, true), 0x1p62f);
}

// The number that a state of fp32 is rounded to in a step of the problem.
template <typename Problem>
uint16_t expected_bits(const Problem& problem, size_t s, int64_t i, State state, float value) {
    const auto index = static_cast<uint64_t>(problem.segments[s].first_index + i);
    const auto step = static_cast<uint64_t>(problem.steps[problem.group_of[s]]);
    return round_to_bf16(value, bits_for(state, random_word(kStateSeed, step, index)));
}

template <typename T>
class StatesTest : public ::testing::Test {};
TYPED_TEST_SUITE(StatesTest, Storages);

template <typename From, typename To>
void copy_values(const From& from, To& to) {
    for (size_t s = 0; s < from.size(); ++s) {
        for (int64_t i = 0; i < from.numel(s); ++i) to.set(s, i, from.at(s, i));
    }
}

// The momentum is that of a step beside masters that equal the weights, rounded; and the weights are the same.
TYPED_TEST(StatesTest, MomentumIsThatOfFp32Rounded) {
    using Wide = Kind<TypeParam, !std::is_same_v<TypeParam, float>>;
    for (const SgdSetting& setting : all_settings()) {
        if (setting.rule.momentum == 0.0f) continue;
        const std::vector<GroupSetting> groups = {
            {.sizes = kManySizes, .weight_decay = setting.weight_decay, .steps = 3.0f}, {.sizes = {4097}}};
        SgdProblem<Kind<TypeParam, false, true>> rounded(groups, setting.rule, {.maximize = setting.maximize});
        SgdProblem<Wide> wide(groups, setting.rule, {.maximize = setting.maximize});
        copy_values(rounded.params, wide.params);
        if (Wide::kMaster) copy_values(rounded.params, wide.masters);
        copy_values(rounded.momenta, wide.momenta);
        take_step(wide);
        std::vector<std::vector<BFloat16>> expected = rounded.momenta.copy();
        for (size_t s = 0; s < expected.size(); ++s) {
            for (size_t i = 0; i < expected[s].size(); ++i) {
                const auto place = static_cast<int64_t>(i);
                expected[s][i] = {expected_bits(rounded, s, place, State::kFirst, wide.momenta.at(s, place))};
            }
        }
        take_step(rounded, 5);
        ASSERT_TRUE(rounded.momenta.same_bits(expected)) << setting.name();
        ASSERT_TRUE(rounded.params.same_bits(wide.params.copy())) << setting.name();
        ASSERT_TRUE(rounded.guards_untouched());
    }
}

TYPED_TEST(StatesTest, MomentsAreThoseOfFp32Rounded) {
    for (const AdamSetting& setting : all_adam_settings()) {
        const std::vector<GroupSetting> groups = {
            {.sizes = kManySizes, .weight_decay = setting.weight_decay, .steps = 3.0f}};
        AdamProblem<Kind<TypeParam, false, true>> rounded(groups, setting.rule);
        AdamProblem<Kind<TypeParam, false>> wide(groups, setting.rule);
        rounded.randomize_moments();
        copy_values(rounded.exp_avgs, wide.exp_avgs);
        copy_values(rounded.exp_avg_sqs, wide.exp_avg_sqs);
        take_step(wide);
        auto firsts = rounded.exp_avgs.copy(), seconds = rounded.exp_avg_sqs.copy();
        for (size_t s = 0; s < firsts.size(); ++s) {
            for (size_t i = 0; i < firsts[s].size(); ++i) {
                const auto place = static_cast<int64_t>(i);
                firsts[s][i] = {expected_bits(rounded, s, place, State::kFirst, wide.exp_avgs.at(s, place))};
                seconds[s][i] = {expected_bits(rounded, s, place, State::kSecond, wide.exp_avg_sqs.at(s, place))};
            }
        }
        // The weights are those of an update of the stored moments.
        const AdamScales scales = adam_scales(setting.rule, rounded.groups[0], 1.0f);
        auto weights = rounded.params.copy();
        for (size_t s = 0; s < weights.size(); ++s) {
            for (size_t i = 0; i < weights[s].size(); ++i) {
                const float weight = cpu::load(weights[s][i]);
                const float update = adam_update(weight, cpu::load(firsts[s][i]), cpu::load(seconds[s][i]), scales);
                weights[s][i] = cpu::store<TypeParam>(adam_element(weight, update, rounded.groups[0].lr, scales.keep));
            }
        }
        take_step(rounded, 5);
        ASSERT_TRUE(rounded.exp_avgs.same_bits(firsts) && rounded.exp_avg_sqs.same_bits(seconds));
        ASSERT_TRUE(rounded.params.same_bits(weights) && rounded.guards_untouched());
    }
}

// The updates that the first pass keeps are those that the second pass forms anew; and AdamW is LAMB without a ratio.
TYPED_TEST(StatesTest, EverySplitHasTheSameBits) {
    using Rounded = Kind<TypeParam, false, true>;
    const std::vector<GroupSetting> groups = {{.sizes = kManySizes, .adapt = false, .steps = 3.0f}};
    LambProblem<Rounded> whole(groups, rule_of(AdamDecay::kDecoupled, true)), split(groups, whole.lamb);
    AdamProblem<Rounded> adamw(groups, whole.lamb);
    LarsProblem<Rounded> lars(groups, {0.9f, 1.0f, true, false}, {LarsVariant::kYou2017, 0.02f, 1e-8f});
    LarsProblem<Rounded> lars_split(groups, lars.rule, lars.lars, {}, {.offset = 3});
    for (uint32_t step = 0; step < 3; ++step) {
        take_step(whole);
        take_step(split, 7 + step);
        take_step(adamw, 11 + step);
        take_step(lars);
        take_step(lars_split, 13 + step);
        ASSERT_TRUE(split.same_bits(whole) && adamw.same_bits(whole));
        ASSERT_TRUE(lars_split.same_bits(lars));
    }
}

}  // namespace
}  // namespace ddpcore::test
