// noise_sums: the Gram matrix of a few rows for each segment. Traffic: 4 bytes an element of each row in fp32, 2 in
// bf16 and fp16, once for up to kTile rows. With more, a row is read again, from L2, for each kTile rows before it.
#include "segments.cuh"
#include "sum.cuh"

namespace ddpcore::cuda {

namespace {

// The rows whose shares a thread holds at a time. With three, only one CUDA block would fit on a multiprocessor.
inline constexpr int kTile = 2;
inline constexpr int kPairs = kTile * (kTile + 1) / 2;
inline constexpr int kSomeRows = 32;
inline constexpr int kOldSegments = 64;  // with kMaxRows rows, in kOldArgumentBytes

template <int capacity, int max_rows>
struct GramTable {
    SegmentTable<GramSegment, capacity> list;
    const void* origin;
    double* partials;
    int32_t num_rows;
    bool aligned;  // all rows and the origin
    const void* rows[max_rows];
};

// values[a] = this thread's share of row `row + a` less the origin, each difference rounded to fp32. All loads are
// issued before the first element is converted. Past the last row it reads that row again; its sums are not stored.
template <bool whole, typename T, bool kOrigin, int count, typename Table>
__device__ __forceinline__ void read_rows(
    float (&values)[count][kShare], const Table& table, int row, int64_t first, int numel) {
    Share<T> rows[count], origin;
#pragma unroll
    for (int a = 0; a < count; ++a) {
        const void* data = table.rows[min(row + a, table.num_rows - 1)];
        read<whole>(rows[a], static_cast<const T*>(data) + first, numel);
    }
    if constexpr (kOrigin) read<whole>(origin, static_cast<const T*>(table.origin) + first, numel);
#pragma unroll
    for (int a = 0; a < count; ++a) {
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
            values[a][i] = load(rows[a][i]);
            if constexpr (kOrigin) values[a][i] -= load(origin[i]);
        }
    }
}

// The products of a tile's rows with each other, in the order of pair_of.
__device__ __forceinline__ void products_of_tile(double (&sums)[kPairs], const float (&own)[kTile][kShare]) {
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
#pragma unroll
        for (int a = 0, pair = 0; a < kTile; ++a) {
#pragma unroll
            for (int b = a; b < kTile; ++b, ++pair) sums[pair] = add_product(sums[pair], own[a][i], own[b][i]);
        }
    }
}

// The products of a tile's rows with a row after the tile.
__device__ __forceinline__ void products_with_row(
    double (&sums)[kTile], const float (&own)[kTile][kShare], const float (&other)[kShare]) {
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
#pragma unroll
        for (int a = 0; a < kTile; ++a) sums[a] = add_product(sums[a], own[a][i], other[i]);
    }
}

template <bool whole, typename T, bool kOrigin, typename Table>
__device__ __forceinline__ void products_of_block(
    const Table& table, double* partials, int64_t first, int numel, BlockSums<kThreads, kPairs>& block_sums) {
    const int num_rows = table.num_rows;
#pragma unroll 1
    for (int tile = 0; tile < num_rows; tile += kTile) {
        float own[kTile][kShare];
        read_rows<whole, T, kOrigin>(own, table, tile, first, numel);
        double pairs[kPairs] = {};
        products_of_tile(pairs, own);
        block_sums(pairs, [&](int b, double total) {
            int a = 0;
            for (; b >= kTile - a; ++a) b -= kTile - a;
            if (tile + a + b < num_rows) partials[pair_of(tile + a, tile + a + b, num_rows)] = total;
        });
#pragma unroll 1
        for (int row = tile + kTile; row < num_rows; ++row) {
            float other[1][kShare];
            read_rows<whole, T, kOrigin>(other, table, row, first, numel);
            double sums[kTile] = {};
            products_with_row(sums, own, other[0]);
            block_sums(sums, [&](int a, double total) { partials[pair_of(tile + a, row, num_rows)] = total; });
        }
    }
}

