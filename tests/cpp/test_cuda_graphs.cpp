// What a call of the CUDA kernels puts on its stream, as a CUDA graph records it: kernels and nothing else, how many of
// them, and the same bits from a recorded step that is replayed as from steps that are called. Skipped, with the
// reason, where there is no CUDA device.
#include "device_problems.h"
#include "device_steps.h"

namespace ddpcore::test {
namespace {

// The work of enqueue(stream), recorded and not done. What CUDA forbids while it records (allocations, waiting, other
// streams' work) is an error here.
class Graph {
  public:
    template <typename Enqueue>
    explicit Graph(Enqueue&& enqueue) {
        EXPECT_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
        EXPECT_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
        EXPECT_CUDA(enqueue(stream_));
        EXPECT_CUDA(cudaStreamEndCapture(stream_, &graph_));
    }
    Graph(const Graph&) = delete;
    ~Graph() {
        if (executable_ != nullptr) {
            EXPECT_CUDA(cudaGraphExecDestroy(executable_));
        }
        if (graph_ != nullptr) {
            EXPECT_CUDA(cudaGraphDestroy(graph_));
        }
        EXPECT_CUDA(cudaStreamDestroy(stream_));
    }

    std::vector<cudaGraphNode_t> nodes() const {
        size_t num_nodes = 0;
        if (graph_ != nullptr) {
            EXPECT_CUDA(cudaGraphGetNodes(graph_, nullptr, &num_nodes));
        }
        std::vector<cudaGraphNode_t> result(num_nodes);
        if (num_nodes > 0) {
            EXPECT_CUDA(cudaGraphGetNodes(graph_, result.data(), &num_nodes));
        }
        return result;
    }

    void replay() {
        ASSERT_NE(graph_, nullptr);
        if (executable_ == nullptr) {
            ASSERT_CUDA(cudaGraphInstantiate(&executable_, graph_, 0));
        }
        ASSERT_CUDA(
            cudaDeviceSynchronize());  // copies may still be under way, on a stream that this one does not wait for
        ASSERT_CUDA(cudaGraphLaunch(executable_, stream_));
        ASSERT_CUDA(cudaStreamSynchronize(stream_));
    }

