// Tests of the replacement itself: exchanges between threads, barriers, refused calls, and the effect of seeds.
#include <cooperative_groups.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

#include "cuda/launch.cuh"
#include "cuda_on_cpu.h"

namespace ddpcore::cuda {
namespace {

constexpr unsigned kAll = 0xffffffffu;

template <typename T>
class Array {
  public:
    explicit Array(int numel) : numel_(numel) {
        cudaMalloc(&data_, bytes());
        cudaMemset(data_, 0, bytes());
    }
    Array(const Array&) = delete;
    ~Array() { cudaFree(data_); }
    T* data() const { return data_; }
    std::vector<T> download() const {
        std::vector<T> host(static_cast<size_t>(numel_));
        cudaMemcpy(host.data(), data_, bytes(), cudaMemcpyDeviceToHost);
        return host;
    }

  private:
    size_t bytes() const { return static_cast<size_t>(numel_) * sizeof(T); }

    int numel_;
    T* data_ = nullptr;
};

template <typename... Parameters, typename... Arguments>
void run(void (*kernel)(Parameters...), int grid, int threads, const Arguments&... arguments) {
    ASSERT_EQ(launch_grid(kernel, grid, threads, 1024, nullptr, false, arguments...), cudaSuccess);
}

__device__ int thread_rank() {
    return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
}

// ---- warps ----

__global__ void shuffle_kernel(int* out) {
    const int lane = static_cast<int>(threadIdx.x);
    int* mine = out + lane * 6;
    mine[0] = __shfl_down_sync(kAll, lane, 3u);
    mine[1] = __shfl_down_sync(kAll, lane, 3u, 8);
    mine[2] = __shfl_up_sync(kAll, lane, 3u, 8);
    mine[3] = __shfl_xor_sync(kAll, lane, 5);
    mine[4] = __shfl_sync(kAll, lane, 9, 8);
    mine[5] = static_cast<int>(__shfl_sync(kAll, static_cast<double>(lane) + 0.5, lane / 2) * 2.0);
}

TEST(CudaOnCpu, ShufflesReadTheLaneThatCudaReads) {
    const Array<int> out(32 * 6);
    run(shuffle_kernel, 1, 32, out.data());
    const std::vector<int> all = out.download();
    for (int lane = 0; lane < 32; ++lane) {
        const std::vector<int> mine(all.begin() + lane * 6, all.begin() + lane * 6 + 6);
        const std::vector<int> expected = {
            lane + 3 < 32 ? lane + 3 : lane,
            lane % 8 + 3 < 8 ? lane + 3 : lane,
            lane % 8 >= 3 ? lane - 3 : lane,
            lane ^ 5,
            lane / 8 * 8 + 1,
            lane / 2 * 2 + 1};
        EXPECT_EQ(mine, expected) << "lane " << lane;
    }
}

__global__ void vote_kernel(unsigned* out) {
    const unsigned lane = threadIdx.x % 32;
    if (lane % 2 == 0) {  // the even lanes and the odd ones vote apart
        out[threadIdx.x] = __ballot_sync(0x55555555u, lane < 8);
    } else {
        const unsigned mask = 0xaaaaaaaau;
        const bool any = __any_sync(mask, lane == 31) != 0, none = __any_sync(mask, lane == 30) != 0;
        out[threadIdx.x] = (any ? 1u : 0u) | (none ? 2u : 0u) | (__all_sync(mask, lane > 0) != 0 ? 4u : 0u);
    }
}

TEST(CudaOnCpu, VotesCountTheLanesOfTheMask) {
    const Array<unsigned> out(64);
    run(vote_kernel, 1, 64, out.data());
    const std::vector<unsigned> all = out.download();
    for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i], i % 2 == 0 ? 0x55u : 5u) << i;
}

// ---- blocks ----

// Each block reverses its row, through both kinds of shared memory.
__global__ void reverse_kernel(int* out) {
    __shared__ int row[64];
    int* again = reinterpret_cast<int*>(dynamic_shared());
    const unsigned i = threadIdx.x, last = blockDim.x - 1;
    row[i] = thread_rank();
    __syncthreads();
    again[i] = row[last - i];
    const int num_odd = __syncthreads_count(static_cast<int>(i % 2));
    out[thread_rank()] = again[i] + 1000 * num_odd;
}

TEST(CudaOnCpu, BlocksHaveSharedMemoryOfTheirOwn) {
    for (uint64_t seed = 0; seed < 50; ++seed) {
        cuda_on_cpu::set_seed(seed);
        const Array<int> out(5 * 64);
        run(reverse_kernel, 5, 64, out.data());
        const std::vector<int> all = out.download();
        for (int i = 0; i < 5 * 64; ++i) ASSERT_EQ(all[static_cast<size_t>(i)], i / 64 * 64 + 63 - i % 64 + 32000);
    }
}

