// The CUDA kernels of averages and norms against their CPU twins: elements have the same bits, sums the same terms in
// another order. Skipped, with the reason, where there is no CUDA device.
#include <numeric>

#include "device.h"

namespace ddpcore::test {
namespace {

void expect_near(const std::vector<double>& device, const std::vector<double>& host) {
    ASSERT_EQ(device.size(), host.size());
    for (size_t i = 0; i < host.size(); ++i) ASSERT_NEAR(device[i], host[i], host[i] * kSumTolerance) << "sum " << i;
}

TYPED_TEST_SUITE(CudaTest, Storages);

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
    StackedMixArgs stack{};
    stack.num_learners = cuda::kMaxLearners + 1;
    ASSERT_EQ(cuda::mix_stacked_(stack, nullptr), cudaErrorInvalidValue);
    stack.num_learners = 1;
    stack.num_others = cuda::kMaxPeers + 1;
    ASSERT_EQ(cuda::mix_stacked_(stack, nullptr), cudaErrorInvalidValue);
}

// Calls launch() on the stream: at once on the default stream, else from a graph that is captured and launched.
template <typename Launch>
void run_or_capture(cudaStream_t stream, Launch&& launch) {
    if (stream == nullptr) {
        ASSERT_CUDA(launch());
        return;
    }
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    ASSERT_CUDA(launch());
    ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
    ASSERT_CUDA(cudaGraphInstantiate(&executable, graph, 0));
    ASSERT_CUDA(cudaGraphLaunch(executable, stream));
    ASSERT_CUDA(cudaStreamSynchronize(stream));
    ASSERT_CUDA(cudaGraphExecDestroy(executable));
    ASSERT_CUDA(cudaGraphDestroy(graph));
}

template <typename T>
void expect_twin_mix_sgd(
    int64_t numel, int64_t num_peers, int64_t offset, const SgdSetting& setting, float steps, cudaStream_t stream) {
    MixSgdProblem<T> host(numel, num_peers, 0, setting.rule, setting.weight_decay, setting.maximize);
    host.steps = steps;
    const DeviceMix<T> mix(host.mix, offset);
    const DeviceBuffer<T> grad(host.grad, offset), momentum(host.momentum, offset);
    const DeviceBuffer<float> counted(&steps, 1), lr(&host.group.lr, 1);
    MixSgdArgs args = host.args();
    args.mix = mix.args;
    args.grad = grad.data();
    args.momentum = args.momentum ? momentum.data() : nullptr;
    args.group.step = counted.data();
    if (numel % 2 != 0) {
        args.group.lr = NAN;
        args.group.device_lr = lr.data();
    }
    ASSERT_NO_FATAL_FAILURE(run_or_capture(stream, [&] { return cuda::mix_sgd_step_(args, stream); }));
    cpu::mix_sgd_step_(host.args(), 0, host.mix.num_blocks());
    ASSERT_TRUE(mix.weights.same_bits(host.mix.weights));
    ASSERT_TRUE(momentum.same_bits(host.momentum));
    ASSERT_EQ(counted.download()[0], steps + 1.0f);
    ASSERT_NO_FATAL_FAILURE(expect_near(mix.sums.download(), summed(host.mix.partials, num_peers)));
}

TYPED_TEST(CudaTest, MixSgdStep) {
    const std::vector<SgdSetting> settings = all_settings();
    for (size_t k = 0; k < settings.size(); k += kSettingStep) {
        for (const int64_t numel : kDeviceSizes) {
            for (const int64_t num_peers : {0, 1, 9}) {
                for (const int64_t offset : {0, 1}) {
                    SCOPED_TRACE(
                        ::testing::Message()
                        << settings[k].name() << " numel " << numel << "+" << offset << " peers " << num_peers);
                    const auto steps = static_cast<float>((numel + num_peers + offset) % 2);
                    ASSERT_NO_FATAL_FAILURE(
                        expect_twin_mix_sgd<TypeParam>(numel, num_peers, offset, settings[k], steps, nullptr));
                }
            }
        }
    }
}

TYPED_TEST(CudaTest, CanBeCapturedIntoAGraph) {
    constexpr int64_t kNumel = kManyElements / 10 + kBlock;
    const SgdSetting plain{{0.9f, 0.7f, false, false}, 0.0f, false}, nesterov{{0.9f, 1.0f, true, false}, 0.03f, true};
    cudaStream_t stream;
    ASSERT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    ASSERT_NO_FATAL_FAILURE(expect_twin_mix_sgd<TypeParam>(kNumel, 2, 0, plain, 0.0f, stream));
    ASSERT_NO_FATAL_FAILURE(expect_twin_mix_sgd<TypeParam>(kNumel, 20, 1, nesterov, 1.0f, stream));
    ASSERT_CUDA(cudaStreamDestroy(stream));
}

// ---- mix_stacked_ ----

template <typename T>
void expect_twin_stacked(
    int64_t num_learners, int64_t numel, int64_t offset, std::vector<double>& sums, int64_t num_others = 0) {
    StackedProblem<T> host(num_learners, numel, 0, num_others);
    host.randomize_matrix();
    const DeviceBuffer<T> weights(host.weights, offset);
    std::vector<std::unique_ptr<DeviceBuffer<T>>> others;
    std::vector<const void*> pointers;
    for (const auto& other : host.others) {
        others.push_back(std::make_unique<DeviceBuffer<T>>(*other, num_learners % 2));  // not where weights are
        pointers.push_back(others.back()->data());
    }
    const DeviceBuffer<double> partials(host.num_blocks() * num_learners), device_sums(num_learners);
    StackedMixArgs args = host.args();
    const DeviceBuffer<int64_t> offsets(args.offsets, num_learners + 1);
    const DeviceBuffer<int64_t> columns(args.columns, args.offsets[num_learners]);
    const DeviceBuffer<float> values(args.values, args.offsets[num_learners]);
    cpu::mix_stacked_(args, 0, host.num_blocks());
    args.weights = weights.data();
    args.others = pointers.data();
    args.offsets = offsets.data();
    args.columns = columns.data();
    args.values = values.data();
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
            if (num_learners > 5) continue;
            const int64_t num_others = num_learners == 5 ? 9 : 2;  // more than the small table holds, and fewer
            ASSERT_NO_FATAL_FAILURE(expect_twin_stacked<TypeParam>(num_learners, numel, 0, aligned, num_others));
            ASSERT_NO_FATAL_FAILURE(expect_twin_stacked<TypeParam>(num_learners, numel, 1, misaligned, num_others));
            ASSERT_EQ(aligned, misaligned);
        }
    }
    std::vector<double> sums;
    ASSERT_NO_FATAL_FAILURE(expect_twin_stacked<TypeParam>(cuda::kMaxLearners, 72, 0, sums));
    ASSERT_NO_FATAL_FAILURE(expect_twin_stacked<TypeParam>(kManyLearners, kElementsOfManyLearners, 0, sums));
}

