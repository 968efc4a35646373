// Replaces CUDA's header of this name: the types and host functions that csrc/cuda and its tests use. Errors have
// CUDA's names and meanings; a stream runs its work at once, a graph keeps it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __launch_bounds__(...)
#define __forceinline__ inline  // and no more: sanitizers make functions long, and g++ takes twice the time
// At block scope thread_local means static, and `extern thread_local` is a declaration, as `extern __shared__` is. The
// scheduler gives each CUDA block its own contents of these variables; all fibers run on one thread.
#define __shared__ thread_local

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorCooperativeLaunchTooLarge = 720,
    cudaErrorNotSupported = 801,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorStreamCaptureInvalidated = 901,
    cudaErrorStreamCaptureImplicit = 906,
};

enum cudaMemcpyKind { cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum cudaGraphNodeType { cudaGraphNodeTypeKernel, cudaGraphNodeTypeMemcpy, cudaGraphNodeTypeMemset };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDeviceAttr {
    cudaDevAttrMaxSharedMemoryPerBlock,
    cudaDevAttrMaxSharedMemoryPerBlockOptin,
    cudaDevAttrMultiProcessorCount,
    cudaDevAttrL2CacheSize,
    cudaDevAttrCooperativeLaunch,
    cudaDevAttrSingleToDoublePrecisionPerfRatio,
};
inline constexpr unsigned cudaStreamDefault = 0, cudaStreamNonBlocking = 1;

struct uint3 {
    unsigned x, y, z;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) double2 {
    double x, y;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

using cudaStream_t = struct CUstream_st*;
using cudaGraph_t = struct CUgraph_st*;
using cudaGraphNode_t = struct CUgraphNode_st*;
using cudaGraphExec_t = struct CUgraphExec_st*;

enum cudaLaunchAttributeID { cudaLaunchAttributeCooperative = 2 };
union cudaLaunchAttributeValue {
    int cooperative;
};
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    unsigned numAttrs;
};

cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceSynchronize();

cudaError_t cudaMalloc(void** pointer, size_t bytes);
cudaError_t cudaFree(void* pointer);
cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(
    void* target, const void* source, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream = nullptr);
cudaError_t cudaMemset(void* target, int value, size_t bytes);
cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t stream = nullptr);
template <typename T>
cudaError_t cudaMalloc(T** pointer, size_t bytes) {
    return cudaMalloc(reinterpret_cast<void**>(pointer), bytes);
}

cudaError_t cudaStreamCreate(cudaStream_t* stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* num_nodes);
cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type);
cudaError_t cudaGraphKernelNodeGetAttribute(
    cudaGraphNode_t node, cudaLaunchAttributeID attribute, cudaLaunchAttributeValue* value);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags = 0);
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);

namespace cuda_on_cpu {

inline constexpr size_t kMaxArgumentBytes = 32764;

// `kernel` is for messages; `body` calls it, once for each CUDA thread.
cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, std::function<void()> body);
cudaError_t max_active_blocks(int* num_blocks, const void* kernel, int threads, size_t shared_bytes);
cudaError_t set_attribute(const void* kernel, cudaFuncAttribute attribute, int value);

// The values of a kernel's parameters. Of a reference, too, the launch keeps the value.
template <typename... Parameters>
using Values = std::tuple<std::remove_cvref_t<Parameters>...>;

}  // namespace cuda_on_cpu

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(
    const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&... arguments) {
    constexpr size_t bytes = (sizeof(Parameters) + ... + 0);
    static_assert(bytes <= cuda_on_cpu::kMaxArgumentBytes, "too much for kernel arguments");
    static_assert(
        (std::is_trivially_copyable_v<std::remove_cvref_t<Parameters>> && ...), "arguments are copied byte by byte");
    const auto values =
        std::make_shared<const cuda_on_cpu::Values<Parameters...>>(std::forward<Arguments>(arguments)...);
    return cuda_on_cpu::launch(
        *config, reinterpret_cast<const void*>(kernel), [kernel, values] { std::apply(kernel, *values); });
}

template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int* num_blocks, Kernel kernel, int threads, size_t shared_bytes) {
    return cuda_on_cpu::max_active_blocks(num_blocks, reinterpret_cast<const void*>(kernel), threads, shared_bytes);
}

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel kernel, cudaFuncAttribute attribute, int value) {
    return cuda_on_cpu::set_attribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
