// The CPU kernels as operators: blocks are spread over torch's own threads, so torch.set_num_threads holds.
#include "../cpu/kernels.h"

#include "arguments.h"

namespace ddpcore {
namespace {

inline constexpr int64_t kGrain = 32768;  // elements that are worth a thread, as in torch's own kernels

template <typename Kernel, typename Args>
void run(Kernel* kernel, const Args& args, int64_t num_blocks, int64_t numel) {
    if (num_blocks == 0 || numel == 0) return;
    // Blocks of many small tensors are nearly empty: it takes more of them to make up a grain.
    const int64_t grain = (kGrain * num_blocks + numel - 1) / numel;
    torch::stable::parallel_for(0, num_blocks, grain, [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

template <typename Segment>
int64_t total_numel(const std::vector<Segment>& segments) {
    int64_t numel = 0;
    for (const Segment& segment : segments) numel += segment.numel;
    return numel;
}

void sgd_step_(
    const std::vector<Tensor>& params, const std::vector<Tensor>& grads, const std::vector<Tensor>& momentum_buffers,
    double lr, double momentum, double dampening, double weight_decay, bool nesterov, bool maximize, bool first_step) {
    const SgdCall call(
        params, grads, momentum_buffers,
        sgd_rule(lr, momentum, dampening, weight_decay, nesterov, maximize, first_step));
    run(cpu::sgd_step_, call.args, call.args.num_blocks, total_numel(call.segments));
}

Tensor mix_(
    const Tensor& weights, const std::vector<Tensor>& peers, double self_weight,
    const std::vector<double>& peer_weights) {
    const MixCall call(weights, peers, self_weight, peer_weights);
    const int64_t num_blocks = num_blocks_of(call.args.numel);
    run(cpu::mix_, call.args, num_blocks, call.args.numel);
    cpu::sum_partials(call.args.partials, call.args.sums, num_blocks, call.args.num_peers);
    return call.sums;
}

Tensor mix_stacked_(const Tensor& weights, const Tensor& matrix) {
    const StackedMixCall call(weights, matrix);
    const int64_t num_blocks = num_blocks_of(call.args.numel);
    run(cpu::mix_stacked_, call.args, num_blocks, call.args.numel * call.args.num_learners);
    cpu::sum_partials(call.args.partials, call.args.sums, num_blocks, call.args.num_learners);
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
    const int64_t num_blocks = num_blocks_of(call.args.numel);
    run(cpu::mix_sgd_step_, args, num_blocks, call.args.numel);
    cpu::sum_partials(call.args.partials, call.args.sums, num_blocks, call.args.num_peers);
    return call.sums;
}

Tensor segment_norms(const std::vector<Tensor>& tensors) {
    const NormCall call(tensors);
    run(cpu::segment_norms, call.args, call.args.num_blocks, total_numel(call.segments));
    for (int64_t i = 0; i < call.args.num_segments; ++i) {
        const NormSegment& segment = call.segments[static_cast<size_t>(i)];
        cpu::sum_partials(
            call.args.partials + segment.first_block, call.args.sums + i, num_blocks_of(segment.numel), 1);
    }
    return call.sums;
}

}  // namespace
}  // namespace ddpcore

STABLE_TORCH_LIBRARY_IMPL(ddpcore, CPU, library) {
    library.impl("sgd_step_", TORCH_BOX(&ddpcore::sgd_step_));
    library.impl("mix_", TORCH_BOX(&ddpcore::mix_));
    library.impl("mix_stacked_", TORCH_BOX(&ddpcore::mix_stacked_));
    library.impl("mix_sgd_step_", TORCH_BOX(&ddpcore::mix_sgd_step_));
    library.impl("segment_norms", TORCH_BOX(&ddpcore::segment_norms));
}
