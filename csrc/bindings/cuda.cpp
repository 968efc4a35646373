// The CUDA kernels as operators: launched on the current stream of the tensors' device.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>

#include "../cuda/kernels.h"
#include "arguments.h"

namespace ddpcore {
namespace {

// Makes the device of `tensor` current, runs launch(stream) on its current stream and reports a failed launch.
template <typename Launch>
void launch_on(const Tensor& tensor, const char* name, Launch&& launch) {
    const auto device = tensor.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(device);
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    const cudaError_t error = launch(static_cast<cudaStream_t>(stream));
    STD_TORCH_CHECK(
        error != cudaErrorInvalidValue, "ddpcore: ", name,
        " takes at most 1024 peers or learners a call on CUDA: use a sparser topology");
    STD_TORCH_CHECK(error == cudaSuccess, "ddpcore: ", name, " failed to launch: ", cudaGetErrorString(error));
}

void sgd_step_(
    const std::vector<Tensor>& params, const std::vector<Tensor>& grads, const std::vector<Tensor>& momentum_buffers,
    double lr, double momentum, double dampening, double weight_decay, bool nesterov, bool maximize, bool first_step) {
    const SgdCall call(
        params, grads, momentum_buffers,
        sgd_rule(lr, momentum, dampening, weight_decay, nesterov, maximize, first_step));
    if (params.empty()) return;
    launch_on(params[0], "sgd_step_", [&](cudaStream_t stream) { return cuda::sgd_step_(call.args, stream); });
}

Tensor mix_(
    const Tensor& weights, const std::vector<Tensor>& peers, double self_weight,
    const std::vector<double>& peer_weights) {
    const MixCall call(weights, peers, self_weight, peer_weights);
    launch_on(weights, "mix_", [&](cudaStream_t stream) { return cuda::mix_(call.args, stream); });
    return call.sums;
}

Tensor mix_stacked_(const Tensor& weights, const Tensor& matrix) {
    const StackedMixCall call(weights, matrix);
    launch_on(weights, "mix_stacked_", [&](cudaStream_t stream) { return cuda::mix_stacked_(call.args, stream); });
    return call.sums;
}

Tensor mix_sgd_step_(
    const Tensor& weights, const std::vector<Tensor>& peers, double self_weight,
    const std::vector<double>& peer_weights, const Tensor& grad, const std::optional<Tensor>& momentum_buffer,
    double lr, double momentum, double dampening, double weight_decay, bool nesterov, bool maximize, bool first_step) {
    const MixCall call(weights, peers, self_weight, peer_weights);
    const MixSgdArgs args = mix_sgd_args(
        call.args, weights, grad, momentum_buffer,
        sgd_rule(lr, momentum, dampening, weight_decay, nesterov, maximize, first_step));
    launch_on(weights, "mix_sgd_step_", [&](cudaStream_t stream) { return cuda::mix_sgd_step_(args, stream); });
    return call.sums;
}

Tensor segment_norms(const std::vector<Tensor>& tensors) {
    const NormCall call(tensors);
    launch_on(tensors[0], "segment_norms", [&](cudaStream_t stream) { return cuda::segment_norms(call.args, stream); });
    return call.sums;
}

}  // namespace
}  // namespace ddpcore

STABLE_TORCH_LIBRARY_IMPL(ddpcore, CUDA, library) {
    library.impl("sgd_step_", TORCH_BOX(&ddpcore::sgd_step_));
    library.impl("mix_", TORCH_BOX(&ddpcore::mix_));
    library.impl("mix_stacked_", TORCH_BOX(&ddpcore::mix_stacked_));
    library.impl("mix_sgd_step_", TORCH_BOX(&ddpcore::mix_sgd_step_));
    library.impl("segment_norms", TORCH_BOX(&ddpcore::segment_norms));
}
