// mix_sgd_step_: mix_, then sgd_step_, in one pass. Traffic: 24 bytes a parameter in fp32 with momentum and one peer
// (read weight, peer, gradient, momentum; write weight, momentum), 12 in bf16 and fp16; 4 or 2 for each further peer.
#include "mix.cuh"
#include "sgd.cuh"

namespace ddpcore::cuda {

namespace {

struct SgdTensors {
    const void* grad;
    void* momentum;
    SgdRule rule;
    StepGroup group;
    float grad_factor;
};

// The mix is rounded to the storage type before the step, so that one pass has the bits of two.
template <bool whole, typename T>
__device__ __forceinline__ void mix_sgd_block(
    const MixTable<kFewPeers>& table, const SgdTensors& sgd, const Place& place, BlockSum<kThreads>& block_sum) {
    T* weight = static_cast<T*>(table.weights) + place.first;
    const int flags = sgd_flags(sgd.rule, sgd.group);
    T* momentum = (flags & kMomentum) ? static_cast<T*>(sgd.momentum) + place.first : nullptr;
    Weights<T, false> weights;
    Share<T> grads, momenta;
    read<whole>(weights.values, static_cast<const T*>(table.source) + place.first, place.numel);
    read<whole>(grads, static_cast<const T*>(sgd.grad) + place.first, place.numel);
    if (flags & kMomentum) read<whole>(momenta, static_cast<const T*>(momentum), place.numel);
    // The loads of learning rate and step are issued before the mix and used after it, so that the peers' loads do not
    // wait for them.
    StepGroup group = sgd.group;
    float step = 1.0f;
    if (group.step != nullptr) step = *group.step;
    group.lr = lr_of(group);
    group.device_lr = nullptr;
    group.step = &step;
    mix_share<whole>(weights.values, table, place, block_sum);
    sgd_share(weights, grads, momenta, sgd_scales(sgd.rule, group, sgd.grad_factor), flags);
    write<whole>(weights.values, weight, place.numel);
    if (flags & kMomentum) write<whole>(momenta, momentum, place.numel);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    mix_sgd_kernel(const __grid_constant__ MixTable<kFewPeers> table, const __grid_constant__ SgdTensors sgd) {
    BlockSum<kThreads> block_sum;
    for (int64_t block = blockIdx.x; block < table.num_blocks; block += gridDim.x) {
        const Place place = place_of_block(table, block);
        if (table.aligned && place.numel == kBlock) {
            mix_sgd_block<true, T>(table, sgd, place, block_sum);
        } else {
            mix_sgd_block<false, T>(table, sgd, place, block_sum);
        }
    }
}

// With more than kFewPeers the traffic of the step is small beside that of the peers: two passes, and no further
// kernels.
cudaError_t mix_then_step(const MixSgdArgs& args, cudaStream_t stream) {
    cudaError_t error = mix_(args.mix, stream);
    if (error != cudaSuccess) return error;
    const SgdSegment segment{args.mix.weights, args.grad, args.momentum, nullptr, args.mix.numel, 0, 0};
    const GradScaling scaling{nullptr, nullptr, nullptr, 0.0f, args.maximize};
    const int64_t num_blocks = num_blocks_of(args.mix.numel);
    error = sgd_step_(
        {{&segment, 1, num_blocks, &args.group, 1, args.mix.dtype, false, scaling, nullptr}, args.rule}, stream);
    if (error != cudaSuccess) return error;
    return sum_partials(nullptr, nullptr, 0, 0, stream, args.group.step);  // no sums: counts the step
}

}  // namespace

cudaError_t mix_sgd_step_(const MixSgdArgs& args, cudaStream_t stream) {
    if (args.mix.num_peers > kFewPeers) return mix_then_step(args, stream);
    const int64_t num_blocks = num_blocks_of(args.mix.numel);
    if (num_blocks > 0) {
        const auto table = mix_table<kFewPeers>(args.mix, is_aligned(args.grad) && is_aligned(args.momentum));
        const SgdTensors sgd{args.grad, args.momentum, args.rule, args.group, args.maximize ? -1.0f : 1.0f};
        const cudaError_t error = with_storage(args.mix.dtype, [&](auto* tag) {
            using T = std::remove_pointer_t<decltype(tag)>;
            return launch(mix_sgd_kernel<T>, num_blocks, kThreads, 0, stream, table, sgd);
        });
        if (error != cudaSuccess) return error;
    }
    return sum_partials(args.mix.partials, args.mix.sums, num_blocks, args.mix.num_peers, stream, args.group.step);
}

}  // namespace ddpcore::cuda