__global__ void uninitialized_kernel(float* out) {
    __shared__ float fixed[1];
    out[blockIdx.x * 2] = fixed[0];
    out[blockIdx.x * 2 + 1] = reinterpret_cast<const float*>(dynamic_shared())[0];
    fixed[0] = reinterpret_cast<float*>(dynamic_shared())[0] = 0.0f;
}

TEST(CudaOnCpu, FreshMemoryIsGarbage) {
    const Array<float> out(8);
    run(uninitialized_kernel, 4, 1, out.data());
    for (const float value : out.download()) EXPECT_TRUE(std::isnan(value) || std::abs(value) > 1e30f) << value;
}

// ---- atomics and the grid ----

__global__ void atomic_kernel(unsigned* out, double* sum) {
    atomicAdd(&out[0], 1u);
    atomicInc(&out[1], 6u);
    atomicMax(&out[2], threadIdx.x);
    atomicAdd(sum, 0.5);
    while (atomicCAS(&out[3], 0u, 1u) != 0u) {  // a lock
    }
    const unsigned held = out[4];
    __threadfence();
    out[4] = held + 1;
    atomicExch(&out[3], 0u);
}

TEST(CudaOnCpu, AtomicsAreAtomicAndALockIsPassedOn) {
    const Array<unsigned> out(5);
    const Array<double> sum(1);
    run(atomic_kernel, 4, 64, out.data(), sum.data());
    EXPECT_EQ(out.download(), (std::vector<unsigned>{256, 256 % 7, 63, 0, 256}));
    EXPECT_EQ(sum.download()[0], 128.0);
}

// Adds up over the grid, then every block reads what all have written. The blocks take the elements in turn.
__global__ void normalize_kernel(float* values, float* total, int numel) {
    for (int i = thread_rank(); i < numel; i += static_cast<int>(gridDim.x * blockDim.x)) atomicAdd(total, values[i]);
    cooperative_groups::this_grid().sync();
    for (int i = thread_rank(); i < numel; i += static_cast<int>(gridDim.x * blockDim.x)) {
        values[i] = values[i] + *total;
    }
    cooperative_groups::this_grid().sync();
    if (thread_rank() == 0) *total = -1.0f;
}

TEST(CudaOnCpu, TheGridWaitsForAllItsBlocks) {
    const Array<float> values(1000), total(1);
    ASSERT_EQ(
        launch_cooperative(normalize_kernel, 100, 32, 0, nullptr, values.data(), total.data(), 1000), cudaSuccess);
    ASSERT_EQ(launch_cooperative(normalize_kernel, 1, 32, 0, nullptr, values.data(), total.data(), 1000), cudaSuccess);
    for (const float value : values.download()) EXPECT_EQ(value, -1.0f);
    EXPECT_EQ(
        launch_grid(normalize_kernel, 7, 32, 0, nullptr, true, values.data(), total.data(), 1000),
        cudaErrorCooperativeLaunchTooLarge);
}

// ---- orders ----

__global__ void order_kernel(int* next, int* order) {
    order[(*next)++] = thread_rank();
}

TEST(CudaOnCpu, SeedsGiveOtherOrdersAndTheSameSeedTheSame) {
    std::set<std::vector<int>> orders;
    for (uint64_t seed = 0; seed < 20; ++seed) {
        std::vector<int> first;
        for (int again = 0; again < 2; ++again) {
            cuda_on_cpu::set_seed(seed);
            const Array<int> next(1), order(256);
            run(order_kernel, 4, 64, next.data(), order.data());
            if (again == 0) first = order.download();
            EXPECT_EQ(order.download(), first);
        }
        orders.insert(first);
    }
    EXPECT_GE(orders.size(), 18u);
}

// One warp sums twice through the same slots; without the second barrier a fast warp overwrites what a slow one reads.
template <bool with_barriers>
__global__ void race_kernel(int* out) {
    __shared__ int slots[64];
    int sum = 0;
    for (int round = 0; round < 2; ++round) {
        slots[threadIdx.x] = round * 64 + static_cast<int>(threadIdx.x);
        __syncthreads();
        sum += slots[(threadIdx.x + 32) % 64];
        if (with_barriers) __syncthreads();
    }
    out[threadIdx.x] = sum;
}

