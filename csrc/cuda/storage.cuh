// How a block of kBlock elements is spread over the threads of a CUDA block, and how elements are stored: fp32, bf16 or
// fp16 in memory, fp32 in arithmetic, rounded to nearest even on the way back.
//
// Each of the 256 threads holds a *share* of 16 elements: 4 vectors of 16 bytes in fp32, 2 in bf16 and fp16.
// Neighbouring threads hold neighbouring vectors, so a warp moves 512 bytes in a row with one instruction. A block that
// is incomplete or not aligned to 16 bytes moves the same elements of the same share one by one. So an element belongs
// to the same thread, at the same place of its share, either way, and a sum over the block has the same bits. That path
// issues four to eight times the instructions; its accesses still fall into the same cache lines.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../math.h"

namespace ddpcore::cuda {

inline constexpr int kWarp = 32;
inline constexpr int kThreads = 256;
inline constexpr int kShare = kBlock / kThreads;

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

template <typename T>
union Vector {
    __device__ __forceinline__ Vector() {}
    uint4 bits;
    T elements[kVector<T>];
};

// One thread's elements of a block, as they are stored: 16-bit types take half the registers until they are used.
template <typename T>
struct Share {
    static constexpr int kVectors = kShare / kVector<T>;
    Vector<T> vectors[kVectors];

    __device__ __forceinline__ T& operator[](int i) { return vectors[i / kVector<T>].elements[i % kVector<T>]; }
    __device__ __forceinline__ T operator[](int i) const { return vectors[i / kVector<T>].elements[i % kVector<T>]; }
};

// Where element i of this thread's share lies in the block.
template <typename T>
__device__ __forceinline__ int place_of(int i) {
    return (i / kVector<T> * kThreads + static_cast<int>(threadIdx.x)) * kVector<T> + i % kVector<T>;
}

// `whole`: the block is complete and 16-byte aligned. Places past the end read as zero, which adds nothing to a sum.
template <bool whole, typename T>
__device__ __forceinline__ void read(Share<T>& share, const T* block, int numel) {
    if constexpr (whole) {
        const uint4* source = reinterpret_cast<const uint4*>(block) + threadIdx.x;
#pragma unroll
        for (int i = 0; i < Share<T>::kVectors; ++i) share.vectors[i].bits = source[i * kThreads];
    } else {
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
            const int place = place_of<T>(i);
            share[i] = place < numel ? block[place] : store<T>(0.0f);
        }
    }
}

template <bool whole, typename T>
__device__ __forceinline__ void write(const Share<T>& share, T* block, int numel) {
    if constexpr (whole) {
        uint4* target = reinterpret_cast<uint4*>(block) + threadIdx.x;
#pragma unroll
        for (int i = 0; i < Share<T>::kVectors; ++i) target[i * kThreads] = share.vectors[i].bits;
    } else {
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
            const int place = place_of<T>(i);
            if (place < numel) block[place] = share[i];
        }
    }
}

// Whether 128-bit accesses may start here. A block starts a multiple of 16 bytes after its tensor, so it is enough to
// ask this of the tensor. A null pointer counts as aligned: nothing is read there.
DDPCORE_HOST_DEVICE bool is_aligned(const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % sizeof(uint4) == 0;
}

}  // namespace ddpcore::cuda
