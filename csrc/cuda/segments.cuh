// A table of segments passed by value in kernel arguments: launched once for up to some hundred tensors, in chunks for
// more. Kernel arguments live in constant memory, so all threads of a warp read an entry at once.
#pragma once

#include "launch.cuh"

namespace ddpcore::cuda {

// The segments of one launch and the blocks they own, numbered as in the whole call.
template <typename Segment, int capacity>
struct SegmentTable {
    int64_t begin_block;
    int64_t end_block;
    int64_t first_segment;
    int64_t num_segments;
    Segment segments[capacity];
};

template <typename Segment, int capacity>
void fill_segments(
    SegmentTable<Segment, capacity>& table, const Segment* segments, int64_t num_segments, int64_t num_blocks,
    int64_t first, int64_t end) {
    table.begin_block = first < num_segments ? segments[first].first_block : num_blocks;
    table.end_block = end < num_segments ? segments[end].first_block : num_blocks;
    table.first_segment = first;
    table.num_segments = end - first;
    std::copy(segments + first, segments + end, table.segments);
}

inline constexpr int kFewSegments = 32;

// ---- norms: segments alone ----

inline constexpr int kManyNormSegments = (kMaxArgumentBytes - 128) / sizeof(NormSegment);  // 128 bytes for the others

template <int capacity, typename Fn>
cudaError_t launch_chunk(const NormArgs& args, int64_t first, Fn&& fn) {
    SegmentTable<NormSegment, capacity> table;
    const int64_t end = std::min(first + capacity, args.num_segments);
    fill_segments(table, args.segments, args.num_segments, args.num_blocks, first, end);
    return fn.template operator()<capacity>(table);
}

// Calls fn.template operator()<capacity>(table) for each chunk of the segments.
template <typename Fn>
cudaError_t for_each_chunk(const NormArgs& args, Fn&& fn) {
    for (int64_t first = 0; first < args.num_segments;) {
        const bool few = args.num_segments - first <= kFewSegments;
        const cudaError_t error =
            few ? launch_chunk<kFewSegments>(args, first, fn) : launch_chunk<kManyNormSegments>(args, first, fn);
        if (error != cudaSuccess) return error;
        first += few ? kFewSegments : kManyNormSegments;
    }
    return cudaSuccess;
}

// ---- steps: segments and their groups ----

inline constexpr int kMaxGroups = 16;  // of one launch

// Groups that the segments of one launch belong to. A group whose segments are spread over launches is counted in the
// last of them.
template <typename Segment, int capacity>
struct StepTable {
    SegmentTable<Segment, capacity> list;
    int64_t first_group;
    int32_t num_groups;
    int32_t num_counted;  // the first ones of groups
    StepGroup groups[kMaxGroups];
    GradScaling scaling;
    uint64_t* finished;  // zero between launches; null where no group counts

    __device__ __forceinline__ const StepGroup& group_of(const Segment& segment) const {
        return groups[segment.group - first_group];
    }
};

// 1024 bytes for all that does not grow with the segments, and a batch's end for each (two_pass.cuh). 547 of SGD and
// LARS, 480 of LAMB.
template <typename Segment>
inline constexpr int kManySteps = (kMaxArgumentBytes - 1024) / (sizeof(Segment) + sizeof(uint16_t));

template <int capacity, typename Args, typename Fn>
cudaError_t launch_step_chunk(
    const Args& args, int64_t first, int64_t end, int64_t first_group, int64_t next_group, Fn&& fn) {
    using Segment = std::remove_cvref_t<decltype(args.segments[0])>;
    StepTable<Segment, capacity> table;
    fill_segments(table.list, args.segments, args.num_segments, args.num_blocks, first, end);
    const int64_t end_group = std::min(first_group + kMaxGroups, args.num_groups);
    table.first_group = first_group;
    table.num_groups = static_cast<int32_t>(end_group - first_group);
    table.num_counted = static_cast<int32_t>(next_group - first_group);
    std::copy(args.groups + first_group, args.groups + end_group, table.groups);
    table.scaling = args.scaling;
    table.finished = args.tickets == nullptr ? nullptr : args.tickets + args.num_segments;
    return fn.template operator()<capacity>(table);
}

// Calls fn.template operator()<capacity>(table) for each chunk of the segments and groups of SgdArgs or LambArgs.
template <typename Args, typename Fn>
cudaError_t for_each_step_chunk(const Args& args, Fn&& fn) {
    constexpr int many = kManySteps<std::remove_cvref_t<decltype(args.segments[0])>>;
    for (int64_t first = 0, first_group = 0; first < args.num_segments || first_group < args.num_groups;) {
        const int64_t group_limit = first_group + kMaxGroups;
        int64_t end = first;
        while (end < args.num_segments && end - first < many && args.segments[end].group < group_limit) ++end;
        const int64_t next_group =
            std::min(group_limit, end < args.num_segments ? args.segments[end].group : args.num_groups);
        const cudaError_t error = end - first <= kFewSegments
                                      ? launch_step_chunk<kFewSegments>(args, first, end, first_group, next_group, fn)
                                      : launch_step_chunk<many>(args, first, end, first_group, next_group, fn);
        if (error != cudaSuccess) return error;
        first = end;
        first_group = next_group;
    }
    return cudaSuccess;
}

// Adds one to the step counts that end with this launch: the last CUDA block to come here does. By then all have read
// them. All threads must call it.
template <typename Segment, int capacity>
__device__ __forceinline__ void count_steps(const StepTable<Segment, capacity>& table) {
    if (table.finished == nullptr) return;
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence();
    if (atomicAdd(reinterpret_cast<unsigned long long*>(table.finished), 1ull) + 1 < gridDim.x) return;
    __threadfence();
    for (int i = 0; i < table.num_counted; ++i) {
        if (table.groups[i].step != nullptr) *table.groups[i].step += 1.0f;
    }
    *table.finished = 0;
}

}  // namespace ddpcore::cuda
