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

inline constexpr int kFewSegments = 32;

template <typename Segment>
inline constexpr int kManySegments =
    (kMaxArgumentBytes - 128) / sizeof(Segment);  // 815 of SGD, 1359 of norms; 128 bytes for all other arguments

template <int capacity, typename Args, typename Fn>
cudaError_t launch_chunk(const Args& args, int64_t first, Fn&& fn) {
    using Segment = std::remove_cvref_t<decltype(args.segments[0])>;
    SegmentTable<Segment, capacity> table;
    const int64_t end = std::min(first + capacity, args.num_segments);
    table.begin_block = args.segments[first].first_block;
    table.end_block = end < args.num_segments ? args.segments[end].first_block : args.num_blocks;
    table.first_segment = first;
    table.num_segments = end - first;
    std::copy(args.segments + first, args.segments + end, table.segments);
    return fn.template operator()<capacity>(table);
}

// Calls fn.template operator()<capacity>(table) for each chunk of the segments of SgdArgs or NormArgs.
template <typename Args, typename Fn>
cudaError_t for_each_chunk(const Args& args, Fn&& fn) {
    constexpr int many = kManySegments<std::remove_cvref_t<decltype(args.segments[0])>>;
    for (int64_t first = 0; first < args.num_segments;) {
        const bool few = args.num_segments - first <= kFewSegments;
        const cudaError_t error =
            few ? launch_chunk<kFewSegments>(args, first, fn) : launch_chunk<many>(args, first, fn);
        if (error != cudaSuccess) return error;
        first += few ? kFewSegments : many;
    }
    return cudaSuccess;
}

}  // namespace ddpcore::cuda
