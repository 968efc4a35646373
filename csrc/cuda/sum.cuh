// Sums in a fixed order, without atomics: the same bits on every run.
//
// The squares of a block are summed in double. In fp32 squares of small fp16 gradients underflow, and squares of large
// weights overflow. A long fp32 sum also loses the digits that a consensus distance needs. The cost is two double
// instructions an element: a conversion and a fused multiplication and addition. A100 and H100 run them at half the
// fp32 rate, faster than memory delivers the elements. T4 and RTX 4090 run two a clock and multiprocessor;
// docs/performance.md lists the kernels that they limit. noise.cu has another sum for such GPUs.
#pragma once

#include "launch.cuh"

namespace ddpcore::cuda {

// sum + left * right for fp32 values. Their product is exact in double, so one fused operation has the bits of a
// multiplication and an addition, with half the double instructions.
__device__ __forceinline__ double add_product(double sum, double left, double right) {
    return fma(left, right, sum);
}

__device__ __forceinline__ double add_square(double sum, float value) {
    return add_product(sum, value, value);
}

// The sum over each group of `width` lanes, by a tree. The first lane of the group gets the result.
__device__ __forceinline__ double warp_sum(double value, int width = kWarp) {
    for (int offset = width / 2; offset > 0; offset /= 2) {
        value += __shfl_down_sync(0xffffffffu, value, static_cast<unsigned>(offset), width);
    }
    return value;
}

__device__ __forceinline__ NormPartials warp_sum(const NormPartials& value) {
    return {warp_sum(value.weight), warp_sum(value.update)};
}

// Both sums over a warp, with little more than the work of one: after the first step each half of the warp has one of
// them. The sums have the bits of warp_sum. Lane 0 gets the left sum, lane 16 the right one.
__device__ __forceinline__ double warp_sums(double left, double right) {
    const bool low = threadIdx.x % kWarp < kWarp / 2;
    const double half = (low ? left : right) + __shfl_xor_sync(0xffffffffu, low ? right : left, kWarp / 2);
    return warp_sum(half, kWarp / 2);
}

// Sums over all threads of a CUDA block, of double or NormPartials. Two sets of slots alternate, so that one barrier a
// sum is enough: before a set is written again, all threads pass the barrier of the other set, and warp 0 has read this
// one.
template <int threads, typename Value = double>
class BlockSum {
  public:
    // Thread 0 gets the result. All threads must call it.
    __device__ __forceinline__ Value operator()(Value value) {
        constexpr int kWarps = threads / kWarp;
        __shared__ Value slots[2][kWarps];
        const int lane = threadIdx.x % kWarp;
        value = warp_sum(value);
        if (lane == 0) slots[parity_][threadIdx.x / kWarp] = value;
        __syncthreads();
        Value total{};
        if (threadIdx.x < kWarp) total = warp_sum(lane < kWarps ? slots[parity_][lane] : Value{});
        parity_ ^= 1;
        return total;
    }

  private:
    int parity_ = 0;
};

// Up to `most` such sums with one barrier, each with the bits of BlockSum. Warp w adds the slots of sum w.
template <int threads, int most>
class BlockSums {
  public:
    // Calls store(k, total) once for each sum k, in one thread. All threads must call it.
    template <int count, typename Store>
    __device__ __forceinline__ void operator()(const double (&values)[count], Store&& store) {
        static_assert(count <= most);
        constexpr int kWarps = threads / kWarp;
        __shared__ double slots[2][most][kWarps];
        const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
        for (int k = 0; k + 1 < count; k += 2) {
            const double sum = warp_sums(values[k], values[k + 1]);
            if (lane % (kWarp / 2) == 0) slots[parity_][k + lane / (kWarp / 2)][warp] = sum;
        }
        if (count % 2 == 1) {
            const double sum = warp_sum(values[count - 1]);
            if (lane == 0) slots[parity_][count - 1][warp] = sum;
        }
        __syncthreads();
        for (int k = warp; k < count; k += kWarps) {
            const double total = warp_sum(lane < kWarps ? slots[parity_][k][lane] : 0.0);
            if (lane == 0) store(k, total);
        }
        parity_ ^= 1;
    }

  private:
    int parity_ = 0;
};

// The sum of num_rows values at a distance of `stride`, in thread 0. Thread t adds rows t, t + threads, ... to four
// sums in turn. It loads sixteen rows before it adds the first: one CUDA block reads all rows, so many loads must
// overlap.
template <int threads>
__device__ __forceinline__ double sum_rows(const double* values, int64_t num_rows, int64_t stride) {
    constexpr int kUnroll = 16;
    double sums[4] = {};
#pragma unroll 1
    for (int64_t row = threadIdx.x; row < num_rows; row += kUnroll * threads) {
        double rows[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            const int64_t mine = row + i * threads;
            rows[i] = mine < num_rows ? values[mine * stride] : 0.0;
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) sums[i % 4] += rows[i];
    }
    BlockSum<threads> block_sum;
    return block_sum((sums[0] + sums[2]) + (sums[1] + sums[3]));
}

inline constexpr int kSumThreads = 1024;

// sums[column] = sum over rows of partials[row, column]. One CUDA block a column.
template <int threads>
__global__ void __launch_bounds__(threads, 1)
    sum_partials_kernel(const double* partials, double* sums, int64_t num_rows, int64_t num_columns) {
    if (blockIdx.x < num_columns) {
        const double total = sum_rows<threads>(partials + blockIdx.x, num_rows, num_columns);
        if (threadIdx.x == 0) sums[blockIdx.x] = total;
    }
}

// Reads 8 bytes for each 4096 elements and column. Without rows, the sums are zero.
inline cudaError_t sum_partials(
    const double* partials, double* sums, int64_t num_rows, int64_t num_columns, cudaStream_t stream) {
    if (num_columns == 0) return cudaSuccess;
    return launch_grid(
        sum_partials_kernel<kSumThreads>, num_columns, kSumThreads, 0, stream, false, partials, sums, num_rows,
        num_columns);
}

}  // namespace ddpcore::cuda
