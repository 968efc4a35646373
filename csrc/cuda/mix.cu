// mix_: weights <- self_weight * weights + sum_k peer_weights[k] * peers[k] + noise. Traffic with one peer: 12 bytes an
// element in fp32, 6 in bf16 and fp16; 4 or 2 more for each further peer.
// mix_stacked_: the same for a stack of learners on one device. Traffic: 8 bytes an element and learner in fp32, 4 in
// bf16 and fp16, and half as much for each entry that is a row of others. The numbers of instructions and of reads from
// shared memory are proportional to the number of entries.
#include "mix.cuh"

namespace ddpcore::cuda {

namespace {

template <bool whole, typename T, int capacity>
__device__ __forceinline__ void mix_block(
    const MixTable<capacity>& table, const Place& place, BlockSum<kThreads>& block_sum) {
    Share<T> weights;
    read<whole>(weights, static_cast<const T*>(table.source) + place.first, place.numel);
    mix_share<whole>(weights, table, place.first, place.numel, [&](int k, double sum) {
        const double total = block_sum(sum);
        if (threadIdx.x == 0) table.partials[place.block * table.num_peers + k] = total;
    });
    write<whole>(weights, static_cast<T*>(table.weights) + place.first, place.numel);
}

template <typename T, int capacity>
__global__ void __launch_bounds__(kThreads) mix_kernel(GRID_CONSTANT(MixTable<capacity>) table) {
    BlockSum<kThreads> block_sum;
    for (int64_t block = blockIdx.x; block < table.num_blocks; block += gridDim.x) {
        const Place place = place_of_block(table, block);
        if (table.aligned && place.numel == kBlock) {
            mix_block<true, T>(table, place, block_sum);
        } else {
            mix_block<false, T>(table, place, block_sum);
        }
    }
}

template <typename T, int capacity>
cudaError_t launch_mix(const MixArgs& args, cudaStream_t stream) {
    const MixTable<capacity> table = mix_table<capacity>(args);
    return launch(mix_kernel<T, capacity>, table.num_blocks, kThreads, 0, stream, table);
}

// A block of columns is processed in tiles. A tile holds the old rows of its columns in shared memory, in their storage
// type, so that no new row overwrites an old one that is still needed. Its vectors of 16 bytes are numbered row by row;
// thread t has vectors t, t + kThreads, ... of every tile.
inline constexpr int kTileBytes = 32768;
inline constexpr int kMaxColumns = 1024;
inline constexpr int kTileVectors = kTileBytes / static_cast<int>(sizeof(uint4)) / kThreads;  // vectors of a thread

template <typename T, int capacity>
struct StackedTable {
    T* weights;
    const int64_t* offsets;
    const int64_t* entry_columns;
    const float* entry_values;
    double* partials;
    int64_t numel;
    int64_t num_blocks;
    int num_learners;
    int columns;   // of a tile: a power of two that divides kBlock
    float share;   // 1 / num_learners
    bool aligned;  // all rows, also rows of others
    const void* others[capacity];