// ---- segment_norms and total_norm_ ----

// NormProblem's tensors on the device and the arguments that point there, but for the sums.
template <typename T>
struct DeviceNorms {
    DeviceNorms(NormProblem<T>& host, int64_t offset)
        : partials(host.num_blocks()), segments(host.segments), args(host.args()) {
        for (size_t s = 0; s < segments.size(); ++s) {
            data.push_back(std::make_unique<DeviceBuffer<T>>(*host.data[s], offset));
            segments[s].data = data[s]->data();
        }
        args.segments = segments.data();
        args.partials = partials.data();
    }

    DeviceBuffer<double> partials;
    std::vector<std::unique_ptr<DeviceBuffer<T>>> data;
    std::vector<NormSegment> segments;
    NormArgs args;
};

// After the norms of the host are formed.
template <typename T>
void expect_twin_total(NormProblem<T>& host, int64_t offset) {
    DeviceNorms<T> device(host, offset);
    const DeviceBuffer<double> total(1);
    device.args.sums = total.data();
    ASSERT_CUDA(cuda::total_norm_(device.args, nullptr));
    const std::vector<double> sums = host.sums();
    ASSERT_NO_FATAL_FAILURE(expect_near(total.download(), {std::accumulate(sums.begin(), sums.end(), 0.0)}));
}

template <typename T>
void expect_twin_norms(const std::vector<int64_t>& sizes, int64_t offset, std::vector<double>& sums) {
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
    ASSERT_NO_FATAL_FAILURE(expect_twin_total(host, offset));
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

// More blocks than the threads that add them take in one turn: four for each of 1024.
using CudaFloatTest = CudaTest<float>;
TEST_F(CudaFloatTest, TotalOfManyBlocks) {
    NormProblem<float> host(std::vector<int64_t>(4200, 1), 0);
    cpu::segment_norms(host.args(), 0, host.num_blocks());
    ASSERT_NO_FATAL_FAILURE(expect_twin_total(host, 0));
}

}  // namespace
}  // namespace ddpcore::test
