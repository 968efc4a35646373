// mix_sgd_step_ must have the bits of mix_ followed by sgd_step_, which are tested on their own.
#include "problems.h"

namespace ddpcore::test {
namespace {

template <typename T>
class MixSgdTest : public ::testing::Test {};
TYPED_TEST_SUITE(MixSgdTest, Storages);

TYPED_TEST(MixSgdTest, EveryRuleSizeAlignmentAndNumberOfPeers) {
    for (const SgdRule& rule : all_rules()) {
        for (const int64_t numel : kSizes) {
            for (const int64_t num_peers : {0, 1, 3}) {
                const int64_t offset = numel % 3;
                SCOPED_TRACE(
                    ::testing::Message() << "flags " << sgd_flags(rule) << " numel " << numel << "+" << offset
                                         << " peers " << num_peers);
                MixSgdProblem<TypeParam> fused(numel, num_peers, offset, rule), apart(numel, num_peers, 0, rule);
                cpu::mix_sgd_step_(fused.args(), 0, fused.mix.num_blocks());
                apart.mix_then_step();
                ASSERT_NO_FATAL_FAILURE(fused.expect_same_bits(apart));
            }
        }
    }
}

TYPED_TEST(MixSgdTest, AnySplitIntoRangesHasTheSameBits) {
    uint32_t seed = 0;
    for (const SgdRule& rule : all_rules()) {
        MixSgdProblem<TypeParam> whole(50001, 2, 0, rule), split(50001, 2, 1, rule);
        cpu::mix_sgd_step_(whole.args(), 0, whole.mix.num_blocks());
        for (const auto& [begin, end] : random_ranges(split.mix.num_blocks(), seed++)) {
            cpu::mix_sgd_step_(split.args(), begin, end);
        }
        ASSERT_NO_FATAL_FAILURE(split.expect_same_bits(whole));
    }
}

}  // namespace
}  // namespace ddpcore::test
