// The operators of both backends. Backend::run() calls the kernels of its device; cpu.cpp and cuda.cpp each define a
// Backend. The arguments have the order of the schemas in ddpcore/ops.
#pragma once

#include "averages.h"

namespace ddpcore {

// Runs a step with all the tensors of `call`.
template <typename Backend, typename Call>
void run_step(const Tensors& params, Call& call, const std::optional<Tensor>& scratch, const MixArguments& mix) {
    const StepMix placed(call, params, mix);
    if (scratch.has_value()) call.args.tickets = Scratch(params[0], *scratch, 0, call.segments.size()).tickets;
    Backend::run(params[0], call.args, call.tensors.numel);
    call.tensors.copies.copy_back();
}

template <typename Backend, typename Call, typename Rule>
void run_step(
    const Tensors& params, Call& call, const Tensor& scratch, const Tensor& trust, const Rule& rule,
    const PassArguments& pass, const MixArguments& mix) {
    const StepMix placed(call, params, mix, pass.passes());
    const size_t num_segments = call.segments.size();
    const Scratch place(params[0], scratch, call.args.num_blocks, num_segments);
    call.args.tickets = place.tickets;
    auto args = adaptive_args(call.args, rule, place.partials, trust_rows(params[0], trust, num_segments));
    args.passes = pass.passes();
    args.squares = pass.squares(params[0], num_segments);
    Backend::run(params[0], call, args);
    call.tensors.copies.copy_back();
}

template <typename Backend>
void sgd_step_(
    const Tensors& params, const Tensors& grads, const Tensors& momentum_buffers, const Tensors& masters,
    const Tensors& steps, const std::optional<Tensor>& scratch, const std::vector<int64_t>& group_sizes,
    const std::vector<double>& lr, const std::vector<double>& weight_decay, const Tensors& device_lr, double momentum,
    double dampening, bool nesterov, bool decoupled, bool maximize, const std::optional<Tensor>& grad_scale,
    const std::optional<Tensor>& found_inf, const std::optional<Tensor>& norm_squared, double max_norm,
    const std::vector<int64_t>& state_firsts, int64_t state_seed, const std::optional<Tensors>& peers,
    double self_weight, const std::optional<std::vector<double>>& peer_weights,
    const std::optional<std::vector<int64_t>>& offsets, double noise_std, int64_t noise_seed, int64_t noise_step,
    int64_t noise_first, const std::optional<Tensor>& out) {
    SgdCall call(
        params, grads, momentum_buffers, masters, {group_sizes, lr, weight_decay, device_lr, steps, nullptr},
        sgd_rule(momentum, dampening, nesterov, decoupled), {grad_scale, found_inf, norm_squared, max_norm, maximize},
        {state_firsts, state_seed});
    STD_TORCH_CHECK(steps.empty() || scratch.has_value(), "ddpcore: steps need scratch");
    run_step<Backend>(
        params, call, scratch,
        {peers, self_weight, peer_weights, offsets, noise_of(noise_std, noise_seed, noise_step, noise_first), out});
}

template <typename Backend>
void adamw_step_(
    const Tensors& params, const Tensors& grads, const Tensors& exp_avgs, const Tensors& exp_avg_sqs,
    const Tensors& masters, const Tensors& steps, const Tensor& scratch, const std::vector<int64_t>& group_sizes,
    const std::vector<double>& lr, const std::vector<double>& weight_decay, const Tensors& device_lr, double beta1,
    double beta2, double eps, bool decoupled, bool maximize, const std::optional<Tensor>& grad_scale,
    const std::optional<Tensor>& found_inf, const std::optional<Tensor>& norm_squared, double max_norm,
    const std::vector<int64_t>& state_firsts, int64_t state_seed, const std::optional<Tensors>& peers,
    double self_weight, const std::optional<std::vector<double>>& peer_weights,
    const std::optional<std::vector<int64_t>>& offsets, double noise_std, int64_t noise_seed, int64_t noise_step,
    int64_t noise_first, const std::optional<Tensor>& out) {
    AdamCall call(
        params, grads, exp_avgs, exp_avg_sqs, masters, {group_sizes, lr, weight_decay, device_lr, steps, nullptr},
        adamw_rule(beta1, beta2, eps, decoupled), {grad_scale, found_inf, norm_squared, max_norm, maximize},
        {state_firsts, state_seed});
    run_step<Backend>(
        params, call, scratch,
        {peers, self_weight, peer_weights, offsets, noise_of(noise_std, noise_seed, noise_step, noise_first), out});
}

template <typename Backend>
void lars_step_(
    const Tensors& params, const Tensors& grads, const Tensors& momentum_buffers, const Tensors& masters,
    const Tensors& steps, const Tensor& scratch, const Tensor& trust, const std::vector<int64_t>& group_sizes,
    const std::vector<double>& lr, const std::vector<double>& weight_decay, const Tensors& device_lr,
    const std::vector<int64_t>& adapt, std::string variant, double trust_coefficient, double eps, double momentum,
    double dampening, bool nesterov, bool decoupled, bool maximize, const std::optional<Tensor>& grad_scale,
    const std::optional<Tensor>& found_inf, const std::optional<Tensor>& norm_squared, double max_norm,
    const std::optional<Tensor>& squares, std::string passes, const std::vector<int64_t>& state_firsts,
    int64_t state_seed, const std::optional<Tensors>& peers, double self_weight,
    const std::optional<std::vector<double>>& peer_weights, const std::optional<std::vector<int64_t>>& offsets,
    double noise_std, int64_t noise_seed, int64_t noise_step, int64_t noise_first, const std::optional<Tensor>& out) {
    SgdCall call(
        params, grads, momentum_buffers, masters, {group_sizes, lr, weight_decay, device_lr, steps, &adapt},
        sgd_rule(momentum, dampening, nesterov, decoupled), {grad_scale, found_inf, norm_squared, max_norm, maximize},
        {state_firsts, state_seed});
    run_step<Backend>(
        params, call, scratch, trust,
        LarsRule{lars_variant(variant), static_cast<float>(trust_coefficient), static_cast<float>(eps)},
        {passes, squares},
        {peers, self_weight, peer_weights, offsets, noise_of(noise_std, noise_seed, noise_step, noise_first), out});
}

template <typename Backend>
void lamb_step_(
    const Tensors& params, const Tensors& grads, const Tensors& exp_avgs, const Tensors& exp_avg_sqs,
    const Tensors& masters, const Tensors& steps, const Tensor& scratch, const Tensor& trust,
    const std::vector<int64_t>& group_sizes, const std::vector<double>& lr, const std::vector<double>& weight_decay,
    const Tensors& device_lr, const std::vector<int64_t>& adapt, double beta1, double beta2, double eps, bool debias,
    std::string decay_mode, double min_ratio, double max_ratio, double min_weight_norm, double max_weight_norm,
    bool maximize, const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
    const std::optional<Tensor>& norm_squared, double max_norm, const std::optional<Tensor>& squares,
    std::string passes, const std::vector<int64_t>& state_firsts, int64_t state_seed,
    const std::optional<Tensors>& peers, double self_weight, const std::optional<std::vector<double>>& peer_weights,
    const std::optional<std::vector<int64_t>>& offsets, double noise_std, int64_t noise_seed, int64_t noise_step,
    int64_t noise_first, const std::optional<Tensor>& out) {
    const LambRule rule =
        lamb_rule(beta1, beta2, eps, debias, decay_mode, min_ratio, max_ratio, min_weight_norm, max_weight_norm);
    AdamCall call(
        params, grads, exp_avgs, exp_avg_sqs, masters, {group_sizes, lr, weight_decay, device_lr, steps, &adapt}, rule,
        {grad_scale, found_inf, norm_squared, max_norm, maximize}, {state_firsts, state_seed});
    run_step<Backend>(
        params, call, scratch, trust, rule, {passes, squares},
        {peers, self_weight, peer_weights, offsets, noise_of(noise_std, noise_seed, noise_step, noise_first), out});
}

template <typename Backend>
Tensor mix_(
    const Tensor& weights, const Tensors& peers, double self_weight, const std::vector<double>& peer_weights,
    double noise_std, int64_t noise_seed, int64_t noise_step, int64_t noise_first, const std::optional<Tensor>& out) {
    const Noise noise = noise_of(noise_std, noise_seed, noise_step, noise_first);
    const MixCall call(weights, peers, self_weight, peer_weights, noise, out);
    Backend::run(weights, call);
    return call.sums;
}

template <typename Backend>
Tensor mix_stacked_(
    const Tensor& weights, const Tensors& others, const Tensor& offsets, const Tensor& columns, const Tensor& values,
    bool distances) {
    const StackedMixCall call(weights, others, offsets, columns, values, distances);
    Backend::run(weights, call);
    return distances ? call.sums : new_sums(weights, {0});
}

template <typename Backend>
Tensor average_(const Tensors& rows, int64_t size) {
    const AverageCall call(rows, size);
    Backend::run(rows[0], call);
    return *call.sums;
}

template <typename Backend>
Tensor segment_norms(const Tensors& tensors) {
    NormCall call(tensors);
    const Tensor partials = new_sums(tensors[0], {call.args.num_blocks});
    const Tensor sums = new_sums(tensors[0], {call.args.num_segments});
    call.args.partials = partials.mutable_data_ptr<double>();
    call.args.sums = sums.mutable_data_ptr<double>();
    Backend::segment_norms(tensors[0], call);
    return sums;
}

template <typename Backend>
void total_norm_(const Tensors& tensors, const Tensor& out) {
    NormCall call(tensors);
    STD_TORCH_CHECK(
        out.scalar_type() == ScalarType::Double && out.is_contiguous() && same_device(tensors[0], out) &&
            out.numel() > call.args.num_blocks,
        "ddpcore: out must be float64 on the device of the tensors, at least ", call.args.num_blocks + 1, " elements");
    call.args.sums = out.mutable_data_ptr<double>();
    call.args.partials = call.args.sums + 1;
    Backend::total_norm_(tensors[0], call);
}

template <typename Backend>
Tensor noise_sums(const Tensors& rows, const std::vector<int64_t>& bounds, const std::optional<Tensor>& origin) {
    const GramCall call(rows, bounds, origin);
    Backend::noise_sums(rows[0], call);
    return call.sums;
}

// Registers all operators of a backend.
template <typename Backend>
void register_operators(torch::stable::detail::StableLibrary& library) {
    library.impl("sgd_step_", TORCH_BOX(&sgd_step_<Backend>));
    library.impl("adamw_step_", TORCH_BOX(&adamw_step_<Backend>));
    library.impl("lars_step_", TORCH_BOX(&lars_step_<Backend>));
    library.impl("lamb_step_", TORCH_BOX(&lamb_step_<Backend>));
    library.impl("mix_", TORCH_BOX(&mix_<Backend>));
    library.impl("mix_stacked_", TORCH_BOX(&mix_stacked_<Backend>));
    library.impl("average_", TORCH_BOX(&average_<Backend>));
    library.impl("segment_norms", TORCH_BOX(&segment_norms<Backend>));
    library.impl("total_norm_", TORCH_BOX(&total_norm_<Backend>));
    library.impl("noise_sums", TORCH_BOX(&noise_sums<Backend>));
}

}  // namespace ddpcore
