// Replaces CUDA's header of this name: the functions that csrc/cuda uses without an include. Every synchronization gets
// the source line of its call, so that threads at different lines are an error that names them.
#pragma once

#include <cmath>
#include <cstring>

#include "cuda_runtime_api.h"
#include "device.h"

inline const uint3& threadIdx = cuda_on_cpu::position.thread;
inline const uint3& blockIdx = cuda_on_cpu::position.block;
inline const dim3& blockDim = cuda_on_cpu::position.block_dim;
inline const dim3& gridDim = cuda_on_cpu::position.grid_dim;
inline constexpr int warpSize = cuda_on_cpu::kWarp;

// ---- barriers, shuffles, votes ----

#define CUDA_ON_CPU_WHERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(CUDA_ON_CPU_WHERE) {
    cuda_on_cpu::barrier(false, {file, line});
}
inline int __syncthreads_count(int predicate, CUDA_ON_CPU_WHERE) {
    return cuda_on_cpu::barrier(predicate != 0, {file, line});
}
inline int __syncthreads_or(int predicate, CUDA_ON_CPU_WHERE) {
    return cuda_on_cpu::barrier(predicate != 0, {file, line}) > 0;
}
inline int __syncthreads_and(int predicate, CUDA_ON_CPU_WHERE) {
    return cuda_on_cpu::barrier(predicate == 0, {file, line}) == 0;
}
inline void __syncwarp(unsigned mask = 0xffffffffu, CUDA_ON_CPU_WHERE) {
    cuda_on_cpu::operate_in_warp({cuda_on_cpu::WarpOperation::kSyncWarp, mask, 0, 0, warpSize, {file, line}});
}
inline unsigned __ballot_sync(unsigned mask, int predicate, CUDA_ON_CPU_WHERE) {
    return static_cast<unsigned>(cuda_on_cpu::operate_in_warp(
        {cuda_on_cpu::WarpOperation::kVote, mask, static_cast<uint64_t>(predicate != 0), 0, warpSize, {file, line}}));
}
inline int __any_sync(unsigned mask, int predicate, CUDA_ON_CPU_WHERE) {
    return __ballot_sync(mask, predicate, file, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, CUDA_ON_CPU_WHERE) {
    return __ballot_sync(mask, predicate, file, line) == mask;
}

namespace cuda_on_cpu {

template <typename T>
T shuffle(WarpOperation operation, unsigned mask, T value, int lane, int width, Where where) {
    static_assert(sizeof(T) <= sizeof(uint64_t) && std::is_trivially_copyable_v<T>);
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    bits = operate_in_warp({operation, mask, bits, lane, width, where});
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

}  // namespace cuda_on_cpu

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, int width = warpSize, CUDA_ON_CPU_WHERE) {
    return cuda_on_cpu::shuffle(cuda_on_cpu::WarpOperation::kShuffle, mask, value, lane, width, {file, line});
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize, CUDA_ON_CPU_WHERE) {
    return cuda_on_cpu::shuffle(
        cuda_on_cpu::WarpOperation::kShuffleUp, mask, value, static_cast<int>(delta), width, {file, line});
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize, CUDA_ON_CPU_WHERE) {
    return cuda_on_cpu::shuffle(
        cuda_on_cpu::WarpOperation::kShuffleDown, mask, value, static_cast<int>(delta), width, {file, line});
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = warpSize, CUDA_ON_CPU_WHERE) {
    return cuda_on_cpu::shuffle(cuda_on_cpu::WarpOperation::kShuffleXor, mask, value, lane_mask, width, {file, line});
}

// ---- atomics ----

// One thread runs at a time, so a plain update is atomic. Others may run before it.
namespace cuda_on_cpu {

template <typename T, typename Update>
T update(T* address, Update update) {
    may_switch();
    const T old = *address;
    *address = update(old);
    return old;
}

}  // namespace cuda_on_cpu

// clang-format off
template <typename T> T atomicAdd(T* address, std::type_identity_t<T> value) {
    return cuda_on_cpu::update(address, [=](T old) { return static_cast<T>(old + value); });
}
template <typename T> T atomicMax(T* address, std::type_identity_t<T> value) {
    return cuda_on_cpu::update(address, [=](T old) { return old < value ? value : old; });
}
template <typename T> T atomicMin(T* address, std::type_identity_t<T> value) {
    return cuda_on_cpu::update(address, [=](T old) { return value < old ? value : old; });
}
template <typename T> T atomicOr(T* address, std::type_identity_t<T> value) {
    return cuda_on_cpu::update(address, [=](T old) { return old | value; });
}
template <typename T> T atomicExch(T* address, std::type_identity_t<T> value) {
    return cuda_on_cpu::update(address, [=](T) { return value; });
}
template <typename T> T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
    return cuda_on_cpu::update(address, [=](T old) { return old == expected ? value : old; });
}
// clang-format on
inline unsigned atomicInc(unsigned* address, unsigned limit) {
    return cuda_on_cpu::update(address, [=](unsigned old) { return old >= limit ? 0u : old + 1u; });
}

inline void __threadfence() {
    cuda_on_cpu::may_switch();
}
inline void __threadfence_block() {
    cuda_on_cpu::may_switch();
}

// ---- loads and stores with a cache hint: plain ones ----

// clang-format off
template <typename T> T __ldg(const T* address) { return *address; }
template <typename T> T __ldca(const T* address) { return *address; }
template <typename T> T __ldcg(const T* address) { return *address; }
template <typename T> T __ldcs(const T* address) { return *address; }
template <typename T> T __ldcv(const T* address) { cuda_on_cpu::may_switch(); return *address; }
template <typename T> void __stcg(T* address, std::type_identity_t<T> value) { *address = value; }
template <typename T> void __stcs(T* address, std::type_identity_t<T> value) { *address = value; }
template <typename T> void __stwt(T* address, std::type_identity_t<T> value) { *address = value; }
template <typename T> void __stwb(T* address, std::type_identity_t<T> value) { *address = value; }

// ---- arithmetic; without contraction each of these rounds once ----

template <typename A, typename B> constexpr std::common_type_t<A, B> min(A a, B b) { return b < a ? b : a; }
template <typename A, typename B> constexpr std::common_type_t<A, B> max(A a, B b) { return a < b ? b : a; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }
inline float rsqrtf(float a) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(a))); }
inline double rsqrt(double a) { return 1.0 / std::sqrt(a); }
inline unsigned __float_as_uint(float a) { unsigned b; std::memcpy(&b, &a, sizeof b); return b; }
inline float __uint_as_float(unsigned a) { float b; std::memcpy(&b, &a, sizeof b); return b; }
inline int __popc(unsigned a) { return __builtin_popcount(a); }
inline int __clz(int a) { return a == 0 ? 32 : __builtin_clz(static_cast<unsigned>(a)); }
inline int __ffs(int a) { return __builtin_ffs(a); }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }
// clang-format on
