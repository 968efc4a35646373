// Tables of segments as kernel arguments. A table holds some hundred tensors; a longer list takes several launches, one
// for each chunk. Kernel arguments are in constant memory, where all threads of a warp read one entry in one access.
#pragma once

#include "launch.cuh"

namespace ddpcore::cuda {

// The segments of one launch and their blocks, with the block numbers of the whole call.
template <typename Segment, int capacity>
struct SegmentTable {
    int32_t begin_block;
    int32_t end_block;
    int64_t first_segment;
    int32_t num_segments;
    Segment segments[capacity];

    // Every thread searches: a few steps in constant memory, the same in all threads, and no barrier.
    __device__ __forceinline__ const Segment& segment_of(int32_t block) const {
        return segments[segment_of_block(segments, num_segments, block)];
    }
};

template <typename Segment, int capacity>
void fill_segments(
    SegmentTable<Segment, capacity>& table, const Segment* segments, int64_t num_segments, int64_t num_blocks,
    int64_t first, int64_t end) {
    const auto block_of = [&](int64_t s) {
        return static_cast<int32_t>(s < num_segments ? segments[s].first_block : num_blocks);
    };
    table.begin_block = block_of(first);
    table.end_block = block_of(end);
    table.first_segment = first;
    table.num_segments = static_cast<int32_t>(end - first);
    std::copy(segments + first, segments + end, table.segments);
}

// A launch copies all of its arguments, used or not, so a table has the smallest of these capacities that holds its
// segments, or the largest that arguments can be: 3 KB for small models, 8 KB for ResNet-18, up to 32 KB.
inline constexpr int kFewSegments = 32, kSomeSegments = 128;

// ---- norms: tables of segments ----

inline constexpr int kManyNormSegments =
    (kMaxArgumentBytes - 128) / sizeof(NormSegment);  // 128 bytes are for the other arguments

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
        const bool some = args.num_segments - first <= kSomeSegments;
        const cudaError_t error =
            some ? launch_chunk<kSomeSegments>(args, first, fn) : launch_chunk<kManyNormSegments>(args, first, fn);
        if (error != cudaSuccess) return error;
        first += some ? kSomeSegments : kManyNormSegments;
    }
    return cudaSuccess;
}

// ---- steps: tables of segments and groups ----

inline constexpr int kMaxGroups = 16;  // of one launch

// The segments and groups of one launch. If a group has segments in several launches, the last one counts its step.
template <typename Segment, int capacity>
struct StepTable {
    SegmentTable<Segment, capacity> list;
    int64_t first_group;
    int32_t num_groups;
    int32_t num_counted;  // this many groups, from the first on, count their step in this launch
    StepGroup groups[kMaxGroups];
    GradScaling scaling;
    uint64_t* finished;  // zero between launches; null if no group has a step count
    uint64_t state_seed;
    bool rounded_states;

    __device__ __forceinline__ const StepGroup& group_of(const Segment& segment) const {
        return groups[segment.group - first_group];
    }
};

// The largest capacity: 547 segments of SGD and LARS, 480 of LAMB. 1024 bytes are for the other arguments, and 2 bytes
// a segment for the ends of batches (two_pass.cuh).
template <typename Segment>
inline constexpr int kManySteps = (kMaxArgumentBytes - 1024) / (sizeof(Segment) + sizeof(uint16_t));

template <int capacity, typename Segment, typename Fn>
cudaError_t launch_step_chunk(
    const StepArgs<Segment>& args, int64_t first, int64_t end, int64_t first_group, int64_t next_group, Fn&& fn) {
    StepTable<Segment, capacity> table;
    fill_segments(table.list, args.segments, args.num_segments, args.num_blocks, first, end);
    const int64_t end_group = std::min(first_group + kMaxGroups, args.num_groups);
    table.first_group = first_group;
    table.num_groups = static_cast<int32_t>(end_group - first_group);
    table.num_counted = static_cast<int32_t>(next_group - first_group);
    std::copy(args.groups + first_group, args.groups + end_group, table.groups);
    table.scaling = args.scaling;
    table.state_seed = args.state_seed;
    table.rounded_states = args.rounded_states;
    table.finished = args.tickets == nullptr ? nullptr : args.tickets + args.num_segments;
    return fn.template operator()<capacity>(table);
}

// Calls fn.template operator()<capacity>(table) for each chunk of the segments and groups of a step.
template <typename Segment, typename Fn>
cudaError_t for_each_step_chunk(const StepArgs<Segment>& args, Fn&& fn) {
    constexpr int many = kManySteps<Segment>;
    for (int64_t first = 0, first_group = 0; first < args.num_segments || first_group < args.num_groups;) {
        const int64_t group_limit = first_group + kMaxGroups;
        int64_t end = first;
        while (end < args.num_segments && end - first < many && args.segments[end].group < group_limit) ++end;
        const int64_t next_group =
            std::min(group_limit, end < args.num_segments ? args.segments[end].group : args.num_groups);
        const auto launch_chunk = [&]<int capacity>() {
            return launch_step_chunk<capacity>(args, first, end, first_group, next_group, fn);
        };
        const cudaError_t error = end - first <= kFewSegments    ? launch_chunk.template operator()<kFewSegments>()
                                  : end - first <= kSomeSegments ? launch_chunk.template operator()<kSomeSegments>()
                                                                 : launch_chunk.template operator()<many>();
        if (error != cudaSuccess) return error;
        first = end;
        first_group = next_group;
    }
    return cudaSuccess;
}

// Computes the scales of all groups in shared memory: powers and divisions in double, once for each CUDA block and
// group. All threads must call it.
template <typename Optimizer, int capacity>
__device__ __forceinline__ void fill_scales(
    const StepTable<typename Optimizer::Segment, capacity>& table, const typename Optimizer::Rule& rule,
    typename Optimizer::Scales* scales) {
    if (static_cast<int>(threadIdx.x) < table.num_groups) {
        const float grad = grad_factor(table.scaling);
        scales[threadIdx.x] = Optimizer::scales(rule, table.groups[threadIdx.x], grad, table.state_seed);
    }
    __syncthreads();
}

// Adds one to the step counts of this launch. The last CUDA block that calls it does so, when all others have read the
// counts. All threads must call it.
template <typename Segment, int capacity>
__device__ __forceinline__ void count_steps(const StepTable<Segment, capacity>& table) {
    if (table.finished == nullptr) return;
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence();
    if (atomicAdd(reinterpret_cast<unsigned long long*>(table.finished), 1ull) + 1 < gridDim.x) return;
    __threadfence();
    for (int i = 0; i < table.num_counted; ++i) {
        float* step = table.groups[i].step;
        if (step != nullptr) *step = next_count(*step, table.rounded_states);
    }
    *table.finished = 0;
}

}  // namespace ddpcore::cuda
