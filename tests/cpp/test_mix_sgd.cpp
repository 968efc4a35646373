// mix_sgd_step_ must have the bits of mix_ followed by sgd_step_, which are tested on their own.
#include "settings.h"

namespace ddpcore::test {
namespace {

template <typename T>
class MixSgdTest : public ::testing::Test {};
TYPED_TEST_SUITE(MixSgdTest, Storages);

TYPED_TEST(MixSgdTest, EverySettingSizeAlignmentAndNumberOfPeers) {
    uint32_t turn = 0;
    for (const SgdSetting& setting : all_settings()) {
        for (const int64_t numel : kSizes) {
            for (const int64_t num_peers : {0, 1, 3}) {
                const int64_t offset = numel % 3;
                SCOPED_TRACE(
                    ::testing::Message() << setting.name() << " numel " << numel << "+" << offset << " peers "
                                         << num_peers);
                MixSgdProblem<TypeParam> fused(
                    numel, num_peers, offset, setting.rule, setting.weight_decay, setting.maximize);
                MixSgdProblem<TypeParam> apart(
                    numel, num_peers, 0, setting.rule, setting.weight_decay, setting.maximize);
                if (turn % 3 == 0) fused.mix.noise = apart.mix.noise = some_noise(numel);
                fused.steps = apart.steps = static_cast<float>(turn++ % 2);  // the first step, and a later one
                cpu::mix_sgd_step_(fused.args(), 0, fused.mix.num_blocks());
                apart.mix_then_step();
                ASSERT_NO_FATAL_FAILURE(fused.expect_same_bits(apart));
            }
        }
    }
}

TYPED_TEST(MixSgdTest, AnySplitIntoRangesHasTheSameBits) {
    uint32_t seed = 0;
    for (const SgdSetting& setting : all_settings()) {
        MixSgdProblem<TypeParam> whole(50001, 2, 0, setting.rule, setting.weight_decay, setting.maximize);
        MixSgdProblem<TypeParam> split(50001, 2, 1, setting.rule, setting.weight_decay, setting.maximize);
        whole.steps = split.steps = static_cast<float>(seed % 2);
        cpu::mix_sgd_step_(whole.args(), 0, whole.mix.num_blocks());
        for (const auto& [begin, end] : random_ranges(split.mix.num_blocks(), seed++)) {
            cpu::mix_sgd_step_(split.args(), begin, end);
        }
        ASSERT_NO_FATAL_FAILURE(split.expect_same_bits(whole));
    }
}

TYPED_TEST(MixSgdTest, WeightsMayComeFromElsewhere) {
    for (const SgdSetting& setting : all_settings()) {
        for (const int64_t num_peers : {1, 2}) {
            SCOPED_TRACE(::testing::Message() << setting.name() << " peers " << num_peers);
            MixSgdProblem<TypeParam> in_place(5001, num_peers, 0, setting.rule, setting.weight_decay, setting.maximize);
            MixSgdProblem<TypeParam> elsewhere(
                5001, num_peers, 0, setting.rule, setting.weight_decay, setting.maximize);
            const Buffer<TypeParam> before = elsewhere.mix.weights;
            elsewhere.mix.source = before.data();
            elsewhere.mix.weights.randomize(99);
            for (auto* one : {&in_place, &elsewhere}) cpu::mix_sgd_step_(one->args(), 0, one->mix.num_blocks());
            ASSERT_NO_FATAL_FAILURE(elsewhere.expect_same_bits(in_place));
        }
    }
}

// A learning rate in memory counts, and a group that counts nothing has no first step.
TYPED_TEST(MixSgdTest, LearningRateFromMemoryAndNoCount) {
    const SgdRule rule{0.9f, 0.7f, false, true};
    MixSgdProblem<TypeParam> passed(5000, 1, 0, rule, 0.03f, false), stored(5000, 1, 0, rule, 0.03f, false);
    passed.steps = 4.0f;
    const float lr = passed.group.lr;
    stored.group.lr = NAN;
    stored.group.device_lr = &lr;
    stored.group.step = nullptr;
    for (auto* problem : {&passed, &stored}) cpu::mix_sgd_step_(problem->args(), 0, problem->mix.num_blocks());
    ASSERT_NO_FATAL_FAILURE(stored.expect_same_bits(passed));
}

}  // namespace
}  // namespace ddpcore::test