  private:
    cudaStream_t stream_ = nullptr;
    cudaGraph_t graph_ = nullptr;
    cudaGraphExec_t executable_ = nullptr;
};

// ---- how many launches a call makes ----

struct Launches {
    int64_t all = 0, cooperative = 0;
    bool operator==(const Launches&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Launches& launches) {
    return out << launches.all << " launches, " << launches.cooperative << " of them cooperative";
}

// Pointers may be anything: nothing is done, only recorded.
template <typename Enqueue>
Launches launches_in(Enqueue&& enqueue) {
    Launches launches;
    const Graph graph(enqueue);
    for (const cudaGraphNode_t node : graph.nodes()) {
        cudaGraphNodeType type{};
        EXPECT_CUDA(cudaGraphNodeGetType(node, &type));
        EXPECT_EQ(type, cudaGraphNodeTypeKernel) << "a call does more than launch kernels";
        if (type != cudaGraphNodeTypeKernel) continue;
        cudaLaunchAttributeValue value{};
        EXPECT_CUDA(cudaGraphKernelNodeGetAttribute(node, cudaLaunchAttributeCooperative, &value));
        ++launches.all;
        launches.cooperative += value.cooperative != 0;
    }
    return launches;
}

Launches plain(int64_t count) {
    return {count, 0};
}

Launches cooperative(int64_t count) {
    return {count, count};
}

uint64_t ticket;  // stands for counters on the device

template <typename Kind>
Launches launches_of(const SgdProblem<Kind>& problem, uint64_t* tickets = &ticket) {
    SgdArgs args = problem.args();
    args.tickets = tickets;
    return launches_in([&](cudaStream_t stream) { return cuda::sgd_step_(args, stream); });
}

template <typename Kind>
Launches launches_of(LarsProblem<Kind>& problem) {
    LarsArgs args = problem.args();
    args.sgd.tickets = &ticket;
    return launches_in([&](cudaStream_t stream) { return cuda::lars_step_(args, stream); });
}

template <typename Kind>
Launches launches_of(AdamProblem<Kind>& problem) {
    AdamArgs args = problem.args();
    args.tickets = &ticket;
    return launches_in([&](cudaStream_t stream) { return cuda::adamw_step_(args, stream); });
}

template <typename Kind>
Launches launches_of(LambProblem<Kind>& problem) {
    LambArgs args = problem.args();
    args.tickets = &ticket;
    return launches_in([&](cudaStream_t stream) { return cuda::lamb_step_(args, stream); });
}

const SgdRule kSgd{0.9f, 1.0f, false, false};
const LarsRule kLars{LarsVariant::kYou2017, 0.02f, 1e-8f};

// Calls expect(problem, most) for each optimizer; `most` is how many tensors one launch takes.
template <typename Kind, typename Expect>
void for_each_step(const std::vector<GroupSetting>& groups, Expect&& expect) {
    SgdProblem<Kind> sgd(groups, kSgd);
    ASSERT_NO_FATAL_FAILURE(expect(sgd, 547)) << "SGD";
    LarsProblem<Kind> lars(groups, kSgd, kLars);
    ASSERT_NO_FATAL_FAILURE(expect(lars, 547)) << "LARS";
    AdamProblem<Kind> adamw(groups, rule_of(AdamDecay::kDecoupled, true));
    ASSERT_NO_FATAL_FAILURE(expect(adamw, 480)) << "AdamW";
    LambProblem<Kind> lamb(groups, rule_of(AdamDecay::kInUpdate, true));
    ASSERT_NO_FATAL_FAILURE(expect(lamb, 480)) << "LAMB";
}

template <typename Problem>
Launches steps(const Problem& problem, int64_t count) {
    constexpr bool two_passes = requires { problem.trust; };
    return two_passes ? cooperative(count) : plain(count);
}

template <typename Kind>
class CudaGraphs : public CudaOptimizers<Kind> {};
TYPED_TEST_SUITE(CudaGraphs, Kinds);

// What a step of ddpcore.models' LeNet-5 takes: one launch, and two more for the norm of its gradients.
const std::vector<int64_t> kLeNet5 = {150, 6, 6, 6, 2400, 16, 16, 16, 48000, 120, 10080, 84, 840, 10};

TYPED_TEST(CudaGraphs, AStepOfLeNet5IsOneLaunchAndThreeWithClipping) {
    const std::vector<int64_t> weights = {150, 2400, 48000, 10080, 840}, others = {6, 6, 6, 16, 16, 16, 120, 84, 10};
    const std::vector<std::vector<GroupSetting>> lists = {
        {{.sizes = kLeNet5}}, {{.sizes = weights}, {.sizes = others, .weight_decay = 0.0f, .adapt = false}}};
    for (const auto& groups : lists) {
        ASSERT_NO_FATAL_FAILURE(for_each_step<TypeParam>(groups, [](auto& problem, int64_t) {
            ASSERT_EQ(launches_of(problem), steps(problem, 1));
        }));
    }
    NormProblem<typename TypeParam::Param> grads(kLeNet5, 0);
    const NormArgs args = grads.args();
    ASSERT_EQ(launches_in([&](cudaStream_t stream) { return cuda::total_norm_(args, stream); }), plain(2));
}

TYPED_TEST(CudaGraphs, AStepTakesOneLaunchForEachTableOfTensors) {
    for (const int64_t num_tensors : {1, 32, 33, 128, 129, 479, 480, 481, 547, 548, 960, 961, 1094, 1095, 3001}) {
        const std::vector<int64_t> sizes(static_cast<size_t>(num_tensors), 1);
        SCOPED_TRACE(::testing::Message() << num_tensors << " tensors");
        ASSERT_NO_FATAL_FAILURE(for_each_step<TypeParam>({{.sizes = sizes}}, [&](auto& problem, int64_t most) {
            ASSERT_EQ(launches_of(problem), steps(problem, (num_tensors + most - 1) / most));
        }));
    }
}

// Large tensors take no more than small ones: 2^33 elements, and 2^20.
TYPED_TEST(CudaGraphs, AStepOfLargeTensorsIsOneLaunch) {
    ASSERT_NO_FATAL_FAILURE(for_each_step<TypeParam>({{.sizes = {1, 1, 1}}}, [](auto& problem, int64_t) {
        problem.segments[1].numel = int64_t{1} << 33;
        problem.segments[2].numel = int64_t{1} << 20;
        problem.num_blocks = number_blocks(problem.segments);
        ASSERT_EQ(launches_of(problem), steps(problem, 1));
    }));
}

// A table holds 16 groups, the empty ones too.
TYPED_TEST(CudaGraphs, AStepTakesOneLaunchForEachSixteenGroups) {
    for (const int64_t num_groups : {1, 16, 17, 32, 33}) {
        for (const bool empty : {false, true}) {
            std::vector<GroupSetting> groups(static_cast<size_t>(num_groups), {.sizes = {1}});
            for (size_t g = 1; empty && g < groups.size(); ++g) groups[g].sizes = {};
            SCOPED_TRACE(::testing::Message() << num_groups << " groups" << (empty ? ", empty but the first" : ""));
            ASSERT_NO_FATAL_FAILURE(for_each_step<TypeParam>(groups, [&](auto& problem, int64_t) {
                ASSERT_EQ(launches_of(problem), steps(problem, (num_groups + 15) / 16));
            }));
        }
    }
}

// Nothing to do but to count; SGD without counters has nothing to do at all.
TYPED_TEST(CudaGraphs, AStepOfNothingIsOneLaunchIfItIsCounted) {
    for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{}, std::vector<int64_t>{0, 0}}) {
        ASSERT_NO_FATAL_FAILURE(for_each_step<TypeParam>({{.sizes = sizes}}, [](auto& problem, int64_t) {
            ASSERT_EQ(launches_of(problem), steps(problem, 1));
        }));
        const SgdProblem<TypeParam> uncounted({{.sizes = sizes, .steps = std::nullopt}}, kSgd);
        ASSERT_EQ(launches_of(uncounted, nullptr), plain(0));
    }
}

#ifdef DDPCORE_FEW_ELEMENTS
// Where the device cannot launch cooperatively, LARS and LAMB take two launches a table.
TYPED_TEST(CudaGraphs, WithoutCooperativeLaunchThePassesAreTwoLaunches) {
    cuda_on_cpu::device().cooperative = false;
    for (const int64_t num_tensors : {1, 14, 548}) {
        const std::vector<int64_t> sizes(static_cast<size_t>(num_tensors), 5);
        for_each_step<TypeParam>({{.sizes = sizes}}, [&](auto& problem, int64_t most) {
            const int64_t tables = (num_tensors + most - 1) / most;
            EXPECT_EQ(launches_of(problem), plain(steps(problem, tables).cooperative + tables));
        });
    }
    cuda_on_cpu::device().cooperative = true;
}
#endif

template <typename T>
class CudaGraphsOfAverages : public CudaTest<T> {};
TYPED_TEST_SUITE(CudaGraphsOfAverages, Storages);

TYPED_TEST(CudaGraphsOfAverages, NormsTakeALaunchATableAndTheirSums) {
    for (const int64_t num_tensors : {0, 1, 128, 129, 1359, 1360, 2718, 2719}) {
        for (const int64_t numel : {0, 5}) {
            SCOPED_TRACE(::testing::Message() << num_tensors << " tensors of " << numel);
            NormProblem<TypeParam> problem(std::vector<int64_t>(static_cast<size_t>(num_tensors), numel), 0);
            const NormArgs args = problem.args();
            const int64_t tables = (num_tensors + 1358) / 1359, passes = numel > 0 ? tables : 0;
            EXPECT_EQ(
                launches_in([&](cudaStream_t stream) { return cuda::total_norm_(args, stream); }), plain(passes + 1));
            EXPECT_EQ(
                launches_in([&](cudaStream_t stream) { return cuda::segment_norms(args, stream); }),
                plain(passes + tables));
        }
    }
}

// The mix, and the sum of its distances: one a peer, so none without peers.
TYPED_TEST(CudaGraphsOfAverages, AMixIsTwoLaunches) {
    for (const int64_t num_peers : {0, 1, 8, 9, 1024}) {
        for (const int64_t numel : {0, 1, 50001}) {
            SCOPED_TRACE(::testing::Message() << num_peers << " peers, numel " << numel);
            MixProblem<TypeParam> problem(num_peers > 9 ? std::min<int64_t>(numel, 1) : numel, num_peers, 0);
            const MixArgs args = problem.args();
            EXPECT_EQ(
                launches_in([&](cudaStream_t stream) { return cuda::mix_(args, stream); }),
                plain((numel > 0 ? 1 : 0) + (num_peers > 0 ? 1 : 0)));
        }
    }
    for (const int64_t num_learners : {1, 5, 1024}) {
        for (const int64_t numel : {0, 45}) {
            SCOPED_TRACE(::testing::Message() << num_learners << " learners, numel " << numel);
            StackedProblem<TypeParam> problem(num_learners, numel, 0);
            const StackedMixArgs args = problem.args();
            EXPECT_EQ(
                launches_in([&](cudaStream_t stream) { return cuda::mix_stacked_(args, stream); }),
                plain(numel > 0 ? 2 : 1));
        }
    }
}

// A mix in front of a step takes no launch of its own.
TYPED_TEST(CudaGraphsOfAverages, AMixWithAStepIsOneLaunch) {
    for (const int64_t num_peers : {0, 1, 8}) {
        SgdProblem<Kind<TypeParam, false>> sgd({{.sizes = {1, 50001}}}, kSgd, {}, {.flat = true});
        LambProblem<Kind<TypeParam, false>> lamb(
            {{.sizes = {1, 50001}}}, rule_of(AdamDecay::kInUpdate, true), {}, {.flat = true});
        for (StepProblem<Kind<TypeParam, false>>* problem :
             {static_cast<StepProblem<Kind<TypeParam, false>>*>(&sgd),
              static_cast<StepProblem<Kind<TypeParam, false>>*>(&lamb)}) {
            problem->mix_with(num_peers);
        }
        const auto device_sgd = on_device(sgd, 0);
        EXPECT_EQ(launches_in([&](cudaStream_t stream) { return enqueue_step(device_sgd, sgd, stream); }), plain(1));
        const auto device_lamb = on_device(lamb, 0);
        EXPECT_EQ(
            launches_in([&](cudaStream_t stream) { return enqueue_step(device_lamb, lamb, stream); }), cooperative(1));
    }
}

// ---- recorded once, replayed at every step ----

// The gradients' norm, of which the step then makes its clipping, and the step.
template <typename Device, typename Problem>
cudaError_t enqueue_clipped_step(const Device& device, Problem& host, cudaStream_t stream) {
    std::vector<NormSegment> segments;
    for (const auto& segment : device.segments) segments.push_back({segment.grad, segment.numel, segment.first_block});
    auto* partials = reinterpret_cast<double*>(device.partials.data());
    const auto& args = device.args(host);
    const cudaError_t error = cuda::total_norm_(
        {segments.data(), args.num_segments, args.num_blocks, args.dtype, partials, device.norm_squared.data()},
        stream);
    return error == cudaSuccess ? enqueue_step(device, host, stream) : error;
}

// How a training loop changes what steps read: gradients, which overflow at two steps, and their scale; learning rates
// in memory; and once a part of the weights, as averaging with others does.
template <typename Problem>
void change_inputs(Problem& host, int step) {
    host.grads.randomize(static_cast<uint32_t>(700 * step), step % 2 == 0 ? 2.0f : 0.125f);
    const bool overflow = step == 0 || step == 3;
    host.scaling.found_inf = overflow ? 1.0f : 0.0f;
    if (overflow) host.grads.set(0, 1, INFINITY);
    if (step > 0) host.scaling.grad_scale = 16.0f / static_cast<float>(step);  // too long at every other step
    for (float& lr : host.lrs) lr *= 0.75f;
    if (step != 4) return;
    for (size_t s = 0; s < host.sizes.size(); ++s) {
        for (int64_t i = 0; i < host.sizes[s]; i += 3) host.params.set(s, i, 0.5f * host.params.at(s, i));
    }
}

// `host` takes no step of its own: it holds what the called steps have made, and the replayed ones must have made too.
template <typename Problem>
void expect_same_bits_replayed(Problem& host) {
    constexpr int kNumSteps = 7, kNumSkipped = 2;
    const auto called = on_device(host, 0);
    auto replayed = on_device(host, 0);
    const std::vector<float> steps_before = host.steps;
    Graph graph([&](cudaStream_t stream) { return enqueue_clipped_step(replayed, host, stream); });
    replayed.segments = {};  // tables of the host are gone when a graph is replayed
    replayed.groups = {};
    for (int step = 0; step < kNumSteps; ++step) {
        SCOPED_TRACE(::testing::Message() << "step " << step);
        change_inputs(host, step);
        for (const auto* device : {&called, &std::as_const(replayed)}) {
            device->upload_inputs(host);
            device->params.upload(host.params);
        }
        const auto params = host.params.copy();
        ASSERT_CUDA(enqueue_clipped_step(called, host, nullptr));
        called.download(host);
        ASSERT_EQ(host.params.same_bits(params), *host.scaling.found_inf != 0.0f) << "whether the step is skipped";
        ASSERT_NO_FATAL_FAILURE(graph.replay());
        ASSERT_NO_FATAL_FAILURE(replayed.expect_same_bits(host));
        const std::vector<Trust> trust = called.trust.download();
        ASSERT_TRUE(same_bits(trust.data(), replayed.trust.download().data(), std::ssize(trust)));
        ASSERT_EQ(called.norm_squared.download(), replayed.norm_squared.download());
    }
    for (size_t g = 0; g < host.groups.size(); ++g) {
        const int counted = host.groups[g].step == nullptr ? 0 : kNumSteps - kNumSkipped;
        ASSERT_EQ(host.steps[g], steps_before[g] + static_cast<float>(counted)) << "group " << g;
    }
}

TYPED_TEST(CudaGraphs, ReplayedStepsHaveTheBitsOfCalledOnes) {
    const ScalingSetting scaling{.grad_scale = 16.0f, .found_inf = 0.0f, .norm_squared = 0.0, .max_norm = 2.5f};
    for (const size_t turn : {31, 21, 11}) {  // each variant of LARS and each decay of LAMB
        ASSERT_NO_FATAL_FAILURE((for_each_optimizer<TypeParam>(
            {{.sizes = {4097, 0, 17, 9000}, .lr_from_memory = true},
             {.sizes = {3}, .lr = 0.1f, .weight_decay = 0.0f, .adapt = false, .steps = 2.0f}},
            scaling, turn, [](auto& problem) { expect_same_bits_replayed(problem); })));
    }
}

// More groups than one launch takes.
TYPED_TEST(CudaGraphs, ReplayedStepsOfSeveralLaunchesHaveTheBitsOfCalledOnes) {
    std::vector<GroupSetting> groups;
    for (int g = 0; g < 20; ++g) {
        groups.push_back({.sizes = {5, 40}, .lr = 0.1f + static_cast<float>(g), .lr_from_memory = g % 2 == 0});
    }
    const ScalingSetting scaling{.grad_scale = 1.0f, .found_inf = 0.0f, .norm_squared = 0.0, .max_norm = 2.5f};
    ASSERT_NO_FATAL_FAILURE((
        for_each_optimizer<TypeParam>(groups, scaling, 31, [](auto& problem) { expect_same_bits_replayed(problem); })));
}

}  // namespace
}  // namespace ddpcore::test