TEST(CudaOnCpu, ARaceBetweenBarriersIsSeenUnderMostSeeds) {
    int num_wrong[2] = {};
    for (uint64_t seed = 0; seed < 100; ++seed) {
        for (const bool with_barriers : {false, true}) {
            cuda_on_cpu::set_seed(seed);
            const Array<int> out(64);
            run(with_barriers ? race_kernel<true> : race_kernel<false>, 1, 64, out.data());
            const std::vector<int> all = out.download();
            bool wrong = false;
            for (int i = 0; i < 64; ++i) wrong = wrong || all[static_cast<size_t>(i)] != 64 + 2 * ((i + 32) % 64);
            num_wrong[with_barriers] += wrong;
        }
    }
    EXPECT_EQ(num_wrong[true], 0);
    EXPECT_GE(num_wrong[false], 30);
}

// ---- calls that must fail and report the place ----

__global__ void half_barrier_kernel() {
    if (threadIdx.x < 40) __syncthreads();
}
__global__ void two_barriers_kernel() {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
}
__global__ void divergent_shuffle_kernel(int* out) {
    if (threadIdx.x != 7) out[threadIdx.x] = __shfl_down_sync(kAll, 1, 1u);
}
__global__ void foreign_lane_kernel(int* out) {
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffffu, 1, 20);
}
__global__ void wrong_mask_kernel() {
    __syncwarp(0xfffffffeu);
}
__global__ void grid_kernel() {
    cooperative_groups::this_grid().sync();
}
__global__ void half_grid_kernel() {
    if (blockIdx.x != 1) cooperative_groups::this_grid().sync();
}
__global__ void endless_kernel(int* out) {
    while (atomicAdd(out, 0) == 0) {
    }
}
__global__ void store_kernel(int* out, int place) {
    out[place] = 1;
}
__global__ void vector_kernel(const int* in, uint4* out) {
    *out = *reinterpret_cast<const uint4*>(in);
}
__global__ void beyond_shared_kernel() {
    reinterpret_cast<float*>(dynamic_shared())[256] = 0.0f;
}

class CudaOnCpuDeathTest : public ::testing::Test {
  protected:
    const Array<int> out_{64};
};

TEST_F(CudaOnCpuDeathTest, WaitingInVain) {
    EXPECT_DEATH(
        run(half_barrier_kernel, 2, 64), "deadlock: .*\n.*block \\(.,0,0\\) thread \\(0,0,0\\) .*waits at .*cpp:");
    EXPECT_DEATH(run(two_barriers_kernel, 1, 64), "threads of a block wait at different barriers(.|\n)*two_barriers");
    EXPECT_DEATH(run(divergent_shuffle_kernel, 1, 32, out_.data()), "deadlock(.|\n)*lanes 0xffffffff");
    EXPECT_DEATH(run(foreign_lane_kernel, 1, 32, out_.data()), "reads lane 20, which mask 0x0000ffff does not name");
    EXPECT_DEATH(run(wrong_mask_kernel, 1, 32), "thread \\(0,0,0\\): .*the mask does not name the caller");
    EXPECT_DEATH(run(endless_kernel, 2, 32, out_.data()), "waits in a loop for what never comes");
    EXPECT_DEATH(run(grid_kernel, 1, 32), "the launch is not cooperative");
    EXPECT_DEATH(launch_cooperative(half_grid_kernel, 3, 32, 0, nullptr), "deadlock(.|\n)*for the grid");
}

TEST_F(CudaOnCpuDeathTest, WrongAddresses) {
    EXPECT_DEATH(run(store_kernel, 1, 1, out_.data(), 64), "AddressSanitizer: heap-buffer-overflow");
    EXPECT_DEATH(run(store_kernel, 1, 1, out_.data(), -1), "AddressSanitizer: heap-buffer-overflow");
    EXPECT_DEATH(
        run(vector_kernel, 1, 1, out_.data() + 1, reinterpret_cast<uint4*>(out_.data())), "misaligned address");
    EXPECT_DEATH(run(beyond_shared_kernel, 1, 1), "AddressSanitizer: use-after-poison");
    EXPECT_DEATH(*out_.data() = 1, "AddressSanitizer: use-after-poison");  // host code on device memory
}

