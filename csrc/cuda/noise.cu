// noise_sums: the Gram matrix of a few rows for each segment. Traffic: 4 bytes an element of each row in fp32, 2 in
// bf16 and fp16, once for up to kTile rows. With more, a row is read again, from L2, for each kTile rows before it.
#include <cstdlib>

#include "segments.cuh"
#include "sum.cuh"

namespace ddpcore::cuda {

namespace {

// The rows whose shares a thread holds at a time. With three, only one CUDA block would fit on a multiprocessor.
inline constexpr int kTile = 2;
inline constexpr int kPairs = kTile * (kTile + 1) / 2;
inline constexpr int kSomeRows = 32;

template <int capacity, int max_rows>
struct GramTable {
    SegmentTable<GramSegment, capacity> list;
    const void* origin;
    double* partials;
    int32_t num_rows;
    bool aligned;  // all rows and the origin
    const void* rows[max_rows];
};

// A thread's sum of products in double.
struct DoubleSum {
    double value = 0.0;

    __device__ __forceinline__ void add(float left, float right) { value = add_product(value, left, right); }
    __device__ __forceinline__ double total() const { return value; }
};

// The same as a pair of fp32 numbers, without double instructions before total(). The head is the fp32 sum. The tail
// adds up what the head has rounded away, of products (by fmaf) and of sums (by Knuth's two-sum): Dot2 of Ogita, Rump
// and Oishi 2005, Accurate Sum and Dot Product, Algorithm 5.3. With the 16 products of a share the error is at most
// 2^-40 of the sum of their magnitudes, plus 2^-50 of the product of the largest values, because products underflow.
struct PairSum {
    float head = 0.0f, tail = 0.0f;

    __device__ __forceinline__ void add(float left, float right) {
        const float product = left * right, sum = head + product, added = sum - head;
        const float rounded = (head - (sum - added)) + (product - added);
        tail += rounded + fmaf(left, right, -product);
        head = sum;
    }
    __device__ __forceinline__ double total() const { return static_cast<double>(head) + static_cast<double>(tail); }
};

// A thread's share of a row. Sums of two shares may be a PairSum if both fit.
struct RowShare {
    float values[kShare];
    bool fits;
};

// Whether no sum of products overflows, and what underflows is small beside the largest. NaNs fit: their sums are NaN.
__device__ __forceinline__ bool fits_pairs(const float (&values)[kShare]) {
    float largest = 0.0f;
#pragma unroll
    for (const float value : values) largest = fmaxf(largest, fabsf(value));
    return largest == 0.0f || (largest >= 0x1p-48f && largest <= 0x1p60f);
}

// The shares of rows `row`, `row + 1`, ... less the origin, each difference rounded to fp32. All loads are issued
// before the first element is converted. Past the last row it reads that row again; its sums are not stored.
template <bool whole, typename T, bool kOrigin, bool kSlowDoubles, int count, typename Table>
__device__ __forceinline__ void read_rows(
    RowShare (&shares)[count], const Table& table, int row, int64_t first, int numel) {
    Share<T> rows[count], origin;
#pragma unroll
    for (int a = 0; a < count; ++a) {
        const void* data = table.rows[min(row + a, table.num_rows - 1)];
        read<whole>(rows[a], static_cast<const T*>(data) + first, numel);
    }
    if constexpr (kOrigin) read<whole>(origin, static_cast<const T*>(table.origin) + first, numel);
#pragma unroll
    for (int a = 0; a < count; ++a) {
        float (&values)[kShare] = shares[a].values;
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
            values[i] = load(rows[a][i]);
            if constexpr (kOrigin) values[i] -= load(origin[i]);
        }
        shares[a].fits = kSlowDoubles && fits_pairs(values);
    }
}

template <typename Sum>
__device__ __forceinline__ double sum_products(const RowShare& left, const RowShare& right) {
    Sum sum;
#pragma unroll
    for (int i = 0; i < kShare; ++i) sum.add(left.values[i], right.values[i]);
    return sum.total();
}

// It depends on these two rows alone, so a pair of rows has the bits that it has without the others.
__device__ __forceinline__ double product(const RowShare& left, const RowShare& right) {
    return left.fits && right.fits ? sum_products<PairSum>(left, right) : sum_products<DoubleSum>(left, right);
}

template <bool whole, typename T, bool kOrigin, bool kSlowDoubles, typename Table>
__device__ __forceinline__ void products_of_block(
    const Table& table, double* partials, int64_t first, int numel, BlockSums<kThreads, kPairs>& block_sums) {
    const int num_rows = table.num_rows;
#pragma unroll 1
    for (int tile = 0; tile < num_rows; tile += kTile) {
        RowShare own[kTile];
        read_rows<whole, T, kOrigin, kSlowDoubles>(own, table, tile, first, numel);
        double pairs[kPairs];  // in the order of pair_of
#pragma unroll
        for (int a = 0, pair = 0; a < kTile; ++a) {
#pragma unroll
            for (int b = a; b < kTile; ++b, ++pair) pairs[pair] = product(own[a], own[b]);
        }
        block_sums(pairs, [&](int b, double total) {
            int a = 0;
            for (; b >= kTile - a; ++a) b -= kTile - a;
            if (tile + a + b < num_rows) partials[pair_of(tile + a, tile + a + b, num_rows)] = total;
        });
#pragma unroll 1
        for (int row = tile + kTile; row < num_rows; ++row) {
            RowShare other[1];
            read_rows<whole, T, kOrigin, kSlowDoubles>(other, table, row, first, numel);
            double sums[kTile];
#pragma unroll
            for (int a = 0; a < kTile; ++a) sums[a] = product(own[a], other[0]);
            block_sums(sums, [&](int a, double total) { partials[pair_of(tile + a, row, num_rows)] = total; });
        }
    }
}

template <typename T, bool kOrigin, bool kSlowDoubles, typename Table>
__global__ void __launch_bounds__(kThreads, 2) gram_kernel(GRID_CONSTANT(Table) table) {
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
            products_of_block<true, T, kOrigin, kSlowDoubles>(
                table, partials, segment.first + begin, numel, block_sums);
        } else {
            products_of_block<false, T, kOrigin, kSlowDoubles>(
                table, partials, segment.first + begin, numel, block_sums);
        }
    }
}

