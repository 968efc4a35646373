// How a block of kBlock elements is spread over the threads of a CUDA block, and how elements are stored: fp32, bf16 or
// fp16 in memory, fp32 in arithmetic, rounded to nearest even on the way back.
//
// Each of the 256 threads holds a *share* of 16 elements: 4 vectors of 16 bytes in fp32, 2 in bf16 and fp16.
// Neighbouring threads hold neighbouring vectors, so a warp moves 512 bytes in a row with one instruction. A block that
// is incomplete or not aligned to 16 bytes moves the same elements of the same share one by one. So an element belongs
// to the same thread, at the same place of its share, either way, and a sum over the block has the same bits. That path
// issues four to eight times the instructions; its accesses still fall into the same cache lines. Optimizers go through
// such a block in a loop over single elements instead: unrolled, it took more registers than the path that most blocks
// take, and a kernel has as many as its greediest path.
//
// Where 16-bit tensors have fp32 companions (masters, moments), vectors are 4 elements wide in all of them, 8 bytes in
// the 16-bit ones: so a thread holds the same elements of each.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>
#include <type_traits>

#include "../math.h"

namespace ddpcore::cuda {

inline constexpr int kWarp = 32;
inline constexpr int kThreads = 256;
inline constexpr int kShare = kBlock / kThreads;
// Elements of an incomplete or misaligned block that a thread loads before it uses the first of them. Loads cannot pass
// stores that may have the same address, so a loop that loads, updates and stores one element waits for memory each
// time.
inline constexpr int kAhead = 4;

template <typename T>
inline constexpr int kVector = sizeof(uint4) / sizeof(T);  // elements of one 128-bit access

__device__ __forceinline__ float load(float value) {
    return value;
}

__device__ __forceinline__ float load(__nv_bfloat16 value) {
    return __bfloat162float(value);
}

__device__ __forceinline__ float load(__half value) {
    return __half2float(value);
}

template <typename T>
__device__ T store(float value);

template <>
__device__ __forceinline__ float store<float>(float value) {
    return value;
}

template <>
__device__ __forceinline__ __nv_bfloat16 store<__nv_bfloat16>(float value) {
    return __float2bfloat16_rn(value);
}

template <>
__device__ __forceinline__ __half store<__half>(float value) {
    return __float2half_rn(value);
}

template <typename T, int width = kVector<T>>
union Vector {
    using Bits = std::conditional_t<width * sizeof(T) == sizeof(uint4), uint4, uint2>;
    static_assert(sizeof(Bits) == width * sizeof(T));

    __device__ __forceinline__ Vector() {}
    Bits bits;
    T elements[width];
};

// One thread's elements of a block, as they are stored: 16-bit types take half the registers until they are used.
template <typename T, int width = kVector<T>>
struct Share {
    static constexpr int kVectors = kShare / width;
    Vector<T, width> vectors[kVectors];

    __device__ __forceinline__ T& operator[](int i) { return vectors[i / width].elements[i % width]; }
    __device__ __forceinline__ T operator[](int i) const { return vectors[i / width].elements[i % width]; }
};

// Elements are converted after this call, not before: the compiler takes their bits for new ones. So no conversion
// moves out of a loop, where it would wait for memory ahead of the loop's own loads and, of 16-bit elements, take twice
// the registers.
template <typename T, int width>
__device__ __forceinline__ void convert_after(Share<T, width>& share) {
#pragma unroll
    for (auto& vector : share.vectors) {
        asm("" : "+r"(vector.bits.x), "+r"(vector.bits.y));
        if constexpr (sizeof(vector) == sizeof(uint4)) asm("" : "+r"(vector.bits.z), "+r"(vector.bits.w));
    }
}

// Where element i of this thread's share lies in the block.
template <int width>
__device__ __forceinline__ int place_of(int i) {
    return (i / width * kThreads + static_cast<int>(threadIdx.x)) * width + i % width;
}

// How many elements of this thread's share lie in a block of `numel` elements: they are its first ones. Elements are
// asked by this one number, because a flag for each of them would cost registers.
template <int width>
__device__ __forceinline__ int count_in(int numel) {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kShare; i += width) count += max(0, min(width, numel - place_of<width>(i)));
    return count;
}

// Whether the kernel touches the elements again. Those that it does not are the first to leave the L2 cache.
enum class Again { kYes, kNo };

