// The host side that all kernels share: from run-time arguments to compile-time ones, and the launch itself.
#pragma once

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "kernels.h"
#include "storage.cuh"

namespace ddpcore::cuda {

// CUDA 12.1 and newer pass this much by value in kernel arguments (sm_70 and newer). So tables of pointers need no
// buffer on the device, no copy and no cache that could go stale. A launch copies all of its arguments, used or not:
// hence a small and a large capacity for each table.
inline constexpr size_t kMaxArgumentBytes = 32764;

// One CUDA block for each kBlock elements up to here (268 million elements); beyond it each takes several in turn.
// Tests compile with a smaller one, so that every loop over blocks is seen to loop.
#ifndef DDPCORE_MAX_GRID
#define DDPCORE_MAX_GRID 65536
#endif
inline constexpr int64_t kMaxGrid = DDPCORE_MAX_GRID;

// The shared memory whose size the launch decides: 16-byte aligned, its contents undefined.
__device__ __forceinline__ uint4* dynamic_shared() {
    extern __shared__ uint4 shared[];
    return shared;
}

// Every launch goes through here: exactly `grid` CUDA blocks.
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
    // Takes its own error away, so that no later call reports it again. What another library has left pending is not
    // this launch's: to report it would tell of a failed step whose kernels run.
    if (error != cudaSuccess) cudaGetLastError();
    return error;
}

// For kernels whose CUDA blocks take blocks in turn (block += gridDim.x).
template <typename... Parameters, typename... Arguments>
cudaError_t launch(
    void (*kernel)(Parameters...), int64_t num_blocks, int threads, size_t shared_bytes, cudaStream_t stream,
    const Arguments&... arguments) {
    return launch_grid(kernel, std::min(num_blocks, kMaxGrid), threads, shared_bytes, stream, false, arguments...);
}

// How many CUDA blocks a multiprocessor of the device holds at once. Asked for once, then remembered.
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

// For such kernels whose CUDA blocks have something to do besides: no more of them than the device holds at once.
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

// For such kernels that wait for the whole grid too (cooperative_groups::this_grid().sync()): all CUDA blocks must be
// on the device at once.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_cooperative(
    void (*kernel)(Parameters...), int64_t num_blocks, int threads, size_t shared_bytes, cudaStream_t stream,
    const Arguments&... arguments) {
    return launch_resident(kernel, num_blocks, threads, shared_bytes, stream, true, arguments...);
}

// Calls fn with a null pointer of the storage type, so that fn's kernel is compiled for each.
template <typename Fn>
cudaError_t with_storage(DType dtype, Fn&& fn) {
    switch (dtype) {
        case DType::kFloat32: return fn(static_cast<float*>(nullptr));
        case DType::kBFloat16: return fn(static_cast<__nv_bfloat16*>(nullptr));
        case DType::kFloat16: return fn(static_cast<__half*>(nullptr));
    }
    return cudaErrorInvalidValue;
}

// The same for tensors that may have masters: fn.template operator()<T, Master>(). fp32 never has.
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
