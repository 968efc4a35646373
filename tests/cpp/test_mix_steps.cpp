// A step that begins with a mix must have the bits of mix_ and then the step, which are tested on their own.
#include "settings.h"

namespace ddpcore::test {
namespace {

// One pass against two. The second step of both starts from the states of the first.
template <typename Problem, typename... Options>
void expect_two_passes(Problem& one, Problem& two, uint32_t seed, const Options&... options) {
    for (auto* problem : {&one, &two}) problem->mix_with(options...);
    take_step(one, seed);
    two.mix_now();
    take_step(two);
    ASSERT_TRUE(one.same_bits(two) && one.guards_untouched());
}

template <typename T>
class MixStepTest : public ::testing::Test {};
TYPED_TEST_SUITE(MixStepTest, Storages);

// Calls expect(one, two) for two equal problems of each optimizer, whose params are one row.
template <typename T, typename Expect>
void for_each_pair(const std::vector<int64_t>& sizes, size_t turn, int64_t offset, Expect&& expect) {
    const std::vector<GroupSetting> groups = {{.sizes = sizes, .steps = static_cast<float>(turn % 2)}};
    const ScalingSetting scaling{.maximize = turn % 3 == 0};
    for_each_optimizer<Kind<T, false>>(
        groups, scaling, turn,
        [&](auto& one) {
            for_each_optimizer<Kind<T, false>>(
                groups, scaling, turn,
                [&](auto& two) {
                    if constexpr (std::is_same_v<decltype(one), decltype(two)>) expect(one, two);
                },
                {.offset = 0, .flat = true});
        },
        {.offset = offset, .flat = true});
}

TYPED_TEST(MixStepTest, EverySettingAlignmentAndNumberOfPeers) {
    for (size_t turn = 0; turn < all_settings().size(); ++turn) {
        const std::vector<int64_t> sizes = {0, 1, 4097, 5, 0, static_cast<int64_t>(turn * 300)};
        for (const int64_t num_peers : {0, 1, 3}) {
            const Noise noise = turn % 4 == 1 ? some_noise(static_cast<int64_t>(turn)) : Noise{};
            for_each_pair<TypeParam>(sizes, turn, static_cast<int64_t>(turn % 3), [&](auto& one, auto& two) {
                ASSERT_NO_FATAL_FAILURE(expect_two_passes(one, two, 0, num_peers, noise, turn % 5 < 2));
            });
        }
    }
}

TYPED_TEST(MixStepTest, AnySplitIntoRangesHasTheSameBits) {
    for (size_t turn = 0; turn < 12; ++turn) {
        for_each_pair<TypeParam>(kManySizes, turn, 1, [&](auto& one, auto& two) {
            ASSERT_NO_FATAL_FAILURE(expect_two_passes(one, two, static_cast<uint32_t>(2 * turn + 1), 2));
        });
    }
}

}  // namespace
}  // namespace ddpcore::test
