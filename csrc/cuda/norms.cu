// segment_norms: the sum of squares of each tensor of a list. Traffic: 4 bytes an element in fp32, 2 in bf16 and fp16.
#include "segments.cuh"
#include "sum.cuh"

namespace ddpcore::cuda {

namespace {

template <bool whole, typename T>
__device__ __forceinline__ double squares_of_share(const T* data, int numel) {
    Share<T> share;
    read<whole>(share, data, numel);
    double sum = 0.0;
#pragma unroll
    for (int i = 0; i < kShare; ++i) sum = add_square(sum, load(share[i]));
    return sum;
}

template <typename T, int capacity>
__global__ void __launch_bounds__(kThreads)
    norms_kernel(GRID_CONSTANT(SegmentTable<NormSegment, capacity>) table, double* partials) {
    BlockSum<kThreads> block_sum;
    for (int block = table.begin_block + static_cast<int>(blockIdx.x); block < table.end_block;
         block += static_cast<int>(gridDim.x)) {
        const NormSegment& segment = table.segment_of(block);
        const int64_t first = (block - segment.first_block) * kBlock;
        const int numel = static_cast<int>(min(kBlock, segment.numel - first));
        const T* data = static_cast<const T*>(segment.data) + first;
        const bool whole = numel == kBlock && is_aligned(data);
        const double total =
            block_sum(whole ? squares_of_share<true>(data, numel) : squares_of_share<false>(data, numel));
        if (threadIdx.x == 0) partials[block] = total;
    }
}

// One CUDA block a segment. The sum of an empty segment is zero.
template <int capacity>
__global__ void __launch_bounds__(kThreads) sum_segments_kernel(
    GRID_CONSTANT(SegmentTable<NormSegment, capacity>) table, const double* partials, double* sums) {
    const NormSegment& segment = table.segments[blockIdx.x];
    const int64_t num_rows = (segment.numel + kBlock - 1) / kBlock;
    const double total = sum_rows<kThreads>(partials + segment.first_block, num_rows, 1);
    if (threadIdx.x == 0) sums[table.first_segment + blockIdx.x] = total;
}

}  // namespace

namespace {

// Writes args.partials. After the launch of each chunk it calls sum(table).
template <typename Sum>
cudaError_t launch_norms(const NormArgs& args, cudaStream_t stream, Sum&& sum) {
    return for_each_chunk(args, [&]<int capacity>(const SegmentTable<NormSegment, capacity>& table) {
        const int64_t num_blocks = table.end_block - table.begin_block;
        if (num_blocks > 0) {
            const cudaError_t error = with_storage(args.dtype, [&](auto* tag) {
                using T = std::remove_pointer_t<decltype(tag)>;
                return launch(norms_kernel<T, capacity>, num_blocks, kThreads, 0, stream, table, args.partials);
            });
            if (error != cudaSuccess) return error;
        }
        return sum(table);
    });
}

}  // namespace

cudaError_t segment_norms(const NormArgs& args, cudaStream_t stream) {
    return launch_norms(args, stream, [&]<int capacity>(const SegmentTable<NormSegment, capacity>& table) {
        return launch_grid(
            sum_segments_kernel<capacity>, table.num_segments, kThreads, 0, stream, false, table, args.partials,
            args.sums);
    });
}

// Two launches for up to kManyNormSegments tensors.
cudaError_t total_norm_(const NormArgs& args, cudaStream_t stream) {
    const cudaError_t error = launch_norms(args, stream, [](const auto&) { return cudaSuccess; });
    return error == cudaSuccess ? sum_partials(args.partials, args.sums, args.num_blocks, 1, stream) : error;
}

}  // namespace ddpcore::cuda
