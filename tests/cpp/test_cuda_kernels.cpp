// Each CUDA kernel against its CPU twin: elements have the same bits, sums the same terms in another order. Skipped,
// with the reason, where there is no CUDA device; tests/cuda_on_cpu runs the same tests there.
#include <cuda_runtime_api.h>

#include "cuda/kernels.h"
#include "problems.h"

namespace ddpcore::test {
namespace {

#define ASSERT_CUDA(call) ASSERT_STREQ(cudaGetErrorString(call), cudaGetErrorString(cudaSuccess))

// tests/cuda_on_cpu compiles this file too: fewer elements and learners there, still several blocks with a rest.
#ifdef DDPCORE_FEW_ELEMENTS
constexpr int64_t kManyElements = 5 * kBlock + 17, kNumTinyTensors = 1400;
constexpr int64_t kMostStacked = 130000;  // elements of all learners
constexpr int64_t kManyLearners = 257, kElementsOfManyLearners = 45;
constexpr size_t kRuleStep = 5;  // of the rules, only each fifth
#else
constexpr int64_t kManyElements = 1000003, kNumTinyTensors = 3000;
constexpr int64_t kMostStacked = 20000000;
constexpr int64_t kManyLearners = cuda::kMaxLearners - 1, kElementsOfManyLearners = 4101;
constexpr size_t kRuleStep = 1;
#endif
const std::vector<int64_t> kDeviceSizes = {0, 1, 3, 4095, 4096, 4097, kManyElements};

// The terms of a sum are positive and the same on both sides; each addition errs by at most 2^-53 of the sum so far.
constexpr double kSumTolerance = 2 * 1000003 * 0x1p-53;

// A copy of a tensor on the device, `offset` elements after an address that is aligned as widely as any access needs.
template <typename T>
class DeviceBuffer {
  public:
    explicit DeviceBuffer(int64_t numel, int64_t offset = 0) : numel_(numel), offset_(offset) {
        // Not a byte more than it holds, for the sanitizers; of nothing the address must be one still.
        const auto size = static_cast<size_t>(std::max<int64_t>(numel + offset, 1)) * sizeof(T);
        EXPECT_EQ(cudaMalloc(&base_, size), cudaSuccess);
    }
    DeviceBuffer(const T* data, int64_t numel, int64_t offset = 0) : DeviceBuffer(numel, offset) {
        EXPECT_EQ(cudaMemcpy(this->data(), data, bytes(), cudaMemcpyHostToDevice), cudaSuccess);
    }
    DeviceBuffer(const Buffer<T>& host, int64_t offset) : DeviceBuffer(host.data(), host.numel(), offset) {}
    DeviceBuffer(const DeviceBuffer&) = delete;
    ~DeviceBuffer() { cudaFree(base_); }

    T* data() const { return static_cast<T*>(base_) + offset_; }
    std::vector<T> download() const {
        std::vector<T> host(static_cast<size_t>(numel_));
        EXPECT_EQ(cudaMemcpy(host.data(), data(), bytes(), cudaMemcpyDeviceToHost), cudaSuccess);
        return host;
    }
    bool same_bits(const Buffer<T>& host) const {
        return numel_ == 0 || std::memcmp(download().data(), host.data(), bytes()) == 0;
    }

  private:
    size_t bytes() const { return static_cast<size_t>(numel_) * sizeof(T); }

