// mix_ and mix_stacked_ against weighted sums in double.
#include "problems.h"

namespace ddpcore::test {
namespace {

template <typename T>
void expect_exact_mix(int64_t numel, int64_t num_peers, int64_t offset) {
    const MixProblem<T> before(numel, num_peers, offset);
    MixProblem<T> after(numel, num_peers, offset);
    const MixArgs args = after.args();
    cpu::mix_(args, 0, after.num_blocks());
    std::vector<double> distances(static_cast<size_t>(num_peers));
    for (int64_t i = 0; i < numel; ++i) {
        double exact = static_cast<double>(args.self_weight) * before.weights[i], magnitude = std::abs(exact);
        for (size_t k = 0; k < distances.size(); ++k) {
            const double peer = (*before.peers[k])[i], term = before.peer_weights[k] * peer;
            exact += term;
            magnitude += std::abs(term);
            distances[k] += (before.weights[i] - peer) * (before.weights[i] - peer);
        }
        // One product for the own term, a product and a sum for each peer.
        ASSERT_NEAR(after.weights[i], exact, tolerance<T>(exact, magnitude, static_cast<int>(1 + 2 * num_peers))) << i;
    }
    const std::vector<double> sums = summed(after.partials, num_peers);
    for (size_t k = 0; k < distances.size(); ++k) {
        ASSERT_NEAR(sums[k], distances[k], distance_tolerance(distances[k])) << "peer " << k;
        ASSERT_TRUE(after.peers[k]->same_bits(*before.peers[k]));
    }
    ASSERT_TRUE(after.weights.guards_untouched());
}

template <typename T>
class MixTest : public ::testing::Test {};
TYPED_TEST_SUITE(MixTest, Storages);

TYPED_TEST(MixTest, EverySizeAlignmentAndNumberOfPeers) {
    for (const int64_t numel : kSizes) {
        for (const int64_t num_peers : {0, 1, 2, 3, 7}) {
            for (const int64_t offset : kOffsets) {
                SCOPED_TRACE(::testing::Message() << "numel " << numel << "+" << offset << " peers " << num_peers);
                ASSERT_NO_FATAL_FAILURE(expect_exact_mix<TypeParam>(numel, num_peers, offset));
            }
        }
    }
}

TYPED_TEST(MixTest, AnySplitIntoRangesHasTheSameBits) {
    for (uint32_t seed = 0; seed < 20; ++seed) {
        MixProblem<TypeParam> whole(50001, 3, 0), split(50001, 3, 1);
        cpu::mix_(whole.args(), 0, whole.num_blocks());
        for (const auto& [begin, end] : random_ranges(split.num_blocks(), seed)) cpu::mix_(split.args(), begin, end);
        ASSERT_TRUE(split.weights.same_bits(whole.weights));
        ASSERT_EQ(split.partials, whole.partials);
    }
}

// ---- stacks ----

template <typename T>
void expect_exact_stacked(int64_t num_learners, int64_t numel, int64_t offset, int64_t num_others = 0) {
    StackedProblem<T> before(num_learners, numel, offset, num_others), after(num_learners, numel, offset, num_others);
    before.randomize_matrix();
    after.randomize_matrix();
    cpu::mix_stacked_(after.args(), 0, after.num_blocks());
    std::vector<double> distances(static_cast<size_t>(num_learners)), slack(distances);
    for (int64_t i = 0; i < numel; ++i) {
        double mean = 0.0;
        for (int64_t j = 0; j < num_learners; ++j) mean += before.value(j, i) / static_cast<double>(num_learners);
        for (int64_t j = 0; j < num_learners; ++j) {
            double exact = 0.0, magnitude = 0.0;
            for (int64_t k = 0; k < before.num_rows; ++k) {
                exact += before.entry(j, k) * before.value(k, i);
                magnitude += std::abs(before.entry(j, k) * before.value(k, i));
            }
            ASSERT_NEAR(after.value(j, i), exact, tolerance<T>(exact, magnitude, static_cast<int>(2 * before.num_rows)))
                << "learner " << j << " element " << i;
            const double difference = std::abs(before.value(j, i) - mean);
            // Values are at most 2 and so is the mean: L sums, the share's rounding, its product and the difference.
            const double error = static_cast<double>(num_learners + 3) * half_ulp<float>(2.0);
            distances[static_cast<size_t>(j)] += difference * difference;
            slack[static_cast<size_t>(j)] += (2.0 * difference + error) * error;
        }
    }
    const std::vector<double> sums = summed(after.partials, num_learners);
    for (size_t j = 0; j < sums.size(); ++j) {
        ASSERT_NEAR(sums[j], distances[j], distance_tolerance(distances[j]) + slack[j]) << "learner " << j;
    }
    for (size_t k = 0; k < after.others.size(); ++k) ASSERT_TRUE(after.others[k]->same_bits(*before.others[k]));
    ASSERT_TRUE(after.weights.guards_untouched());
}

TYPED_TEST(MixTest, StacksOfEverySizeAlignmentAndNumberOfLearners) {
    for (const int64_t numel : kSizes) {
        for (const int64_t num_learners : {1, 2, 3, 4, 5, 16}) {
            for (const int64_t offset : {0, 1}) {
                SCOPED_TRACE(::testing::Message() << num_learners << " learners, numel " << numel << "+" << offset);
                ASSERT_NO_FATAL_FAILURE(expect_exact_stacked<TypeParam>(num_learners, numel, offset));
                ASSERT_NO_FATAL_FAILURE(expect_exact_stacked<TypeParam>(num_learners, numel, offset, 3));
            }
        }
    }
}

// So many learners that a tile is narrower than a block; of 4096, a cache line of each row.
TYPED_TEST(MixTest, TallStacks) {
    ASSERT_NO_FATAL_FAILURE(expect_exact_stacked<TypeParam>(100, 4113, 0));
    ASSERT_NO_FATAL_FAILURE(expect_exact_stacked<TypeParam>(300, 133, 0));
}

// Each of 4096 learners takes the weights of the next one: exact, whatever the tiles.
TYPED_TEST(MixTest, ATallStackIsMixedFromTheOldRows) {
    constexpr int64_t kLearners = 4096, kNumel = 70;
    const StackedProblem<TypeParam> before(kLearners, kNumel, 0);
    StackedProblem<TypeParam> after(kLearners, kNumel, 0);
    StackedMixArgs args = after.args();
    for (int64_t j = 0; j < kLearners; ++j) {
        after.columns[static_cast<size_t>(j)] = (j + 1) % kLearners;
        after.values[static_cast<size_t>(j)] = 1.0f;
    }
    cpu::mix_stacked_(args, 0, after.num_blocks());
    for (int64_t j = 0; j < kLearners; ++j) {
        for (int64_t i = 0; i < kNumel; ++i) ASSERT_EQ(after.value(j, i), before.value((j + 1) % kLearners, i));
    }
}

// Entries are added in the order in which they stand, which rounding shows; none at all make a row of zeros.
TYPED_TEST(MixTest, EntriesOfAStackKeepTheirOrder) {
    StackedProblem<TypeParam> stack(3, 1, 0, 1);
    for (int64_t k = 0; k < 3; ++k) stack.weights.set(k, k == 1 ? 1.0f : 2048.0f);
    stack.others[0]->set(0, 1.0f);
    StackedMixArgs args = stack.args();
    stack.offsets = {0, 3, 6, 6};
    stack.columns = {0, 3, 2, 2, 0, 3};
    stack.values = {4096.0f, 0.25f, -4096.0f, 4096.0f, -4096.0f, 0.25f};  // 2^23 + 1/4 is no float
    args.offsets = stack.offsets.data();
    args.columns = stack.columns.data();
    args.values = stack.values.data();
    cpu::mix_stacked_(args, 0, stack.num_blocks());
    ASSERT_EQ(stack.value(0, 0), 0.0);
    ASSERT_EQ(stack.value(1, 0), 0.25);
    ASSERT_EQ(stack.value(2, 0), 0.0);
}

TYPED_TEST(MixTest, StackHasTheBitsOfAMixOfEachRow) {
    constexpr int64_t kLearners = 4, kNumel = 9001;
    StackedProblem<TypeParam> before(kLearners, kNumel, 0, 2), after(kLearners, kNumel, 0, 2);
    after.randomize_matrix();
    cpu::mix_stacked_(after.args(), 0, after.num_blocks());
    for (int64_t j = 0; j < kLearners; ++j) {
        Buffer<TypeParam> row(kNumel);
        std::copy_n(before.weights.data() + j * kNumel, kNumel, row.data());
        std::vector<const void*> peers;
        std::vector<float> peer_weights;
        for (int64_t k = 0; k < after.num_rows; ++k) {
            if (k == j || after.entry(j, k) == 0.0f) continue;
            peers.push_back(
                k < kLearners ? before.weights.data() + k * kNumel : before.pointers[size_t(k) - kLearners]);
            peer_weights.push_back(after.entry(j, k));
        }
        const auto num_peers = static_cast<int64_t>(peers.size());
        std::vector<double> partials(static_cast<size_t>(after.num_blocks() * num_peers));
        const MixArgs args{row.data(), peers.data(),          peer_weights.data(), num_peers, after.entry(j, j),
                           kNumel,     dtype_of<TypeParam>(), partials.data(),     nullptr};
        cpu::mix_(args, 0, after.num_blocks());
        ASSERT_EQ(std::memcmp(row.data(), after.weights.data() + j * kNumel, kNumel * sizeof(TypeParam)), 0);
    }
}

// A learner without an edge to another must not catch its infinity.
TYPED_TEST(MixTest, WhatIsNoEntryOfAStackIsNotRead) {
    StackedProblem<TypeParam> problem(3, 20, 0);
    for (int64_t j = 0; j < 3; ++j) problem.entry(j, j) = 1.0f;
    problem.weights.set(20 + 7, HUGE_VALF);
    const Buffer<TypeParam> before = problem.weights;
    cpu::mix_stacked_(problem.args(), 0, problem.num_blocks());
    ASSERT_TRUE(problem.weights.same_bits(before));
}

TYPED_TEST(MixTest, AnySplitOfAStackIntoRangesHasTheSameBits) {
    for (uint32_t seed = 0; seed < 10; ++seed) {
        StackedProblem<TypeParam> whole(5, 50001, 0), split(5, 50001, 3);
        whole.randomize_matrix();
        split.randomize_matrix();
        cpu::mix_stacked_(whole.args(), 0, whole.num_blocks());
        for (const auto& [begin, end] : random_ranges(split.num_blocks(), seed)) {
            cpu::mix_stacked_(split.args(), begin, end);
        }
        ASSERT_TRUE(split.weights.same_bits(whole.weights));
        ASSERT_EQ(split.partials, whole.partials);
    }
}

}  // namespace
}  // namespace ddpcore::test