    DDPCORE_HOST_DEVICE int row_vectors() const { return columns / kVector<T>; }
    DDPCORE_HOST_DEVICE int num_vectors() const { return num_learners * row_vectors(); }
    DDPCORE_HOST_DEVICE int group() const { return row_vectors() < kWarp ? row_vectors() : kWarp; }
    // The number of sums of a row: one for each group of lanes.
    DDPCORE_HOST_DEVICE int num_row_sums() const { return row_vectors() / group(); }
    DDPCORE_HOST_DEVICE int sums_bytes() const {
        const int bytes = num_row_sums() * num_learners * static_cast<int>(sizeof(double));
        return (bytes + 15) / 16 * 16;
    }
    DDPCORE_HOST_DEVICE int tile_bytes() const { return num_learners * columns * static_cast<int>(sizeof(T)); }
    // At most 8 + 32 + 4 KiB. Up to 48 KiB need no attribute of the kernel.
    int shared_bytes() const { return sums_bytes() + tile_bytes() + columns * static_cast<int>(sizeof(float)); }
};

// Reads the tile that starts at column `first`. A thread issues all of its loads before its first store to shared
// memory.
template <bool whole, typename T, int capacity>
__device__ __forceinline__ void read_tile(Vector<T>* tile, const StackedTable<T, capacity>& table, int64_t first) {
    const int row_vectors = table.row_vectors(), num_vectors = table.num_vectors();
    Vector<T> staged[kTileVectors];
#pragma unroll
    for (int i = 0; i < kTileVectors; ++i) {
        const int index = i * kThreads + static_cast<int>(threadIdx.x);
        const int row = index / row_vectors;
        const int64_t column = first + index % row_vectors * kVector<T>;
        const T* source = table.weights + row * table.numel + column;
        if constexpr (whole) {
            if (index < num_vectors) staged[i].bits = *reinterpret_cast<const uint4*>(source);
        } else {
#pragma unroll
            for (int e = 0; e < kVector<T>; ++e) {
                const bool inside = index < num_vectors && column + e < table.numel;
                staged[i].elements[e] = inside ? source[e] : store<T>(0.0f);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kTileVectors; ++i) {
        const int index = i * kThreads + static_cast<int>(threadIdx.x);
        if (index < num_vectors) tile[index].bits = staged[i].bits;
    }
}

// The vector at `column` of a row of others.
template <typename T, int capacity>
__device__ __forceinline__ Vector<T> read_other(
    const StackedTable<T, capacity>& table, int64_t row, int64_t column, bool whole) {
    const T* source = static_cast<const T*>(table.others[row]) + column;
    Vector<T> result;
    if (whole) {
        result.bits = *reinterpret_cast<const uint4*>(source);
    } else {
#pragma unroll
        for (int e = 0; e < kVector<T>; ++e) {
            result.elements[e] = column + e < table.numel ? source[e] : store<T>(0.0f);
        }
    }
    return result;
}

// Vector v of row j of the mix, in the tile that starts at column `first`. The entries are added in their order.
template <typename T, int capacity>
__device__ __forceinline__ Vector<T> mix_row(
    const Vector<T>* tile, const StackedTable<T, capacity>& table, int64_t first, int j, int v, bool whole) {
    const int64_t begin = table.offsets[j], end = table.offsets[j + 1];
    float mixed[kVector<T>] = {};
    for (int64_t entry = begin; entry < end; ++entry) {
        const int64_t row = table.entry_columns[entry];
        const float value = table.entry_values[entry];
        const Vector<T> source = row < table.num_learners
                                     ? tile[row * table.row_vectors() + v]
                                     : read_other(table, row - table.num_learners, first + v * kVector<T>, whole);
#pragma unroll
        for (int e = 0; e < kVector<T>; ++e) {
            const float element = load(source.elements[e]);
            mixed[e] = entry == begin ? value * element : mix_element(mixed[e], value, element);
        }
    }
    Vector<T> result;
#pragma unroll
    for (int e = 0; e < kVector<T>; ++e) result.elements[e] = store<T>(mixed[e]);
    return result;
}

template <typename T, int capacity>
__device__ __forceinline__ void write_vector(
    const Vector<T>& vector, const StackedTable<T, capacity>& table, int j, int64_t column, bool whole) {
    T* target = table.weights + j * table.numel + column;
    if (whole) {
        __stwb(reinterpret_cast<uint4*>(target), vector.bits);  // nvcc splits an assignment into four stores of 4 bytes
    } else {
#pragma unroll
        for (int e = 0; e < kVector<T>; ++e) {
            if (column + e < table.numel) target[e] = vector.elements[e];
        }
    }
}

// Mixes one tile and adds each row's squared distance to the mean. One thread updates an element of row_sums, the same
// in every tile, so this needs no barrier.
template <typename T, int capacity>
__device__ __forceinline__ void mix_tile(
    const Vector<T>* tile, float* mean, double* row_sums, const StackedTable<T, capacity>& table, int64_t first,
    bool whole) {
    const int row_vectors = table.row_vectors(), num_vectors = table.num_vectors(), group = table.group();
    const T* elements = reinterpret_cast<const T*>(tile);
    for (int column = threadIdx.x; column < table.columns; column += kThreads) {
        float sum = 0.0f;
        for (int j = 0; j < table.num_learners; ++j) sum = sum + load(elements[j * table.columns + column]);
        mean[column] = table.share * sum;
    }
    __syncthreads();
    for (int start = 0; start < num_vectors;
         start += kThreads) {  // all threads have the same number of iterations, because they shuffle
        const int index = start + static_cast<int>(threadIdx.x);
        const int j = index / row_vectors, v = index % row_vectors;
        double sum = 0.0;
        if (index < num_vectors) {
            const Vector<T> own = tile[index];
#pragma unroll
            for (int e = 0; e < kVector<T>; ++e)
                sum = add_square(sum, load(own.elements[e]) - mean[v * kVector<T> + e]);
            write_vector(mix_row(tile, table, first, j, v, whole), table, j, first + v * kVector<T>, whole);
        }
        sum = warp_sum(sum, group);
        if (index < num_vectors && v % group == 0) row_sums[v / group * table.num_learners + j] += sum;
    }
}

template <typename T, int capacity>
__global__ void __launch_bounds__(kThreads) mix_stacked_kernel(GRID_CONSTANT(StackedTable<T, capacity>) table) {
    uint4* shared = dynamic_shared();
    double* row_sums = reinterpret_cast<double*>(shared);
    auto* tile = reinterpret_cast<Vector<T>*>(shared + table.sums_bytes() / sizeof(uint4));
    auto* mean = reinterpret_cast<float*>(tile + table.num_vectors());
    const int num_sums = table.num_row_sums();
    for (int64_t block = blockIdx.x; block < table.num_blocks; block += gridDim.x) {
        for (int i = threadIdx.x; i < num_sums * table.num_learners; i += kThreads) row_sums[i] = 0.0;
        const int64_t end = min((block + 1) * kBlock, table.numel);
        for (int64_t first = block * kBlock; first < end; first += table.columns) {
            const bool whole = table.aligned && first + table.columns <= table.numel;
            if (whole) {
                read_tile<true>(tile, table, first);
            } else {
                read_tile<false>(tile, table, first);
            }
            __syncthreads();
            mix_tile(tile, mean, row_sums, table, first, whole);
            __syncthreads();
        }
        for (int j = threadIdx.x; j < table.num_learners; j += kThreads) {
            double sum = row_sums[j];
            for (int i = 1; i < num_sums; ++i) sum += row_sums[i * table.num_learners + j];
            table.partials[block * table.num_learners + j] = sum;
        }
        __syncthreads();
    }
}

template <typename T, int capacity>
cudaError_t launch_mix_stacked(const StackedMixArgs& args, cudaStream_t stream) {
    StackedTable<T, capacity> table;
    table.weights = static_cast<T*>(args.weights);
    table.offsets = args.offsets;
    table.entry_columns = args.columns;
    table.entry_values = args.values;
    table.partials = args.partials;
    table.numel = args.numel;
    table.num_blocks = num_blocks_of(args.numel);
    table.num_learners = static_cast<int>(args.num_learners);
    table.columns = kMaxColumns;
    while (table.tile_bytes() > kTileBytes) table.columns /= 2;  // 8 columns of fp32 at kMaxLearners
    table.share = 1.0f / static_cast<float>(args.num_learners);
    std::copy(args.others, args.others + args.num_others, table.others);
    table.aligned = is_aligned(args.weights) && (args.num_learners == 1 || args.numel % kVector<T> == 0) &&
                    std::all_of(args.others, args.others + args.num_others, is_aligned);
    const auto bytes = static_cast<size_t>(table.shared_bytes());
    return launch(mix_stacked_kernel<T, capacity>, table.num_blocks, kThreads, bytes, stream, table);
}

}  // namespace

cudaError_t mix_(const MixArgs& args, cudaStream_t stream) {
    if (args.num_peers > kMaxPeers) return cudaErrorInvalidValue;
    const int64_t num_blocks = num_blocks_of(args.numel);
    if (num_blocks > 0) {
        const cudaError_t error = with_storage(args.dtype, [&](auto* tag) {
            using T = std::remove_pointer_t<decltype(tag)>;
            return with_peers(args.num_peers, [&]<int capacity>() { return launch_mix<T, capacity>(args, stream); });
        });
        if (error != cudaSuccess) return error;
    }
    return sum_partials(args.partials, args.sums, num_blocks, args.num_peers, stream);
}

cudaError_t mix_stacked_(const StackedMixArgs& args, cudaStream_t stream) {
    if (args.num_learners > kMaxLearners || args.num_others > kMaxPeers) return cudaErrorInvalidValue;
    const int64_t num_blocks = num_blocks_of(args.numel);
    if (num_blocks > 0 && args.num_learners > 0) {
        const cudaError_t error = with_storage(args.dtype, [&](auto* tag) {
            using T = std::remove_pointer_t<decltype(tag)>;
            return with_peers(
                args.num_others, [&]<int capacity>() { return launch_mix_stacked<T, capacity>(args, stream); });
        });
        if (error != cudaSuccess) return error;
    }
    return sum_partials(args.partials, args.sums, num_blocks, args.num_learners, stream);
}

}  // namespace ddpcore::cuda
