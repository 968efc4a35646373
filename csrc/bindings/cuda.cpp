// The CUDA kernels as operators: launched on the current stream of the tensors' device.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>

#include "../cuda/kernels.h"

#include "operators.h"

namespace ddpcore {
namespace {

// The version of CUDA that the driver is for, such as 12010. It is asked once.
int driver_version() {
    static const int result = [] {
        int version = 0;
        return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
    }();
    return result;
}

// Makes the device of `tensor` current, runs launch(stream) on its current stream and reports a failed launch.
template <typename Launch>
void launch_on(const Tensor& tensor, const char* name, Launch&& launch) {
    STD_TORCH_CHECK(
        driver_version() >= 12010,
        "ddpcore: the CUDA driver is too old for the arguments of the kernels: install R530 ", "(CUDA 12.1) or newer");
    const auto device = tensor.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(device);
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    const cudaError_t error = launch(static_cast<cudaStream_t>(stream));
    STD_TORCH_CHECK(error == cudaSuccess, "ddpcore: ", name, " failed to launch: ", cudaGetErrorString(error));
}

void check_count(int64_t count, int64_t most, const char* name, const char* what) {
    STD_TORCH_CHECK(
        count <= most, "ddpcore: ", name, " takes at most ", most, " ", what,
        " a call on CUDA: use a sparser topology");
}

template <typename Segment>
void check_step_peers(const StepArgs<Segment>& args) {
    STD_TORCH_CHECK(
        args.mix == nullptr || args.mix->num_peers <= cuda::kMaxStepPeers, "ddpcore: a step takes at most ",
        cuda::kMaxStepPeers, " peers on CUDA: call mix_ first, and then the step without a mix");
}

struct Cuda {
#define DDPCORE_RUN(name, Args)                                                                \
    static void run(const Tensor& like, const Args& args, int64_t) {                           \
        check_step_peers(args);                                                                \
        launch_on(like, #name, [&](cudaStream_t stream) { return cuda::name(args, stream); }); \
    }
    DDPCORE_ONE_PASS_STEPS(DDPCORE_RUN)
#undef DDPCORE_RUN

    static void run(const Tensor& like, const SgdCall&, const LarsArgs& args) {
        check_step_peers(args.sgd);
        launch_on(like, "lars_step_", [&](cudaStream_t stream) { return cuda::lars_step_(args, stream); });
    }

    static void run(const Tensor& like, const AdamCall&, const LambArgs& args) {
        check_step_peers(args);
        launch_on(like, "lamb_step_", [&](cudaStream_t stream) { return cuda::lamb_step_(args, stream); });
    }

    static void run(const Tensor& like, const MixCall& call) {
        check_count(call.args.num_peers, cuda::kMaxPeers, "mix_", "peers");
        launch_on(like, "mix_", [&](cudaStream_t stream) { return cuda::mix_(call.args, stream); });
    }

    static void run(const Tensor& like, const StackedMixCall& call) {
        check_count(call.args.num_learners, cuda::kMaxLearners, "mix_stacked_", "learners");
        check_count(call.args.num_others, cuda::kMaxPeers, "mix_stacked_", "rows of others");
        launch_on(like, "mix_stacked_", [&](cudaStream_t stream) { return cuda::mix_stacked_(call.args, stream); });
    }

    static void run(const Tensor& like, const AverageCall& call) {
        check_count(call.args.size, cuda::kMaxAveraged, "average_", "rows of one mean");
        launch_on(like, "average_", [&](cudaStream_t stream) { return cuda::average_(call.args, stream); });
    }

    static void segment_norms(const Tensor& like, const NormCall& call) {
        launch_on(like, "segment_norms", [&](cudaStream_t stream) { return cuda::segment_norms(call.args, stream); });
    }

    static void total_norm_(const Tensor& like, const NormCall& call) {
        launch_on(like, "total_norm_", [&](cudaStream_t stream) { return cuda::total_norm_(call.args, stream); });
    }

    static void noise_sums(const Tensor& like, const GramCall& call) {
        STD_TORCH_CHECK(
            call.args.num_rows <= cuda::kMaxRows, "ddpcore: noise_sums takes at most ", cuda::kMaxRows,
            " rows a call on CUDA: take fewer learners");
        launch_on(like, "noise_sums", [&](cudaStream_t stream) { return cuda::noise_sums(call.args, stream); });
    }
};

}  // namespace
}  // namespace ddpcore

STABLE_TORCH_LIBRARY_IMPL(ddpcore, CUDA, library) {
    ddpcore::register_operators<ddpcore::Cuda>(library);
}
