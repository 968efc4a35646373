// mix_ and mix_stacked_ against weighted sums in double.
#include "exact_averages.h"
#include "random.h"

namespace ddpcore::test {
namespace {

template <typename T>
void expect_exact_mix(int64_t numel, int64_t num_peers, int64_t offset) {
    MixProblem<T> problem(numel, num_peers, offset);
    expect_exact(problem, [&] {
        cpu::mix_(problem.args(), 0, problem.num_blocks());
        return summed(problem.partials, num_peers);
    });
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

// Weights that come from another place have the bits that they have in their own.
TYPED_TEST(MixTest, WeightsMayComeFromElsewhere) {
    for (const int64_t numel : kSizes) {
        for (const int64_t num_peers : {0, 1, 3}) {
            for (const float std : {0.0f, 0.3f}) {
                SCOPED_TRACE(::testing::Message() << "numel " << numel << " peers " << num_peers << " std " << std);
                MixProblem<TypeParam> in_place(numel, num_peers, 0), elsewhere(numel, num_peers, 0);
                const Buffer<TypeParam> before = elsewhere.weights;
                elsewhere.source = before.data();
                elsewhere.weights.randomize(99);
                in_place.noise = elsewhere.noise = {std, 7, 8, 9};
                for (auto* problem : {&in_place, &elsewhere}) cpu::mix_(problem->args(), 0, problem->num_blocks());
                ASSERT_TRUE(elsewhere.weights.same_bits(in_place.weights) && elsewhere.weights.guards_untouched());
                ASSERT_EQ(elsewhere.partials, in_place.partials);
            }
        }
    }
}

// ---- noise ----

// The noise is one more peer, the last one, whose elements are the normals of random.h.
template <typename T>
void expect_noise_is_a_term(int64_t numel, int64_t num_peers, int64_t first) {
    MixProblem<T> noisy(numel, num_peers, 1);
    const Buffer<T> before = noisy.weights;
    noisy.noise = some_noise(first);
    const MixArgs args = noisy.args();
    cpu::mix_(args, 0, noisy.num_blocks());
    for (int64_t i = 0; i < numel; ++i) {
        float mixed = args.self_weight * before[i];
        for (size_t k = 0; k < noisy.peers.size(); ++k) {
            mixed = mix_element(mixed, noisy.peer_weights[k], (*noisy.peers[k])[i]);
        }
        const auto index = static_cast<uint64_t>(args.noise.first + i);
        const Normals four = four_normals(args.noise.seed, args.noise.step, index / 4);
        const T expected = cpu::store<T>(mix_element(mixed, args.noise.std, four.values[index % 4]));
        ASSERT_TRUE(same_bits(noisy.weights.data() + i, &expected, 1)) << i;
    }
    MixProblem<T> silent(numel, num_peers, 0);
    cpu::mix_(silent.args(), 0, silent.num_blocks());
    ASSERT_EQ(noisy.partials, silent.partials);
    ASSERT_TRUE(noisy.weights.guards_untouched());
}

TYPED_TEST(MixTest, NoiseIsTheLastTerm) {
    for (const int64_t numel : kSizes) {
        for (const int64_t num_peers : {0, 1, 3}) {
            for (const int64_t first : {0, 1, 2, 3, 64}) {
                SCOPED_TRACE(::testing::Message() << "numel " << numel << " peers " << num_peers << " from " << first);
                ASSERT_NO_FATAL_FAILURE(expect_noise_is_a_term<TypeParam>(numel, num_peers, first));
            }
        }
    }
}

TYPED_TEST(MixTest, AnySplitIntoRangesHasTheSameNoise) {
    for (uint32_t seed = 0; seed < 5; ++seed) {
        MixProblem<TypeParam> whole(50001, 1, 0), split(50001, 1, 1);
        whole.noise = split.noise = some_noise(seed);
        cpu::mix_(whole.args(), 0, whole.num_blocks());
        for (const auto& [begin, end] : random_ranges(split.num_blocks(), seed)) cpu::mix_(split.args(), begin, end);
        ASSERT_TRUE(split.weights.same_bits(whole.weights));
        ASSERT_EQ(split.partials, whole.partials);
    }
}

// ---- stacks ----

template <typename T>
void expect_exact_stacked(int64_t num_learners, int64_t numel, int64_t offset, int64_t num_others = 0) {
    StackedProblem<T> problem(num_learners, numel, offset, num_others);
    problem.randomize_matrix();
    expect_exact(problem, [&] {
        cpu::mix_stacked_(problem.args(), 0, problem.num_blocks());
        return summed(problem.partials, num_learners);
    });
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

TYPED_TEST(MixTest, AStackWithoutDistancesHasTheSameBits) {
    for (const int64_t num_learners : {1, 2, 5, 40, 300}) {
        StackedProblem<TypeParam> with(num_learners, 4501, 0, 1), without(num_learners, 4501, 1, 1);
        with.randomize_matrix();
        without.randomize_matrix();
        StackedMixArgs args = without.args();
        args.partials = nullptr;
        cpu::mix_stacked_(with.args(), 0, with.num_blocks());
        cpu::mix_stacked_(args, 0, without.num_blocks());
        ASSERT_TRUE(without.weights.same_bits(with.weights)) << num_learners << " learners";
    }
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
