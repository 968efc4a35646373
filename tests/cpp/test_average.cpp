// average_ against sums in fp32, one term after the other.
#include "problems.h"

namespace ddpcore::test {
namespace {

template <typename T>
class AverageTest : public ::testing::Test {};
TYPED_TEST_SUITE(AverageTest, Storages);

template <typename T>
void expect_means(int64_t num_rows, int64_t size, int64_t numel, int64_t offset) {
    const AverageProblem<T> before(num_rows, size, numel, 0);
    AverageProblem<T> after(num_rows, size, numel, offset);
    cpu::average_(after.args(), 0, after.num_blocks());
    const std::vector<double> sums = summed(after.partials, num_rows);
    for (size_t k = 0; k < sums.size(); ++k) {
        double exact = 0.0;
        for (int64_t i = 0; i < numel; ++i) exact += (*before.rows[k])[i];
        ASSERT_NEAR(sums[k], exact, 1e-4 * static_cast<double>(numel)) << "row " << k;
    }
    for (int64_t own = 0; own < num_rows; own += size) {
        Buffer<T> expected(numel);
        for (int64_t i = 0; i < numel; ++i) {
            float sum = (*before.rows[static_cast<size_t>(own)])[i];
            for (int64_t k = own + 1; k < own + size; ++k) sum += (*before.rows[static_cast<size_t>(k)])[i];
            expected.set(i, sum / static_cast<float>(size));
        }
        for (int64_t k = own; k < own + size; ++k) {
            const auto& row = *after.rows[static_cast<size_t>(k)];
            ASSERT_TRUE(row.same_bits(expected) && row.guards_untouched()) << "row " << k;
        }
    }
}

TYPED_TEST(AverageTest, EverySizeAlignmentAndNumberOfRows) {
    for (const int64_t numel : kSizes) {
        for (const int64_t size : {1, 2, 3, 4, 5, 6, 8, 9, 40}) {
            for (const int64_t offset : kOffsets) {
                SCOPED_TRACE(::testing::Message() << "numel " << numel << "+" << offset << ", means of " << size);
                ASSERT_NO_FATAL_FAILURE(expect_means<TypeParam>(size, size, numel, offset));
                if (size < 5) {
                    ASSERT_NO_FATAL_FAILURE(expect_means<TypeParam>(3 * size, size, numel, offset));
                }
            }
        }
    }
}

// In a part of the vectors and in their rest.
TYPED_TEST(AverageTest, ASumTellsOfANumberThatIsNotFinite) {
    for (const float bad : {INFINITY, -INFINITY, NAN}) {
        for (const int64_t i : {0, 4095, 4112}) {
            AverageProblem<TypeParam> problem(6, 6, 4113, 0);
            problem.rows[2]->set(i, bad);
            cpu::average_(problem.args(), 0, problem.num_blocks());
            const std::vector<double> sums = summed(problem.partials, 6);
            for (size_t k = 0; k < 6; ++k) ASSERT_EQ(std::isfinite(sums[k]), k != 2) << "row " << k;
        }
    }
}

TYPED_TEST(AverageTest, AnySplitIntoRangesHasTheSameBits) {
    for (uint32_t seed = 0; seed < 5; ++seed) {
        AverageProblem<TypeParam> whole(6, 3, 50001, 0), split(6, 3, 50001, 1);
        cpu::average_(whole.args(), 0, whole.num_blocks());
        for (const auto& [begin, end] : random_ranges(split.num_blocks(), seed))
            cpu::average_(split.args(), begin, end);
        for (size_t k = 0; k < 6; ++k) {
            ASSERT_TRUE(split.rows[k]->same_bits(*whole.rows[k])) << "row " << k;
        }
        ASSERT_EQ(split.partials, whole.partials);
    }
}

}  // namespace
}  // namespace ddpcore::test
