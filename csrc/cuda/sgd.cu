// sgd_step_: momentum SGD over a list of tensors. Traffic: 20 bytes a parameter in fp32 with momentum (read weight,
// gradient, momentum; write weight, momentum), 10 in bf16 and fp16; without momentum 12 and 6.
#include "sgd.cuh"

#include "segments.cuh"

namespace ddpcore::cuda {

namespace {

template <bool whole, typename T>
__device__ __forceinline__ void sgd_block(
    T* param, const T* grad, T* momentum, int numel, const SgdRule& rule, int flags) {
    Share<T> weights, grads, momenta;
    read<whole>(weights, param, numel);
    read<whole>(grads, grad, numel);
    if (reads_momentum(flags)) read<whole>(momenta, momentum, numel);
    sgd_share(weights, grads, momenta, rule, flags);
    write<whole>(weights, param, numel);
    if (flags & kMomentum) write<whole>(momenta, momentum, numel);
}

template <typename T, int capacity>
__global__ void __launch_bounds__(kThreads) sgd_kernel(
    const __grid_constant__ SegmentTable<SgdSegment, capacity> table, const __grid_constant__ SgdRule rule, int flags) {
    for (int64_t block = table.begin_block + blockIdx.x; block < table.end_block; block += gridDim.x) {
        // Each thread searches for itself: at most 10 steps through constant memory, the same for all, no barrier.
        const SgdSegment& segment = table.segments[segment_of_block(table.segments, table.num_segments, block)];
        const int64_t first = (block - segment.first_block) * kBlock;
        const int numel = static_cast<int>(min(kBlock, segment.numel - first));
        T* param = static_cast<T*>(segment.param) + first;
        const T* grad = static_cast<const T*>(segment.grad) + first;
        T* momentum = (flags & kMomentum) ? static_cast<T*>(segment.momentum) + first : nullptr;
        if (numel == kBlock && is_aligned(param) && is_aligned(grad) && is_aligned(momentum)) {
            sgd_block<true>(param, grad, momentum, numel, rule, flags);
        } else {
            sgd_block<false>(param, grad, momentum, numel, rule, flags);
        }
    }
}

}  // namespace

cudaError_t sgd_step_(const SgdArgs& args, cudaStream_t stream) {
    return with_storage(args.dtype, [&](auto* tag) {
        using T = std::remove_pointer_t<decltype(tag)>;
        return for_each_chunk(args, [&]<int capacity>(const SegmentTable<SgdSegment, capacity>& table) {
            const int64_t num_blocks = table.end_block - table.begin_block;
            if (num_blocks == 0) return cudaSuccess;
            return launch(
                sgd_kernel<T, capacity>, num_blocks, kThreads, 0, stream, table, args.rule, sgd_flags(args.rule));
        });
    });
}

}  // namespace ddpcore::cuda
