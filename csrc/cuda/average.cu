// average_: each block of rows <- its mean. Traffic: 8 bytes an element and row in fp32, 4 in bf16 and fp16.
#include "sum.cuh"

namespace ddpcore::cuda {

namespace {

inline constexpr int kFewAveraged = 16;  // rows of the small table

template <int capacity>
struct MeanTable {
    int64_t numel;       // of a row
    int64_t num_blocks;  // of a row
    int64_t size;
    int64_t num_rows;  // a multiple of size
    double* partials;  // of the first row and block
    int64_t num_sums;  // of a row of partials
    bool aligned;      // all rows
    void* rows[capacity];
};

// Averages the elements of a block of the rows from `own` on. Each thread adds its share of a row in fp32.
template <bool whole, typename T, int capacity>
__device__ __forceinline__ void average_block(
    const MeanTable<capacity>& table, int64_t own, int64_t block, int numel, BlockSum<kThreads>& block_sum) {
    const int64_t first = block * kBlock;
    float mean[kShare];
    Share<T> share;
    for (int64_t k = 0; k < table.size; ++k) {
        read<whole>(share, static_cast<const T*>(table.rows[own + k]) + first, numel);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
            const float value = load(share[i]);
            sum += value;
            mean[i] = k == 0 ? value : mean[i] + value;
        }
        const double total = block_sum(static_cast<double>(sum));
        if (threadIdx.x == 0) table.partials[block * table.num_sums + own + k] = total;
    }
    const auto divisor = static_cast<float>(table.size);
#pragma unroll
    for (int i = 0; i < kShare; ++i) share[i] = store<T>(mean[i] / divisor);
    for (int64_t k = 0; k < table.size; ++k) {
        write<whole>(share, static_cast<T*>(table.rows[own + k]) + first, numel);
    }
}

template <typename T, int capacity>
__global__ void __launch_bounds__(kThreads) average_kernel(GRID_CONSTANT(MeanTable<capacity>) table) {
    BlockSum<kThreads> block_sum;
    const int64_t num_parts = table.num_blocks * (table.num_rows / table.size);
    for (int64_t part = blockIdx.x; part < num_parts; part += gridDim.x) {
        const int64_t own = part / table.num_blocks * table.size, block = part % table.num_blocks;
        const int numel = static_cast<int>(min(kBlock, table.numel - block * kBlock));
        if (table.aligned && numel == kBlock) {
            average_block<true, T>(table, own, block, numel, block_sum);
        } else {
            average_block<false, T>(table, own, block, numel, block_sum);
        }
    }
}

template <typename T, int capacity>
cudaError_t launch_average(const AverageArgs& args, int64_t begin, int64_t end, cudaStream_t stream) {
    MeanTable<capacity> table;
    table.numel = args.numel;
    table.num_blocks = num_blocks_of(args.numel);
    table.size = args.size;
    table.num_rows = end - begin;
    table.partials = args.partials + begin;
    table.num_sums = args.num_rows;
    table.aligned = std::all_of(args.rows + begin, args.rows + end, is_aligned);
    std::copy(args.rows + begin, args.rows + end, table.rows);
    const int64_t num_parts = table.num_blocks * (table.num_rows / table.size);
    return launch(average_kernel<T, capacity>, num_parts, kThreads, 0, stream, table);
}

}  // namespace

// One launch for each kMaxAveraged rows, and one for the sums.
cudaError_t average_(const AverageArgs& args, cudaStream_t stream) {
    if (args.size > kMaxAveraged) return cudaErrorInvalidValue;
    const int64_t most = kMaxAveraged / args.size * args.size, num_blocks = num_blocks_of(args.numel);
    for (int64_t begin = 0; begin < args.num_rows && num_blocks > 0; begin += most) {
        const int64_t end = std::min(begin + most, args.num_rows);
        const cudaError_t error = with_storage(args.dtype, [&](auto* tag) {
            using T = std::remove_pointer_t<decltype(tag)>;
            if (end - begin <= kFewAveraged) return launch_average<T, kFewAveraged>(args, begin, end, stream);
            return launch_average<T, kMaxAveraged>(args, begin, end, stream);
        });
        if (error != cudaSuccess) return error;
    }
    return sum_partials(args.partials, args.sums, num_blocks, args.num_rows, stream);
}

}  // namespace ddpcore::cuda
