// The distribution of a block of kBlock elements over the threads of a CUDA block, and the storage of elements: fp32,
// bf16 or fp16 in memory, fp32 in arithmetic, rounded to nearest even when stored.
//
// Each of the 256 threads has a *share* of 16 elements: 4 vectors of 16 bytes in fp32, 2 in bf16 and fp16. Neighbouring
// threads have neighbouring vectors, so a warp reads or writes 512 consecutive bytes with one instruction. In a block
// that is incomplete or not aligned to 16 bytes, a thread reads and writes the elements of the same share one by one.
// So an element has the same thread and the same index in its share in both cases, and a sum over the block has the
// same bits. This path has four to eight times the instructions, but the same cache lines. Optimizers loop over the
// elements of such a block instead, because a kernel allocates the registers of its largest path. Unrolled, this path
// would need more registers than the path of complete blocks.
//
// If a 16-bit tensor has fp32 tensors of the same shape beside it (masters, moments), the vectors of all of them have 4
// elements, 8 bytes in the 16-bit tensor. So a thread has the same elements of each.
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

// One thread's elements of a block in their storage type. 16-bit elements take half the registers until they are
// converted.
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

// The index in the block of element i of this thread's share.
template <int width>
__device__ __forceinline__ int place_of(int i) {
    return (i / width * kThreads + static_cast<int>(threadIdx.x)) * width + i % width;
}

// The number of elements of this thread's share in a block of `numel` elements. They are the first ones of the share.
// One number takes fewer registers than a flag for each element.
template <int width>
__device__ __forceinline__ int count_in(int numel) {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kShare; i += width) count += max(0, min(width, numel - place_of<width>(i)));
    return count;
}

// Whether the kernel uses the elements again. If not, the L2 cache evicts them first.
enum class Again { kYes, kNo };

// Reads this thread's share. `whole`: the block is complete and 16-byte aligned. Elements past the end are zero.
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

// The fp32 weight of a stored weight and its master. A master that does not round to the stored weight is out of date,
// because other code has written the weight: then the stored weight is used.
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

// One thread's weights: the stored ones, or fp32 weights if there are masters (Master).
template <typename T, bool Master, int width = Master ? kVector<float> : kVector<T>>
struct Weights {
    using Value = std::conditional_t<Master, float, T>;
    Share<Value, width> values;

    __device__ __forceinline__ float operator[](int i) const { return load(values[i]); }
    __device__ __forceinline__ void set(int i, float weight) { values[i] = store<Value>(weight); }
};

// Reads the weights of a whole block. It chooses between master and stored weight, which then needs no register.
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

// One weight of any block in its storage type: a thread loads several before it converts the first of them.
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

// Whether 128-bit accesses are possible at this address. A block starts a multiple of 16 bytes after its tensor, so it
// is enough to check the tensor. A null pointer is aligned: nothing is read there.
DDPCORE_HOST_DEVICE bool is_aligned(const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % sizeof(uint4) == 0;
}

}  // namespace ddpcore::cuda
