// The host side that all kernels share: from run-time arguments to compile-time ones, and the launch itself.
#pragma once

#include <algorithm>
#include <utility>

#include "kernels.h"
#include "storage.cuh"

namespace ddpcore::cuda {

// CUDA 12.1 and newer pass this much by value in kernel arguments (sm_70 and newer). So tables of pointers need no
// buffer on the device, no copy and no cache that could go stale. A launch copies all of its arguments, used or not:
// hence a small and a large capacity for each table.
inline constexpr size_t kMaxArgumentBytes = 32764;

// One CUDA block for each kBlock elements up to here (268 million elements); beyond it each takes several in turn.
inline constexpr int64_t kMaxGrid = 65536;

template <typename... Parameters, typename... Arguments>
cudaError_t launch(
    void (*kernel)(Parameters...), int64_t num_blocks, int threads, size_t shared_bytes, cudaStream_t stream,
    const Arguments&... arguments) {
    const auto grid = static_cast<unsigned>(std::min(num_blocks, kMaxGrid));
    kernel<<<grid, static_cast<unsigned>(threads), shared_bytes, stream>>>(arguments...);
    return cudaGetLastError();
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

}  // namespace ddpcore::cuda