// One CUDA block for each entry of each segment's matrix. The matrix of an empty segment is zero.
template <typename Table>
__global__ void __launch_bounds__(kThreads) sum_pairs_kernel(GRID_CONSTANT(Table) table, double* sums) {
    const int64_t num_rows = table.num_rows, num_pairs = num_pairs_of(num_rows);
    const int64_t index = blockIdx.x / (num_rows * num_rows), entry = blockIdx.x % (num_rows * num_rows);
    const int64_t i = min(entry / num_rows, entry % num_rows), j = max(entry / num_rows, entry % num_rows);
    const GramSegment& segment = table.list.segments[index];
    const double* partials = table.partials + segment.first_block * num_pairs + pair_of(i, j, num_rows);
    const double total = sum_rows<kThreads>(partials, (segment.numel + kBlock - 1) / kBlock, num_pairs);
    if (threadIdx.x == 0) sums[(table.list.first_segment + index) * num_rows * num_rows + entry] = total;
}

template <int capacity, int max_rows>
cudaError_t launch_gram(const GramArgs& args, bool slow_doubles, int64_t first, int64_t end, cudaStream_t stream) {
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
            auto kernel =
                args.origin == nullptr ? gram_kernel<T, false, false, Table> : gram_kernel<T, true, false, Table>;
            if (slow_doubles) {
                kernel =
                    args.origin == nullptr ? gram_kernel<T, false, true, Table> : gram_kernel<T, true, true, Table>;
            }
            return launch(kernel, num_blocks, kThreads, 0, stream, table);
        });
        if (error != cudaSuccess) return error;
    }
    const int64_t num_entries = (end - first) * args.num_rows * args.num_rows;
    return launch_grid(
        sum_pairs_kernel<GramTable<capacity, max_rows>>, num_entries, kThreads, 0, stream, false, table, args.sums);
}

}  // namespace

cudaError_t has_slow_doubles(bool* slow) {
    static const bool always = std::getenv("DDPCORE_SLOW_DOUBLES") != nullptr;
    int device = 0, ratio = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) {
        error = cudaDeviceGetAttribute(&ratio, cudaDevAttrSingleToDoublePrecisionPerfRatio, device);
    }
    *slow = always || ratio > 8;
    return error;
}

cudaError_t noise_sums(const GramArgs& args, cudaStream_t stream) {
    if (args.num_rows > kMaxRows) return cudaErrorInvalidValue;
    if (args.num_rows == 0) return cudaSuccess;
    bool slow_doubles = false;
    if (const cudaError_t error = has_slow_doubles(&slow_doubles); error != cudaSuccess) return error;
    constexpr int many = (kMaxArgumentBytes - kMaxRows * sizeof(void*) - 128) / sizeof(GramSegment);
    for (int64_t first = 0; first < args.num_segments;) {
        const auto launch_chunk = [&]<int capacity, int max_rows>() {
            const int64_t begin = std::exchange(first, std::min(args.num_segments, first + capacity));
            return launch_gram<capacity, max_rows>(args, slow_doubles, begin, first, stream);
        };
        const bool some = args.num_rows <= kSomeRows && args.num_segments - first <= kSomeSegments;
        const cudaError_t error = some ? launch_chunk.template operator()<kSomeSegments, kSomeRows>()
                                       : launch_chunk.template operator()<many, kMaxRows>();
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

}  // namespace ddpcore::cuda
