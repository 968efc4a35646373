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
void expect_exact_stacked(int64_t num_learners, int64_t numel, int64_t offset) {
    StackedProblem<T> problem(num_learners, numel, offset);
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
            }
        }
    }
}

// So many learners that a tile is narrower than a block.
TYPED_TEST(MixTest, TallStacks) {
    ASSERT_NO_FATAL_FAILURE(expect_exact_stacked<TypeParam>(100, 4113, 0));
    ASSERT_NO_FATAL_FAILURE(expect_exact_stacked<TypeParam>(300, 133, 0));
}

TYPED_TEST(MixTest, StackHasTheBitsOfAMixOfEachRow) {
    constexpr int64_t kLearners = 4, kNumel = 9001;
    StackedProblem<TypeParam> before(kLearners, kNumel, 0), after(kLearners, kNumel, 0);
    after.randomize_matrix();
    cpu::mix_stacked_(after.args(), 0, after.num_blocks());
    for (int64_t j = 0; j < kLearners; ++j) {
        Buffer<TypeParam> row(kNumel);
        std::copy_n(before.weights.data() + j * kNumel, kNumel, row.data());
        std::vector<const void*> peers;
        std::vector<float> peer_weights;
        for (int64_t k = 0; k < kLearners; ++k) {
            if (k == j || after.entry(j, k) == 0.0f) continue;
            peers.push_back(before.weights.data() + k * kNumel);
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

// A learner without an edge to another must not catch its infinity: the zero entry is skipped, not multiplied.
TYPED_TEST(MixTest, ZeroEntriesOfAStackAreSkipped) {
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