template <typename T, bool kOrigin, typename Table>
__global__ void __launch_bounds__(kThreads, 2) gram_kernel(const __grid_constant__ Table table) {
    BlockSums<kThreads, kPairs> block_sums;
    const auto& list = table.list;
    for (int block = list.begin_block + static_cast<int>(blockIdx.x); block < list.end_block;
         block += static_cast<int>(gridDim.x)) {
        const GramSegment& segment = list.segment_of(block);
        const int64_t begin = (block - segment.first_block) * kBlock;
        const int numel = static_cast<int>(min(kBlock, segment.numel - begin));
        double* partials = table.partials + int64_t{block} * num_pairs_of(table.num_rows);
        const bool whole = numel == kBlock && table.aligned && segment.first % kVector<T> == 0;
        if (whole) {
            products_of_block<true, T, kOrigin>(table, partials, segment.first + begin, numel, block_sums);
        } else {
            products_of_block<false, T, kOrigin>(table, partials, segment.first + begin, numel, block_sums);
        }
    }
}

// One CUDA block for each entry of each segment's matrix. The matrix of an empty segment is zero.
template <typename Table>
__global__ void __launch_bounds__(kThreads) sum_pairs_kernel(const __grid_constant__ Table table, double* sums) {
    const int64_t num_rows = table.num_rows, num_pairs = num_pairs_of(num_rows);
    const int64_t index = blockIdx.x / (num_rows * num_rows), entry = blockIdx.x % (num_rows * num_rows);
    const int64_t i = min(entry / num_rows, entry % num_rows), j = max(entry / num_rows, entry % num_rows);
    const GramSegment& segment = table.list.segments[index];
    const double* partials = table.partials + segment.first_block * num_pairs + pair_of(i, j, num_rows);
    const double total = sum_rows<kThreads>(partials, (segment.numel + kBlock - 1) / kBlock, num_pairs);
    if (threadIdx.x == 0) sums[(table.list.first_segment + index) * num_rows * num_rows + entry] = total;
}

template <int capacity, int max_rows>
cudaError_t launch_gram(const GramArgs& args, int64_t first, int64_t end, cudaStream_t stream) {
    GramTable<capacity, max_rows> table;
    static_assert(sizeof table + sizeof(void*) <= kMaxArgumentBytes);
    fill_segments(table.list, args.segments, args.num_segments, args.num_blocks, first, end);
    table.num_rows = static_cast<int32_t>(args.num_rows);
    table.origin = args.origin;
    table.partials = args.partials;
    table.aligned = is_aligned(args.origin) && std::all_of(args.rows, args.rows + args.num_rows, is_aligned);
    std::copy(args.rows, args.rows + args.num_rows, table.rows);
    const int64_t num_blocks = table.list.end_block - table.list.begin_block;
    if (num_blocks > 0) {
        const cudaError_t error = with_storage(args.dtype, [&](auto* tag) {
            using T = std::remove_pointer_t<decltype(tag)>;
            using Table = GramTable<capacity, max_rows>;
            const auto kernel = args.origin == nullptr ? gram_kernel<T, false, Table> : gram_kernel<T, true, Table>;
            return launch(kernel, num_blocks, kThreads, 0, stream, table);
        });
        if (error != cudaSuccess) return error;
    }
    const int64_t num_entries = (end - first) * args.num_rows * args.num_rows;
    return launch_grid(
        sum_pairs_kernel<GramTable<capacity, max_rows>>, num_entries, kThreads, 0, stream, false, table, args.sums);
}

}  // namespace

cudaError_t noise_sums(const GramArgs& args, cudaStream_t stream) {
    if (args.num_rows > kMaxRows) return cudaErrorInvalidValue;
    if (args.num_rows == 0) return cudaSuccess;
    constexpr int many = (kMaxArgumentBytes - kMaxRows * sizeof(void*) - 128) / sizeof(GramSegment);
    static_assert(sizeof(GramTable<kSomeSegments, kSomeRows>) + sizeof(void*) <= kOldArgumentBytes);
    static_assert(sizeof(GramTable<kOldSegments, kMaxRows>) + sizeof(void*) <= kOldArgumentBytes);
    for (int64_t first = 0; first < args.num_segments;) {
        const auto launch_chunk = [&]<int capacity, int max_rows>() {
            const int64_t begin = std::exchange(first, std::min(args.num_segments, first + capacity));
            return launch_gram<capacity, max_rows>(args, begin, first, stream);
        };
        const bool large = has_large_arguments(), few_rows = args.num_rows <= kSomeRows;
        const bool some = few_rows && (!large || args.num_segments - first <= kSomeSegments);
        const cudaError_t error = some    ? launch_chunk.template operator()<kSomeSegments, kSomeRows>()
                                  : large ? launch_chunk.template operator()<many, kMaxRows>()
                                          : launch_chunk.template operator()<kOldSegments, kMaxRows>();
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

}  // namespace ddpcore::cuda
