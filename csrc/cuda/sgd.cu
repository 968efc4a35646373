// sgd_step_: momentum SGD over a list of tensors. Traffic: 20 bytes a parameter in fp32 with momentum (read weight,
// gradient, momentum; write weight, momentum), 10 in bf16 and fp16; without momentum 12 and 6. With masters 22 and 14.
#include "sgd.cuh"

#include "segments.cuh"

namespace ddpcore::cuda {

namespace {

// Values for all threads of a CUDA block. One thread computes them while the loads of all are in flight, because they
// take double arithmetic, which some GPUs have at 1/64 of the fp32 rate.
struct Common {
    SgdScales scales;
    bool skip;
};

template <bool whole, typename T, bool Master>
__device__ __forceinline__ void sgd_block(
    const SgdPlace<T, Master>& at, int flags, const SgdRule& rule, const StepGroup& group, const GradScaling& scaling,
    Common& common) {
    using Place = SgdPlace<T, Master>;
    Weights<T, Master> weights;
    Share<T, Place::kWidth> grads;
    Share<typename Place::Momentum, Place::kWidth> momenta;
    if constexpr (whole) {
        read<true>(grads, at.grad, at.numel);
        if (flags & kMomentum) read<true>(momenta, at.momentum, at.numel);
        read(weights, at.param, at.master);
    }
    if (threadIdx.x == 0) common = {sgd_scales(rule, group, grad_factor(scaling)), skips_step(scaling)};
    __syncthreads();
    const auto [scales, skip] = common;
    if (skip) return;
    if constexpr (whole) {
        sgd_share(weights, grads, momenta, scales, flags);
        write(weights, at.param, at.master);
        if (flags & kMomentum) write<true>(momenta, at.momentum, at.numel);
    } else {
        sgd_by_element(at, scales, flags);
    }
}

// At most 80 registers, so that a multiprocessor holds three CUDA blocks.
template <typename T, bool Master, int capacity>
__global__ void __launch_bounds__(kThreads, 3)
    sgd_kernel(const __grid_constant__ StepTable<SgdSegment, capacity> table, const __grid_constant__ SgdRule rule) {
    __shared__ Common common[2];  // used in turn, so that one barrier a block is enough
    const auto& list = table.list;
    int turn = 0;
    for (int block = list.begin_block + static_cast<int>(blockIdx.x); block < list.end_block;
         block += static_cast<int>(gridDim.x), turn ^= 1) {
        const SgdSegment& segment = list.segment_of(block);
        const StepGroup& group = table.group_of(segment);
        const SgdPlace<T, Master> at(segment, (block - segment.first_block) * kBlock);
        const int flags = sgd_flags(rule, group);
        if (at.whole) {
            sgd_block<true>(at, flags, rule, group, table.scaling, common[turn]);
        } else {
            sgd_block<false>(at, flags, rule, group, table.scaling, common[turn]);
        }
    }
    if (!skips_step(table.scaling)) count_steps(table);
}

}  // namespace

cudaError_t sgd_step_(const SgdArgs& args, cudaStream_t stream) {
    return with_weights(args.dtype, args.masters, [&]<typename T, bool Master>() {
        return for_each_step_chunk(args, [&]<int capacity>(const StepTable<SgdSegment, capacity>& table) {
            const int64_t num_blocks = table.list.end_block - table.list.begin_block;
            if (num_blocks == 0 && table.finished == nullptr) return cudaSuccess;
            // Resident, because each CUDA block that counts steps ends with a barrier, a fence and an atomic operation.
            return launch_resident(
                sgd_kernel<T, Master, capacity>, std::max<int64_t>(num_blocks, 1), kThreads, 0, stream, false, table,
                args.rule);
        });
    });
}

}  // namespace ddpcore::cuda
