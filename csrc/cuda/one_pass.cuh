// Steps that read and write each element once, SGD and AdamW, with or without a mix of the weights before them.
#pragma once

#include "mix.cuh"
#include "segments.cuh"

namespace ddpcore::cuda {

// Steps one block. The first block of a CUDA block computes the scales of all groups while its loads are in flight,
// because they take double arithmetic, which some GPUs have at 1/64 of the fp32 rate. Returns false if the step is
// skipped.
template <bool whole, typename Optimizer, typename Mix, int capacity>
__device__ __forceinline__ bool step_block(
    const typename Optimizer::Place& at, const StepTable<typename Optimizer::Segment, capacity>& table,
    const typename Optimizer::Rule& rule, const Mix& mix, typename Optimizer::Scales* scales, int64_t group,
    bool is_first) {
    typename Optimizer::Shares shares;
    if constexpr (whole) {
        Optimizer::read(shares, at, rule);
        mix.read_weights(shares.weights, at);
    }
    if (is_first) {
        if (skips_step(table.scaling)) return false;  // in all threads of the grid
        fill_scales<Optimizer>(table, rule, scales);
    }
    if constexpr (whole) {
        mix.mix_weights(shares.weights, at);
        Optimizer::step(shares, at, scales[group]);
    } else {
        mix.mix_block(at);
        Optimizer::step_by_element(at, scales[group]);
    }
    return true;
}

// Optimizer defines, in static functions, how a thread reads and steps its share of a block: Sgd or Adamw.
template <typename Optimizer, typename Mix, int capacity>
__global__ void __launch_bounds__(kThreads, std::min(Optimizer::kResident, Mix::kResident)) one_pass_kernel(
    GRID_CONSTANT(StepTable<typename Optimizer::Segment, capacity>) table, GRID_CONSTANT(typename Optimizer::Rule) rule,
    GRID_CONSTANT(Mix) mix) {
    __shared__ typename Optimizer::Scales scales[kMaxGroups];
    const auto& list = table.list;
    bool is_first = true;
    for (int block = list.begin_block + static_cast<int>(blockIdx.x); block < list.end_block;
         block += static_cast<int>(gridDim.x), is_first = false) {
        const auto& segment = list.segment_of(block);
        const typename Optimizer::Place at(segment, (block - segment.first_block) * kBlock);
        const int64_t group = segment.group - table.first_group;
        const bool done = at.whole && mix.aligned
                              ? step_block<true, Optimizer>(at, table, rule, mix, scales, group, is_first)
                              : step_block<false, Optimizer>(at, table, rule, mix, scales, group, is_first);
        if (!done) return;
    }
    if (!skips_step(table.scaling)) count_steps(table);
}

// All launches of a step.
template <typename Optimizer, typename Mix>
cudaError_t one_pass(
    const StepArgs<typename Optimizer::Segment>& args, const typename Optimizer::Rule& rule, const Mix& mix,
    cudaStream_t stream) {
    using Segment = typename Optimizer::Segment;
    return for_each_step_chunk(args, [&]<int capacity>(const StepTable<Segment, capacity>& table) {
        const int64_t num_blocks = table.list.end_block - table.list.begin_block;
        if (num_blocks == 0 && table.finished == nullptr) return cudaSuccess;
        // Resident, because each CUDA block that counts steps ends with a barrier, a fence and an atomic operation.
        return launch_resident(
            one_pass_kernel<Optimizer, Mix, capacity>, std::max<int64_t>(num_blocks, 1), kThreads, 0, stream, false,
            table, rule, mix);
    });
}

}  // namespace ddpcore::cuda