    int64_t numel_, offset_;
    void* base_ = nullptr;
};

void expect_near(const std::vector<double>& device, const std::vector<double>& host) {
    ASSERT_EQ(device.size(), host.size());
    for (size_t i = 0; i < host.size(); ++i) ASSERT_NEAR(device[i], host[i], host[i] * kSumTolerance) << "sum " << i;
}

template <typename T>
class CudaTest : public ::testing::Test {
  protected:
    void SetUp() override {
        int count = 0;
        const cudaError_t error = cudaGetDeviceCount(&count);
        if (error != cudaSuccess) GTEST_SKIP() << "cudaGetDeviceCount: " << cudaGetErrorString(error);
        if (count == 0) GTEST_SKIP() << "cudaGetDeviceCount: no device";
    }
};
TYPED_TEST_SUITE(CudaTest, Storages);

// ---- sgd_step_ ----

template <typename T>
void expect_twin_sgd(const std::vector<int64_t>& sizes, int64_t offset, const SgdRule& rule) {
    const SgdProblem<T> host(sizes, 0, rule);
    std::vector<std::unique_ptr<DeviceBuffer<T>>> params, grads, momenta;
    std::vector<SgdSegment> segments = host.segments;
    for (size_t s = 0; s < sizes.size(); ++s) {
        params.push_back(std::make_unique<DeviceBuffer<T>>(*host.params[s], offset));
        grads.push_back(std::make_unique<DeviceBuffer<T>>(*host.grads[s], offset));
        momenta.push_back(std::make_unique<DeviceBuffer<T>>(*host.momenta[s], offset));
        segments[s].param = params[s]->data();
        segments[s].grad = grads[s]->data();
        segments[s].momentum = segments[s].momentum ? momenta[s]->data() : nullptr;
    }
    SgdArgs args = host.args();
    cpu::sgd_step_(args, 0, args.num_blocks);
    args.segments = segments.data();
    ASSERT_CUDA(cuda::sgd_step_(args, nullptr));
    for (size_t s = 0; s < sizes.size(); ++s) {
        ASSERT_TRUE(params[s]->same_bits(*host.params[s])) << "segment " << s;
        ASSERT_TRUE(momenta[s]->same_bits(*host.momenta[s])) << "segment " << s;
    }
}

// More tensors than the largest table holds, every seventh empty.
std::vector<int64_t> many_tiny_sizes() {
    std::vector<int64_t> sizes;
    for (int64_t i = 0; i < kNumTinyTensors; ++i) sizes.push_back(i % 7 == 0 ? 0 : i % 5 + (i % 500 == 1 ? 5000 : 0));
    return sizes;
}

TYPED_TEST(CudaTest, SgdStep) {
    for (const SgdRule& rule : all_rules()) {
        for (const int64_t numel : kDeviceSizes) {
            for (const int64_t offset : kOffsets) {
                SCOPED_TRACE(
                    ::testing::Message() << "flags " << sgd_flags(rule) << " numel " << numel << "+" << offset);
                ASSERT_NO_FATAL_FAILURE(expect_twin_sgd<TypeParam>({numel}, offset, rule));
            }
        }
        ASSERT_NO_FATAL_FAILURE(expect_twin_sgd<TypeParam>(kManySizes, 0, rule));
    }
    ASSERT_NO_FATAL_FAILURE(expect_twin_sgd<TypeParam>({}, 0, all_rules()[2]));
    ASSERT_NO_FATAL_FAILURE(expect_twin_sgd<TypeParam>(many_tiny_sizes(), 0, all_rules()[2]));
}

// ---- mix_ and mix_sgd_step_ ----

// MixProblem's tensors on the device and the arguments that point there.
template <typename T>
struct DeviceMix {
    DeviceMix(MixProblem<T>& host, int64_t offset)
        : weights(host.weights, offset),
          partials(host.num_blocks() * static_cast<int64_t>(host.peers.size())),
          sums(static_cast<int64_t>(host.peers.size())),
          args(host.args()) {
        for (const auto& peer : host.peers) {
            peers.push_back(std::make_unique<DeviceBuffer<T>>(*peer, offset));
            pointers.push_back(peers.back()->data());
        }
        args.weights = weights.data();
        args.peers = pointers.data();
        args.partials = partials.data();
        args.sums = sums.data();
    }