// `whole`: the block is complete and 16-byte aligned. Places past the end read as zero, which adds nothing to a sum.
template <bool whole, Again again = Again::kYes, typename T, int width>
__device__ __forceinline__ void read(Share<T, width>& share, const T* block, int numel) {
    if constexpr (whole) {
        using Bits = typename Vector<T, width>::Bits;
        const Bits* source = reinterpret_cast<const Bits*>(block) + threadIdx.x;
#pragma unroll
        for (int i = 0; i < Share<T, width>::kVectors; ++i) {
            share.vectors[i].bits = again == Again::kYes ? source[i * kThreads] : __ldcs(source + i * kThreads);
        }
    } else {
        const int count = count_in<width>(numel);
#pragma unroll
        for (int i = 0; i < kShare; ++i) share[i] = i < count ? block[place_of<width>(i)] : store<T>(0.0f);
    }
}

template <bool whole, Again again = Again::kYes, typename T, int width>
__device__ __forceinline__ void write(const Share<T, width>& share, T* block, int numel) {
    if constexpr (whole) {
        using Bits = typename Vector<T, width>::Bits;
        Bits* target = reinterpret_cast<Bits*>(block) + threadIdx.x;
#pragma unroll
        for (int i = 0; i < Share<T, width>::kVectors; ++i) {
            if constexpr (again == Again::kYes) {
                target[i * kThreads] = share.vectors[i].bits;
            } else {
                __stcs(target + i * kThreads, share.vectors[i].bits);
            }
        }
    } else {
        const int count = count_in<width>(numel);
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
            if (i < count) block[place_of<width>(i)] = share[i];
        }
    }
}

// The fp32 weight behind a stored one. A master that no longer rounds to the stored weight is stale: somebody else has
// written the weight, and what was written counts. The conversion and the comparison hide behind the memory traffic.
template <typename T>
__device__ __forceinline__ float weight_of(T param, float master) {
    const T rounded = store<T>(master);
    uint16_t own, stored;
    static_assert(sizeof(T) == sizeof own);
    memcpy(&own, &rounded, sizeof own);
    memcpy(&stored, &param, sizeof stored);
    return own == stored ? master : load(param);
}

__device__ __forceinline__ float weight_of(float param, float) {
    return param;
}

// One thread's weights: the stored ones, or the fp32 weights behind them, where there are masters (which Master says).
template <typename T, bool Master, int width = Master ? kVector<float> : kVector<T>>
struct Weights {
    using Value = std::conditional_t<Master, float, T>;
    Share<Value, width> values;

    __device__ __forceinline__ float operator[](int i) const { return load(values[i]); }
    __device__ __forceinline__ void set(int i, float weight) { values[i] = store<Value>(weight); }
};

// Of a whole block. Masters are settled here, so that the stored weights need no registers afterwards.
template <Again again = Again::kYes, typename T, bool Master, int width>
__device__ __forceinline__ void read(Weights<T, Master, width>& weights, const T* param, const float* master) {
    if constexpr (Master) {
        Share<T, width> params;
        read<true, again>(params, param, kBlock);
        read<true, again>(weights.values, master, kBlock);
#pragma unroll
        for (int i = 0; i < kShare; ++i) weights.values[i] = weight_of(params[i], weights.values[i]);
    } else {
        read<true, again>(weights.values, param, kBlock);
    }
}

template <Again again = Again::kYes, typename T, bool Master, int width>
__device__ __forceinline__ void write(const Weights<T, Master, width>& weights, T* param, float* master) {
    if constexpr (Master) {
        Share<T, width> params;
#pragma unroll
        for (int i = 0; i < kShare; ++i) params[i] = store<T>(weights.values[i]);
        write<true, again>(params, param, kBlock);
        write<true, again>(weights.values, master, kBlock);
    } else {
        write<true, again>(weights.values, param, kBlock);
    }
}

// One weight of any block, as it is stored: a thread loads several before it converts the first of them.
template <typename T, bool Master>
struct StoredWeight {
    T param;
    float master;

    __device__ __forceinline__ float value() const { return Master ? weight_of(param, master) : load(param); }
};

template <bool Master, typename T>
__device__ __forceinline__ StoredWeight<T, Master> read_weight(const T* param, const float* master, int element) {
    return {param[element], Master ? master[element] : 0.0f};
}

template <bool Master, typename T>
__device__ __forceinline__ void write_weight(float weight, T* param, float* master, int element) {
    param[element] = store<T>(weight);
    if constexpr (Master) master[element] = weight;
}

// Whether 128-bit accesses may start here. A block starts a multiple of 16 bytes after its tensor, so it is enough to
// ask this of the tensor. A null pointer counts as aligned: nothing is read there.
DDPCORE_HOST_DEVICE bool is_aligned(const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % sizeof(uint4) == 0;
}

}  // namespace ddpcore::cuda