TEST(CudaOnCpu, LaunchesThatCudaRefusesAreRefused) {
    EXPECT_EQ(launch_grid(wrong_mask_kernel, 0, 32, 0, nullptr, false), cudaErrorInvalidConfiguration);
    EXPECT_EQ(launch_grid(wrong_mask_kernel, 1, 1025, 0, nullptr, false), cudaErrorInvalidConfiguration);
    EXPECT_EQ(launch_grid(wrong_mask_kernel, 1, 32, 48 * 1024 + 1, nullptr, false), cudaErrorInvalidValue);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(CudaOnCpu, ALaunchReportsNoErrorOfOthersAndTakesNoneAway) {
    const Array<int> out(1);
    EXPECT_EQ(cudaSetDevice(1), cudaErrorInvalidValue);
    EXPECT_EQ(launch_grid(store_kernel, 1, 1, 0, nullptr, false, out.data(), 0), cudaSuccess);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

TEST(CudaOnCpu, SlowDoublesAreThoseOfTheDevice) {
    const int before = cuda_on_cpu::device().double_ratio;
    for (const int ratio : {2, 3, 32, 64}) {  // H100, K80, T4, RTX 4090
        cuda_on_cpu::device().double_ratio = ratio;
        bool slow = false;
        ASSERT_EQ(has_slow_doubles(&slow), cudaSuccess);
        EXPECT_EQ(slow, ratio >= 32) << ratio;
    }
    cuda_on_cpu::device().double_ratio = before;
}

// ---- graphs ----

__global__ void add_kernel(int* out, int value) {
    *out += value;
}

class CudaOnCpuGraph : public ::testing::Test {
  protected:
    void SetUp() override {
        cudaStreamCreate(&stream_);
        ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), cudaSuccess);
    }
    void TearDown() override {
        if (graph_ != nullptr) cudaGraphDestroy(graph_);
        cudaStreamDestroy(stream_);
        cudaGetLastError();
    }
    cudaError_t add(int value) { return launch_grid(add_kernel, 1, 1, 0, stream_, false, out_.data(), value); }
    cudaError_t end() { return cudaStreamEndCapture(stream_, &graph_); }

    const Array<int> out_{1};
    cudaStream_t stream_ = nullptr;
    cudaGraph_t graph_ = nullptr;
};

TEST_F(CudaOnCpuGraph, KeepsArgumentsByValueAndItsNodesTell) {
    int value = 3, from_host = 40;
    ASSERT_EQ(add(value), cudaSuccess);
    value = 1000;
    ASSERT_EQ(cudaMemcpyAsync(out_.data(), &from_host, sizeof(int), cudaMemcpyHostToDevice, stream_), cudaSuccess);
    ASSERT_EQ(launch_grid(add_kernel, 1, 1, 0, stream_, true, out_.data(), 2), cudaSuccess);
    ASSERT_EQ(end(), cudaSuccess);
    EXPECT_EQ(out_.download()[0], 0);  // recorded, not done
    cudaGraphExec_t executable = nullptr;
    ASSERT_EQ(cudaGraphInstantiate(&executable, graph_), cudaSuccess);
    from_host = 50;
    EXPECT_EQ(cudaGraphLaunch(executable, stream_), cudaSuccess);
    EXPECT_EQ(out_.download()[0], 52);
    cudaGraphExecDestroy(executable);
    cudaGraphNode_t nodes[4];
    size_t num_nodes = 4;
    ASSERT_EQ(cudaGraphGetNodes(graph_, nodes, &num_nodes), cudaSuccess);
    ASSERT_EQ(num_nodes, 3u);
    cudaGraphNodeType type;
    cudaLaunchAttributeValue attribute;
    for (const int i : {0, 2}) {
        ASSERT_EQ(cudaGraphKernelNodeGetAttribute(nodes[i], cudaLaunchAttributeCooperative, &attribute), cudaSuccess);
        EXPECT_EQ(attribute.cooperative, i == 2);
    }
    cudaGraphNodeGetType(nodes[1], &type);
    EXPECT_EQ(type, cudaGraphNodeTypeMemcpy);
}

// Calls that a stream cannot capture are refused, and the capture becomes invalid.
TEST_F(CudaOnCpuGraph, RefusesWhatCannotBeRecorded) {
    int host = 0;
    void* pointer = nullptr;
    EXPECT_EQ(cudaMalloc(&pointer, 4), cudaErrorStreamCaptureUnsupported);
    EXPECT_EQ(cudaFree(out_.data()), cudaErrorStreamCaptureUnsupported);
    EXPECT_EQ(cudaMemcpy(&host, out_.data(), sizeof host, cudaMemcpyDeviceToHost), cudaErrorStreamCaptureUnsupported);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaErrorStreamCaptureUnsupported);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorStreamCaptureUnsupported);
    EXPECT_EQ(launch_grid(add_kernel, 1, 1, 0, nullptr, false, out_.data(), 1), cudaErrorStreamCaptureImplicit);
    EXPECT_EQ(add(1), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(end(), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(graph_, nullptr);
    EXPECT_EQ(out_.download()[0], 0);
}

}  // namespace
}  // namespace ddpcore::cuda
