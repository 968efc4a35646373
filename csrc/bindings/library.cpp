// The operators of torch.ops.ddpcore: their schemas. cpu.cpp and cuda.cpp register the kernels; ddpcore/ops registers
// the fake kernels and documents the arguments.
#include <torch/csrc/stable/library.h>

#define DDPCORE_GROUP_ARGS "int[] group_sizes, float[] lr, float[] weight_decay, Tensor[] device_lr, "
#define DDPCORE_SGD_ARGS "float momentum, float dampening, bool nesterov, bool decoupled, "
#define DDPCORE_SCALING_ARGS \
    "bool maximize, Tensor? grad_scale, Tensor? found_inf, Tensor? norm_squared, float max_norm) -> ()"

STABLE_TORCH_LIBRARY(ddpcore, library) {
    library.def(
        "sgd_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, Tensor(c!)[] masters, "
        "Tensor(d!)[] steps, Tensor(e!)? scratch, *, " DDPCORE_GROUP_ARGS DDPCORE_SGD_ARGS DDPCORE_SCALING_ARGS);
    library.def(
        "lars_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, Tensor(c!)[] masters, "
        "Tensor(d!)[] steps, Tensor(e!) scratch, Tensor(f!) trust, *, " DDPCORE_GROUP_ARGS
        "int[] adapt, str variant, float trust_coefficient, float eps, " DDPCORE_SGD_ARGS DDPCORE_SCALING_ARGS);
    library.def(
        "lamb_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
        "Tensor(d!)[] masters, Tensor(e!)[] steps, Tensor(f!) scratch, Tensor(g!) trust, *, " DDPCORE_GROUP_ARGS
        "int[] adapt, float beta1, float beta2, float eps, bool debias, str decay_mode, float min_ratio, "
        "float max_ratio, float min_weight_norm, float max_weight_norm, " DDPCORE_SCALING_ARGS);
    library.def("mix_(Tensor(a!) weights, Tensor[] peers, float self_weight, float[] peer_weights) -> Tensor");
    library.def("mix_stacked_(Tensor(a!) weights, Tensor matrix) -> Tensor");
    library.def(
        "mix_sgd_step_(Tensor(a!) weights, Tensor[] peers, float self_weight, float[] peer_weights, Tensor grad, "
        "Tensor(b!)? momentum_buffer, Tensor(c!)? step, *, float lr, float momentum, float dampening, "
        "float weight_decay, bool nesterov, bool decoupled, bool maximize) -> Tensor");
    library.def("segment_norms(Tensor[] tensors) -> Tensor");
}
