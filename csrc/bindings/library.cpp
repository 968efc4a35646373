// The operators of torch.ops.ddpcore: their schemas. cpu.cpp and cuda.cpp register the kernels; ddpcore/ops registers
// the fake kernels and documents the arguments.
#include <torch/csrc/stable/library.h>

#define DDPCORE_SGD_ARGS \
    "*, float lr, float momentum, float dampening, float weight_decay, bool nesterov, bool maximize, bool first_step"

STABLE_TORCH_LIBRARY(ddpcore, library) {
    library.def(
        "sgd_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, " DDPCORE_SGD_ARGS ") -> ()");
    library.def("mix_(Tensor(a!) weights, Tensor[] peers, float self_weight, float[] peer_weights) -> Tensor");
    library.def("mix_stacked_(Tensor(a!) weights, Tensor matrix) -> Tensor");
    library.def(
        "mix_sgd_step_(Tensor(a!) weights, Tensor[] peers, float self_weight, float[] peer_weights, Tensor grad, "
        "Tensor(b!)? momentum_buffer, " DDPCORE_SGD_ARGS ") -> Tensor");
    library.def("segment_norms(Tensor[] tensors) -> Tensor");
}
