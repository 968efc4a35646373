// noise_sums against products in long double.
#include "exact_averages.h"

namespace ddpcore::test {
namespace {

template <typename T>
void expect_exact_noise(int64_t num_rows, const std::vector<int64_t>& sizes, int64_t offset, bool with_origin) {
    GramProblem<T> problem(num_rows, sizes, offset, with_origin);
    cpu::noise_sums(problem.args(), 0, problem.num_blocks());
    cpu::sum_pairs(problem.args());
    expect_exact(problem, problem.sums);
    for (const auto& row : problem.rows) ASSERT_TRUE(row->guards_untouched());
}

template <typename T>
class NoiseTest : public ::testing::Test {};
TYPED_TEST_SUITE(NoiseTest, Storages);

TYPED_TEST(NoiseTest, EverySizeAndNumberOfRows) {
    for (const int64_t numel : {0, 1, 15, 16, 17, 4095, 4096, 4097, 10003}) {
        for (const int64_t num_rows : {1, 2, 3, 4, 5, 8, 9}) {
            for (const bool with_origin : {false, true}) {
                SCOPED_TRACE(::testing::Message() << "numel " << numel << " rows " << num_rows);
                ASSERT_NO_FATAL_FAILURE(expect_exact_noise<TypeParam>(num_rows, {numel}, 0, with_origin));
                ASSERT_NO_FATAL_FAILURE(expect_exact_noise<TypeParam>(num_rows, {numel}, 3, with_origin));
            }
        }
    }
}

TYPED_TEST(NoiseTest, ManySegmentsSomeEmpty) {
    ASSERT_NO_FATAL_FAILURE(expect_exact_noise<TypeParam>(3, kManySizes, 1, false));
    ASSERT_NO_FATAL_FAILURE(expect_exact_noise<TypeParam>(6, kManySizes, 0, true));
    ASSERT_NO_FATAL_FAILURE(expect_exact_noise<TypeParam>(2, {}, 0, false));
    ASSERT_NO_FATAL_FAILURE(expect_exact_noise<TypeParam>(2, {0, 0}, 0, true));
}

TYPED_TEST(NoiseTest, AnySplitIntoRangesHasTheSameBits) {
    GramProblem<TypeParam> whole(5, kManySizes, 0, true), split(5, kManySizes, 3, true);
    cpu::noise_sums(whole.args(), 0, whole.num_blocks());
    for (uint32_t seed = 0; seed < 20; ++seed) {
        split.partials.assign(split.partials.size(), NAN);
        for (const auto& [begin, end] : random_ranges(split.num_blocks(), seed)) {
            cpu::noise_sums(split.args(), begin, end);
        }
        ASSERT_EQ(split.partials, whole.partials);
    }
}

}  // namespace
}  // namespace ddpcore::test
