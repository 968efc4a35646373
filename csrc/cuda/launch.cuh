// Host code of all kernels: the launch, and the choice of a kernel by the dtype.
#pragma once

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "kernels.h"
#include "storage.cuh"

namespace ddpcore::cuda {

// The size of kernel arguments that drivers of CUDA 12.1 and newer accept (sm_70 and newer). So tables of pointers are
// arguments by value, and need no buffer on the device, no copy and no cache. A launch copies all of its arguments,
// used or not, so each table has several capacities.
inline constexpr size_t kMaxArgumentBytes = 32764;

// The largest grid. Up to here (268 million elements) a CUDA block processes one block of kBlock elements; in longer
// tensors it processes several. Tests compile with a smaller value, so that they run the loops over blocks.
#ifndef DDPCORE_MAX_GRID
#define DDPCORE_MAX_GRID 65536
#endif
inline constexpr int64_t kMaxGrid = DDPCORE_MAX_GRID;

// A large argument of a kernel, read where the launch left it. C++ passes it by reference (tests/cuda_on_cpu): a copy
// of up to 32 KiB for each thread would take most of the time.
#ifdef __CUDACC__
#define GRID_CONSTANT(...) const __grid_constant__ __VA_ARGS__
#else
#define GRID_CONSTANT(...) const __VA_ARGS__&
#endif

// The shared memory whose size is set at the launch: 16-byte aligned, not initialised.
__device__ __forceinline__ uint4* dynamic_shared() {
    extern __shared__ uint4 shared[];
    return shared;
}

// Launches exactly `grid` CUDA blocks. All other launch functions call this one.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_grid(
    void (*kernel)(Parameters...), int64_t grid, int threads, size_t shared_bytes, cudaStream_t stream,
    bool cooperative, const Arguments&... arguments) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(grid));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = cooperative ? 1 : 0;
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
    // Clears the error of this launch, so that no later call reports it again. A pending error of another library
    // stays: this launch has not failed.
    if (error != cudaSuccess) cudaGetLastError();
    return error;
}

// For kernels with a grid-stride loop over blocks (block += gridDim.x).
template <typename... Parameters, typename... Arguments>
cudaError_t launch(
    void (*kernel)(Parameters...), int64_t num_blocks, int threads, size_t shared_bytes, cudaStream_t stream,
    const Arguments&... arguments) {
    return launch_grid(kernel, std::min(num_blocks, kMaxGrid), threads, shared_bytes, stream, false, arguments...);
}

// The number of CUDA blocks that a multiprocessor can hold at once. The result is cached.
inline cudaError_t resident_blocks(int* count, int device, const void* kernel, int threads, size_t shared_bytes) {
    static std::mutex mutex;
    static std::map<std::tuple<int, const void*, int, size_t>, int> known;
    const std::lock_guard lock(mutex);
    int& entry = known[{device, kernel, threads, shared_bytes}];
    cudaError_t error = cudaSuccess;
    if (entry == 0) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&entry, kernel, threads, shared_bytes);
    *count = entry;
    return error;
}

// The same with at most as many CUDA blocks as the device can hold at once, for kernels with work for each CUDA block.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_resident(
    void (*kernel)(Parameters...), int64_t num_blocks, int threads, size_t shared_bytes, cudaStream_t stream,
    bool cooperative, const Arguments&... arguments) {
    int device = 0, multiprocessors = 0, blocks_each = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) {
        const void* address = reinterpret_cast<const void*>(kernel);
        error = resident_blocks(&blocks_each, device, address, threads, shared_bytes);
    }
    if (error != cudaSuccess) return error;
    const int64_t grid = std::min({num_blocks, kMaxGrid, static_cast<int64_t>(multiprocessors) * blocks_each});
    return launch_grid(kernel, grid, threads, shared_bytes, stream, cooperative, arguments...);
}

// The same as a cooperative launch, for kernels with a barrier of the whole grid
// (cooperative_groups::this_grid().sync()).
template <typename... Parameters, typename... Arguments>
cudaError_t launch_cooperative(
    void (*kernel)(Parameters...), int64_t num_blocks, int threads, size_t shared_bytes, cudaStream_t stream,
    const Arguments&... arguments) {
    return launch_resident(kernel, num_blocks, threads, shared_bytes, stream, true, arguments...);
}

// Calls fn with a null pointer whose type is the storage type, so that fn's kernel is compiled for each type.
template <typename Fn>
cudaError_t with_storage(DType dtype, Fn&& fn) {
    switch (dtype) {
        case DType::kFloat32: return fn(static_cast<float*>(nullptr));
        case DType::kBFloat16: return fn(static_cast<__nv_bfloat16*>(nullptr));
        case DType::kFloat16: return fn(static_cast<__half*>(nullptr));
    }
    return cudaErrorInvalidValue;
}

// Calls fn.template operator()<T, Master>() for tensors with or without masters. fp32 tensors have no masters.
template <typename Fn>
cudaError_t with_weights(DType dtype, bool masters, Fn&& fn) {
    switch (dtype) {
        case DType::kFloat32: return fn.template operator()<float, false>();
        case DType::kBFloat16:
            return masters ? fn.template operator()<__nv_bfloat16, true>()
                           : fn.template operator()<__nv_bfloat16, false>();
        case DType::kFloat16:
            return masters ? fn.template operator()<__half, true>() : fn.template operator()<__half, false>();
    }
    return cudaErrorInvalidValue;
}

}  // namespace ddpcore::cuda
