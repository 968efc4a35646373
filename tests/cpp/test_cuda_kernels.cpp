// Compares the CUDA kernels of averages and norms with the CPU kernels: elements have the same bits, sums the same
// terms in another order. Skipped, with the reason, if there is no CUDA device.
#include <numeric>

#include "device_problems.h"

namespace ddpcore::test {
namespace {

void expect_near(const std::vector<double>& device, const std::vector<double>& host) {
    ASSERT_EQ(device.size(), host.size());
    for (size_t i = 0; i < host.size(); ++i) ASSERT_NEAR(device[i], host[i], host[i] * kSumTolerance) << "sum " << i;
}

TYPED_TEST_SUITE(CudaTest, Storages);

// ---- mix_ ----

// Leaves the sums of the device in `sums`.
template <typename T>
void expect_cpu_mix(int64_t numel, int64_t num_peers, int64_t offset, std::vector<double>& sums) {
    MixProblem<T> host(numel, num_peers, 0);
    const DeviceMix<T> device(host, offset);
    ASSERT_CUDA(cuda::mix_(device.args, nullptr));
    cpu::mix_(host.args(), 0, host.num_blocks());
    ASSERT_TRUE(device.weights.same_bits(host.weights));
    sums = device.sums.download();
    ASSERT_NO_FATAL_FAILURE(expect_near(sums, summed(host.partials, num_peers)));
}

TYPED_TEST(CudaTest, Mix) {
    for (const int64_t numel : kDeviceSizes) {
        for (const int64_t num_peers : {0, 1, 2, 8, 9, 33}) {
            SCOPED_TRACE(::testing::Message() << "numel " << numel << " peers " << num_peers);
            std::vector<double> aligned, misaligned;
            ASSERT_NO_FATAL_FAILURE(expect_cpu_mix<TypeParam>(numel, num_peers, 0, aligned));
            ASSERT_NO_FATAL_FAILURE(expect_cpu_mix<TypeParam>(numel, num_peers, 1, misaligned));
            ASSERT_EQ(aligned, misaligned);
        }
    }
}

// A first number of every place in its four.
TYPED_TEST(CudaTest, Noise) {
    for (const int64_t numel : kDeviceSizes) {
        for (const int64_t num_peers : {0, 1, 9}) {
            for (const int64_t first : {0, 1, 2, 3}) {
                SCOPED_TRACE(::testing::Message() << "numel " << numel << " peers " << num_peers << " from " << first);
                MixProblem<TypeParam> host(numel, num_peers, 0);
                host.noise = some_noise(first);
                const DeviceMix<TypeParam> device(host, first % 2);
                ASSERT_CUDA(cuda::mix_(device.args, nullptr));
                cpu::mix_(host.args(), 0, host.num_blocks());
                ASSERT_TRUE(device.weights.same_bits(host.weights));
            }
        }
    }
}

// Aligned and not.
TYPED_TEST(CudaTest, WeightsMayComeFromElsewhere) {
    for (const int64_t numel : kDeviceSizes) {
        for (const int64_t num_peers : {0, 1, 9}) {
            for (const int64_t offset : {0, 1}) {
                SCOPED_TRACE(::testing::Message() << "numel " << numel << " peers " << num_peers << " at " << offset);
                MixProblem<TypeParam> host(numel, num_peers, 0);
                const Buffer<TypeParam> before = host.weights;
                DeviceMix<TypeParam> mix(host, 0);
                const DeviceBuffer<TypeParam> out(numel, offset);
                mix.args.source = mix.args.weights;
                mix.args.weights = out.data();
                ASSERT_CUDA(cuda::mix_(mix.args, nullptr));
                cpu::mix_(host.args(), 0, host.num_blocks());
                ASSERT_TRUE(out.same_bits(host.weights));
                ASSERT_TRUE(mix.weights.same_bits(before));
            }
        }
    }
}

TYPED_TEST(CudaTest, TooManyPeersOrLearnersIsAnError) {
    std::vector<double> sums;
    ASSERT_NO_FATAL_FAILURE(expect_cpu_mix<TypeParam>(19, cuda::kMaxPeers, 0, sums));
    MixProblem<TypeParam> host(1, cuda::kMaxPeers + 1, 0);
    const DeviceMix<TypeParam> device(host, 0);
    ASSERT_EQ(cuda::mix_(device.args, nullptr), cudaErrorInvalidValue);
    StackedMixArgs stack{};
    stack.num_learners = cuda::kMaxLearners + 1;
    ASSERT_EQ(cuda::mix_stacked_(stack, nullptr), cudaErrorInvalidValue);
    stack.num_learners = 1;
    stack.num_others = cuda::kMaxPeers + 1;
    ASSERT_EQ(cuda::mix_stacked_(stack, nullptr), cudaErrorInvalidValue);
}

// ---- mix_stacked_ ----

template <typename T>
void expect_cpu_stacked(
    int64_t num_learners, int64_t numel, int64_t offset, std::vector<double>& sums, int64_t num_others = 0) {
    StackedProblem<T> host(num_learners, numel, 0, num_others);
    host.randomize_matrix();
    const DeviceStacked<T> device(host, offset);
    cpu::mix_stacked_(host.args(), 0, host.num_blocks());
    ASSERT_CUDA(cuda::mix_stacked_(device.args, nullptr));
    ASSERT_TRUE(device.weights.same_bits(host.weights));
    sums = device.sums.download();
    ASSERT_NO_FATAL_FAILURE(expect_near(sums, summed(host.partials, num_learners)));
}

// Rows of 8000 elements are all aligned to 16 bytes; those of the odd sizes are not, except the first.
TYPED_TEST(CudaTest, MixStacked) {
    std::vector<int64_t> sizes = kDeviceSizes;
    sizes.push_back(8000);
    for (const int64_t numel : sizes) {
        for (const int64_t num_learners : {1, 2, 3, 5, 16, 100}) {
            if (num_learners * numel > kMostStacked) continue;
            SCOPED_TRACE(::testing::Message() << num_learners << " learners, numel " << numel);
            std::vector<double> aligned, misaligned;
            ASSERT_NO_FATAL_FAILURE(expect_cpu_stacked<TypeParam>(num_learners, numel, 0, aligned));
            ASSERT_NO_FATAL_FAILURE(expect_cpu_stacked<TypeParam>(num_learners, numel, 1, misaligned));
            ASSERT_EQ(aligned, misaligned);
            if (num_learners > 5) continue;
            const int64_t num_others = num_learners == 5 ? 9 : 2;  // more than the small table holds, and fewer
            ASSERT_NO_FATAL_FAILURE(expect_cpu_stacked<TypeParam>(num_learners, numel, 0, aligned, num_others));
            ASSERT_NO_FATAL_FAILURE(expect_cpu_stacked<TypeParam>(num_learners, numel, 1, misaligned, num_others));
            ASSERT_EQ(aligned, misaligned);
        }
    }
    std::vector<double> sums;
    ASSERT_NO_FATAL_FAILURE(expect_cpu_stacked<TypeParam>(2, 72, 0, sums, cuda::kMaxPeers));
    ASSERT_NO_FATAL_FAILURE(expect_cpu_stacked<TypeParam>(cuda::kMaxLearners, 72, 0, sums));
    ASSERT_NO_FATAL_FAILURE(expect_cpu_stacked<TypeParam>(kManyLearners, kElementsOfManyLearners, 0, sums));
}

// ---- average_ ----

TYPED_TEST(CudaTest, Average) {
    for (const int64_t numel : kDeviceSizes) {
        for (const auto& [num_rows, size] : {std::pair{1, 1}, {2, 2}, {6, 3}, {16, 16}, {17, 17}, {40, 5}}) {
            if (num_rows * numel > kMostStacked) continue;
            for (const int64_t offset : {0, 1}) {
                SCOPED_TRACE(::testing::Message() << num_rows << " rows of " << numel << ", means of " << size);
                AverageProblem<TypeParam> host(num_rows, size, numel, 0);
                const DeviceAverage<TypeParam> device(host, offset);
                ASSERT_CUDA(cuda::average_(device.args, nullptr));
                cpu::average_(host.args(), 0, host.num_blocks());
                for (size_t k = 0; k < host.rows.size(); ++k) ASSERT_TRUE(device.rows[k]->same_bits(*host.rows[k]));
                const std::vector<double> sums = device.sums.download(), expected = summed(host.partials, num_rows);
                for (size_t k = 0; k < sums.size(); ++k) ASSERT_NEAR(sums[k], expected[k], 1e-5 * double(numel));
            }
        }
    }
}

// More rows than a launch takes, and more than a mean may have.
TYPED_TEST(CudaTest, AverageOfManyRows) {
    for (const auto& [num_rows, size] : {std::pair{cuda::kMaxAveraged, cuda::kMaxAveraged}, {2100L, 700L}}) {
        AverageProblem<TypeParam> host(num_rows, size, 19, 0);
        const DeviceAverage<TypeParam> device(host, 0);
        ASSERT_CUDA(cuda::average_(device.args, nullptr));
        cpu::average_(host.args(), 0, 1);
        for (size_t k = 0; k < host.rows.size(); ++k) ASSERT_TRUE(device.rows[k]->same_bits(*host.rows[k]));
    }
    AverageArgs many{};
    many.num_rows = many.size = cuda::kMaxAveraged + 1;
    ASSERT_EQ(cuda::average_(many, nullptr), cudaErrorInvalidValue);
}

// ---- segment_norms and total_norm_ ----

// After the norms of the host are formed.
template <typename T>
void expect_cpu_total(NormProblem<T>& host, int64_t offset) {
    DeviceNorms<T> device(host, offset);
    const DeviceBuffer<double> total(1);
    device.args.sums = total.data();
    ASSERT_CUDA(cuda::total_norm_(device.args, nullptr));
    const std::vector<double> sums = host.sums();
    ASSERT_NO_FATAL_FAILURE(expect_near(total.download(), {std::accumulate(sums.begin(), sums.end(), 0.0)}));
}

template <typename T>
void expect_cpu_norms(const std::vector<int64_t>& sizes, int64_t offset, std::vector<double>& sums) {
    NormProblem<T> host(sizes, 0);
    // Magnitudes so far apart that a few threads make up most of a sum, and the order in which those add shows in it.
    for (const auto& tensor : host.data) {
        for (int64_t i = 0; i < tensor->numel(); ++i)
            tensor->set(i, std::ldexp((*tensor)[i], -static_cast<int>(i * 5 % 16 + i / 16 % 64)));
    }
    cpu::segment_norms(host.args(), 0, host.num_blocks());
    DeviceNorms<T> device(host, offset);
    const DeviceBuffer<double> device_sums(std::ssize(sizes));
    device.args.sums = device_sums.data();
    ASSERT_CUDA(cuda::segment_norms(device.args, nullptr));
    sums = device_sums.download();
    ASSERT_NO_FATAL_FAILURE(expect_near(sums, host.sums()));
    ASSERT_NO_FATAL_FAILURE(expect_cpu_total(host, offset));
}

TYPED_TEST(CudaTest, SegmentNorms) {
    std::vector<std::vector<int64_t>> lists = {{}, {0, 0}, kManySizes, std::vector<int64_t>(129, 5)};
    for (const int64_t numel : kDeviceSizes) lists.push_back({numel});
    for (const auto& sizes : lists) {
        SCOPED_TRACE(::testing::Message() << sizes.size() << " segments");
        std::vector<double> aligned, misaligned;
        ASSERT_NO_FATAL_FAILURE(expect_cpu_norms<TypeParam>(sizes, 0, aligned));
        ASSERT_NO_FATAL_FAILURE(expect_cpu_norms<TypeParam>(sizes, 3, misaligned));
        ASSERT_EQ(aligned, misaligned);
    }
    std::vector<double> sums;
    ASSERT_NO_FATAL_FAILURE(expect_cpu_norms<TypeParam>(many_tiny_sizes(), 0, sums));
}

// More blocks than the threads that add them take in one turn: four for each of 1024.
using CudaFloatTest = CudaTest<float>;
// More blocks than sum_rows reads in a turn: sixteen by each of 1024 threads.
TEST_F(CudaFloatTest, TotalOfManyBlocks) {
    NormProblem<float> host(std::vector<int64_t>(16500, 1), 0);
    cpu::segment_norms(host.args(), 0, host.num_blocks());
    ASSERT_NO_FATAL_FAILURE(expect_cpu_total(host, 0));
}

}  // namespace
}  // namespace ddpcore::test
