// segment_norms against sums of squares in long double.
#include "exact_averages.h"

namespace ddpcore::test {
namespace {

template <typename T>
void expect_exact_norms(const std::vector<int64_t>& sizes, int64_t offset, float scale = 2.0f) {
    NormProblem<T> problem(sizes, offset, scale);
    cpu::segment_norms(problem.args(), 0, problem.num_blocks());
    expect_exact(problem, problem.sums());
}

template <typename T>
class NormsTest : public ::testing::Test {};
TYPED_TEST_SUITE(NormsTest, Storages);

TYPED_TEST(NormsTest, EverySizeAndAlignment) {
    for (const int64_t numel : kSizes) {
        for (const int64_t offset : kOffsets) {
            SCOPED_TRACE(::testing::Message() << "numel " << numel << "+" << offset);
            ASSERT_NO_FATAL_FAILURE(expect_exact_norms<TypeParam>({numel}, offset));
        }
    }
}

TYPED_TEST(NormsTest, ManySegmentsSomeEmpty) {
    ASSERT_NO_FATAL_FAILURE(expect_exact_norms<TypeParam>(kManySizes, 1));
    ASSERT_NO_FATAL_FAILURE(expect_exact_norms<TypeParam>({}, 0));
    ASSERT_NO_FATAL_FAILURE(expect_exact_norms<TypeParam>({0, 0}, 0));
}

// Squares that leave the range of fp32 on either side, where the type has such values.
TYPED_TEST(NormsTest, SquaresNeitherOverflowNorUnderflow) {
    const float large = std::is_same_v<TypeParam, Float16> ? 60000.0f : 1e30f;
    const float small = std::is_same_v<TypeParam, Float16> ? 1e-7f : 1e-30f;
    ASSERT_NO_FATAL_FAILURE(expect_exact_norms<TypeParam>({5000}, 0, large));
    ASSERT_NO_FATAL_FAILURE(expect_exact_norms<TypeParam>({5000}, 0, small));
}

TYPED_TEST(NormsTest, AnySplitIntoRangesHasTheSameBits) {
    NormProblem<TypeParam> whole(kManySizes, 0), split(kManySizes, 3);
    cpu::segment_norms(whole.args(), 0, whole.num_blocks());
    for (uint32_t seed = 0; seed < 20; ++seed) {
        split.partials.assign(split.partials.size(), NAN);
        for (const auto& [begin, end] : random_ranges(split.num_blocks(), seed)) {
            cpu::segment_norms(split.args(), begin, end);
        }
        ASSERT_EQ(split.partials, whole.partials);
    }
}

TYPED_TEST(NormsTest, TheTotalHasThePartialSumsOfItsTensors) {
    NormProblem<TypeParam> each(kManySizes, 0), all(kManySizes, 1);
    cpu::segment_norms(each.args(), 0, each.num_blocks());
    for (const auto& [begin, end] : random_ranges(all.num_blocks(), 5)) cpu::total_norm_(all.args(), begin, end);
    ASSERT_EQ(all.partials, each.partials);
}

TYPED_TEST(NormsTest, SlicesOfAFlatBufferHaveTheBitsOfTheirOwnTensors) {
    constexpr int64_t kFirst = 5003, kSecond = 9001;
    NormProblem<TypeParam> flat({kFirst + kSecond}, 0), list({kFirst, kSecond}, 0);
    for (int64_t i = 0; i < kFirst + kSecond; ++i) {
        if (i < kFirst) {
            list.data[0]->set(i, (*flat.data[0])[i]);
        } else {
            list.data[1]->set(i - kFirst, (*flat.data[0])[i]);
        }
    }
    flat.segments = {{flat.data[0]->data(), kFirst, 0}, {flat.data[0]->data() + kFirst, kSecond, 0}};
    flat.partials.assign(static_cast<size_t>(number_blocks(flat.segments)), NAN);
    cpu::segment_norms(flat.args(), 0, flat.num_blocks());
    cpu::segment_norms(list.args(), 0, list.num_blocks());
    ASSERT_EQ(flat.sums(), list.sums());
}

}  // namespace
}  // namespace ddpcore::test