    DeviceBuffer<T> weights;
    DeviceBuffer<double> partials, sums;
    std::vector<std::unique_ptr<DeviceBuffer<T>>> peers;
    std::vector<const void*> pointers;
    MixArgs args;
};

// Leaves the sums of the device in `sums`.
template <typename T>
void expect_twin_mix(int64_t numel, int64_t num_peers, int64_t offset, std::vector<double>& sums) {
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
            ASSERT_NO_FATAL_FAILURE(expect_twin_mix<TypeParam>(numel, num_peers, 0, aligned));
            ASSERT_NO_FATAL_FAILURE(expect_twin_mix<TypeParam>(numel, num_peers, 1, misaligned));
            ASSERT_EQ(aligned, misaligned);
        }
    }
}

TYPED_TEST(CudaTest, TooManyPeersOrLearnersIsAnError) {
    MixProblem<TypeParam> host(1, cuda::kMaxPeers + 1, 0);
    const DeviceMix<TypeParam> device(host, 0);
    ASSERT_EQ(cuda::mix_(device.args, nullptr), cudaErrorInvalidValue);
    const StackedMixArgs stack{nullptr, nullptr,           cuda::kMaxLearners + 1, 1, dtype_of<TypeParam>(),
                               nullptr, device.sums.data()};
    ASSERT_EQ(cuda::mix_stacked_(stack, nullptr), cudaErrorInvalidValue);
}

template <typename T>
void expect_twin_mix_sgd(int64_t numel, int64_t num_peers, int64_t offset, const SgdRule& rule, cudaStream_t stream) {
    MixSgdProblem<T> host(numel, num_peers, 0, rule);
    const DeviceMix<T> mix(host.mix, offset);
    const DeviceBuffer<T> grad(host.grad, offset), momentum(host.momentum, offset);
    const MixSgdArgs args{mix.args, grad.data(), rule.momentum != 0.0f ? momentum.data() : nullptr, rule};
    if (stream == nullptr) {
        ASSERT_CUDA(cuda::mix_sgd_step_(args, stream));
    } else {
        cudaGraph_t graph;
        cudaGraphExec_t executable;
        ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        ASSERT_CUDA(cuda::mix_sgd_step_(args, stream));
        ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
        ASSERT_CUDA(cudaGraphInstantiate(&executable, graph, 0));
        ASSERT_CUDA(cudaGraphLaunch(executable, stream));
        ASSERT_CUDA(cudaStreamSynchronize(stream));
        ASSERT_CUDA(cudaGraphExecDestroy(executable));
        ASSERT_CUDA(cudaGraphDestroy(graph));
    }
    cpu::mix_sgd_step_(host.args(), 0, host.mix.num_blocks());
    ASSERT_TRUE(mix.weights.same_bits(host.mix.weights));
    ASSERT_TRUE(momentum.same_bits(host.momentum));
    ASSERT_NO_FATAL_FAILURE(expect_near(mix.sums.download(), summed(host.mix.partials, num_peers)));
}

TYPED_TEST(CudaTest, MixSgdStep) {
    const std::vector<SgdRule> rules = all_rules();
    for (size_t r = 0; r < rules.size(); r += kRuleStep) {
        const SgdRule& rule = rules[r];
        for (const int64_t numel : kDeviceSizes) {
            for (const int64_t num_peers : {0, 1, 9}) {
                for (const int64_t offset : {0, 1}) {
                    SCOPED_TRACE(
                        ::testing::Message() << "flags " << sgd_flags(rule) << " numel " << numel << "+" << offset
                                             << " peers " << num_peers);
                    ASSERT_NO_FATAL_FAILURE(expect_twin_mix_sgd<TypeParam>(numel, num_peers, offset, rule, nullptr));
                }
            }
        }
    }
}

TYPED_TEST(CudaTest, CanBeCapturedIntoAGraph) {
    cudaStream_t stream;
    ASSERT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    ASSERT_NO_FATAL_FAILURE(expect_twin_mix_sgd<TypeParam>(kManyElements / 10 + kBlock, 2, 0, all_rules()[2], stream));
    ASSERT_NO_FATAL_FAILURE(
        expect_twin_mix_sgd<TypeParam>(kManyElements / 10 + kBlock, 20, 1, all_rules()[10], stream));
    ASSERT_CUDA(cudaStreamDestroy(stream));
}

