// What the tests of CUDA kernels share: sizes, copies of tensors on the device, and why a test is skipped.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/kernels.h"
#include "settings.h"

namespace ddpcore::test {

#define ASSERT_CUDA(call) ASSERT_STREQ(cudaGetErrorString(call), cudaGetErrorString(cudaSuccess))
#define EXPECT_CUDA(call) EXPECT_STREQ(cudaGetErrorString(call), cudaGetErrorString(cudaSuccess))

// tests/cuda_on_cpu compiles these tests too: fewer elements and learners there, still several blocks with a rest.
#ifdef DDPCORE_FEW_ELEMENTS
inline constexpr int64_t kManyElements = 5 * kBlock + 17, kNumTinyTensors = 1400;
inline constexpr int64_t kMostStacked = 130000;  // elements of all learners
inline constexpr int64_t kManyLearners = 257, kElementsOfManyLearners = 45;
inline constexpr size_t kSettingStep = 7;  // of the settings, only some; a multiple of 5 would leave momentum out
inline constexpr size_t kMostSteps = 1;    // with many tensors
#else
inline constexpr int64_t kManyElements = 1000003, kNumTinyTensors = 3000;
inline constexpr int64_t kMostStacked = 20000000;
inline constexpr int64_t kManyLearners = cuda::kMaxLearners - 1, kElementsOfManyLearners = 4101;
inline constexpr size_t kSettingStep = 1;
inline constexpr size_t kMostSteps = 3;
#endif
inline const std::vector<int64_t> kDeviceSizes = {0, 1, 3, 4095, 4096, 4097, kManyElements};

// The terms of a sum are positive and the same on both sides; each addition errs by at most 2^-53 of the sum so far.
inline constexpr double kSumTolerance = 2 * 1000003 * 0x1p-53;

// What noise_sums may lose of the sum of magnitudes besides, where it adds in pairs of fp32 numbers:
// csrc/cuda/noise.cu.
inline double pair_tolerance() {
    bool slow_doubles = false;
    EXPECT_CUDA(cuda::has_slow_doubles(&slow_doubles));
    return slow_doubles ? 0x1p-40 : 0.0;
}

// A copy of a tensor on the device, `offset` elements after an address that is aligned as widely as any access needs.
template <typename T>
class DeviceBuffer {
  public:
    explicit DeviceBuffer(int64_t numel, int64_t offset = 0) : numel_(numel), offset_(offset) {
        // Not a byte more than it holds, for the sanitizers; of nothing the address must be one still.
        const auto size = static_cast<size_t>(std::max<int64_t>(numel + offset, 1)) * sizeof(T);
        EXPECT_EQ(cudaMalloc(&base_, size), cudaSuccess);
    }
    DeviceBuffer(const T* data, int64_t numel, int64_t offset = 0) : DeviceBuffer(numel, offset) { upload(data); }
    DeviceBuffer(const Buffer<T>& host, int64_t offset) : DeviceBuffer(host.data(), host.numel(), offset) {}
    DeviceBuffer(const DeviceBuffer&) = delete;
    ~DeviceBuffer() { cudaFree(base_); }

    T* data() const { return static_cast<T*>(base_) + offset_; }
    std::vector<T> download() const {
        std::vector<T> host(static_cast<size_t>(numel_));
        EXPECT_EQ(cudaMemcpy(host.data(), data(), bytes(), cudaMemcpyDeviceToHost), cudaSuccess);
        return host;
    }
    void upload(const T* data) const {
        EXPECT_EQ(cudaMemcpy(this->data(), data, bytes(), cudaMemcpyHostToDevice), cudaSuccess);
    }
    bool same_bits(const T* host) const { return test::same_bits(download().data(), host, numel_); }
    bool same_bits(const Buffer<T>& host) const { return same_bits(host.data()); }

  private:
    size_t bytes() const { return static_cast<size_t>(numel_) * sizeof(T); }

    int64_t numel_, offset_;
    void* base_ = nullptr;
};

// More tensors than the largest table holds, every seventh empty.
inline std::vector<int64_t> many_tiny_sizes() {
    std::vector<int64_t> sizes;
    for (int64_t i = 0; i < kNumTinyTensors; ++i) sizes.push_back(i % 7 == 0 ? 0 : i % 5 + (i % 500 == 1 ? 5000 : 0));
    return sizes;
}

template <typename>
class CudaTest : public ::testing::Test {
  protected:
    void SetUp() override {
        int count = 0;
        const cudaError_t error = cudaGetDeviceCount(&count);
        if (error != cudaSuccess) GTEST_SKIP() << "cudaGetDeviceCount: " << cudaGetErrorString(error);
        if (count == 0) GTEST_SKIP() << "cudaGetDeviceCount: no device";
    }
};

}  // namespace ddpcore::test