// ---- mix_stacked_ ----

template <typename T>
void expect_twin_stacked(int64_t num_learners, int64_t numel, int64_t offset, std::vector<double>& sums) {
    StackedProblem<T> host(num_learners, numel, 0);
    host.randomize_matrix();
    const DeviceBuffer<T> weights(host.weights, offset);
    const DeviceBuffer<float> matrix(host.matrix.data(), num_learners * num_learners);
    const DeviceBuffer<double> partials(host.num_blocks() * num_learners), device_sums(num_learners);
    StackedMixArgs args = host.args();
    cpu::mix_stacked_(args, 0, host.num_blocks());
    args.weights = weights.data();
    args.matrix = matrix.data();
    args.partials = partials.data();
    args.sums = device_sums.data();
    ASSERT_CUDA(cuda::mix_stacked_(args, nullptr));
    ASSERT_TRUE(weights.same_bits(host.weights));
    sums = device_sums.download();
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
            ASSERT_NO_FATAL_FAILURE(expect_twin_stacked<TypeParam>(num_learners, numel, 0, aligned));
            ASSERT_NO_FATAL_FAILURE(expect_twin_stacked<TypeParam>(num_learners, numel, 1, misaligned));
            ASSERT_EQ(aligned, misaligned);
        }
    }
    std::vector<double> sums;
    ASSERT_NO_FATAL_FAILURE(expect_twin_stacked<TypeParam>(cuda::kMaxLearners, 72, 0, sums));
    ASSERT_NO_FATAL_FAILURE(expect_twin_stacked<TypeParam>(kManyLearners, kElementsOfManyLearners, 0, sums));
}

// ---- segment_norms ----

template <typename T>
void expect_twin_norms(const std::vector<int64_t>& sizes, int64_t offset, std::vector<double>& sums) {
    NormProblem<T> host(sizes, 0);
    // Magnitudes so far apart that a few threads make up most of a sum, and the order in which those add shows in it.
    for (const auto& tensor : host.data) {
        for (int64_t i = 0; i < tensor->numel(); ++i)
            tensor->set(i, std::ldexp((*tensor)[i], -static_cast<int>(i * 5 % 16 + i / 16 % 64)));
    }
    std::vector<std::unique_ptr<DeviceBuffer<T>>> data;
    std::vector<NormSegment> segments = host.segments;
    for (size_t s = 0; s < sizes.size(); ++s) {
        data.push_back(std::make_unique<DeviceBuffer<T>>(*host.data[s], offset));
        segments[s].data = data[s]->data();
    }
    const DeviceBuffer<double> partials(host.num_blocks()), device_sums(static_cast<int64_t>(sizes.size()));
    NormArgs args = host.args();
    cpu::segment_norms(args, 0, host.num_blocks());
    args.segments = segments.data();
    args.partials = partials.data();
    args.sums = device_sums.data();
    ASSERT_CUDA(cuda::segment_norms(args, nullptr));
    sums = device_sums.download();
    ASSERT_NO_FATAL_FAILURE(expect_near(sums, host.sums()));
}

TYPED_TEST(CudaTest, SegmentNorms) {
    std::vector<std::vector<int64_t>> lists = {{}, {0, 0}, kManySizes};
    for (const int64_t numel : kDeviceSizes) lists.push_back({numel});
    for (const auto& sizes : lists) {
        SCOPED_TRACE(::testing::Message() << sizes.size() << " segments");
        std::vector<double> aligned, misaligned;
        ASSERT_NO_FATAL_FAILURE(expect_twin_norms<TypeParam>(sizes, 0, aligned));
        ASSERT_NO_FATAL_FAILURE(expect_twin_norms<TypeParam>(sizes, 3, misaligned));
        ASSERT_EQ(aligned, misaligned);
    }
    std::vector<double> sums;
    ASSERT_NO_FATAL_FAILURE(expect_twin_norms<TypeParam>(many_tiny_sizes(), 0, sums));
}

}  // namespace
}  // namespace ddpcore::test
