// How work gets onto a stream: done at once, or kept as a node of the graph that the stream records.
#pragma once

#include "cuda_runtime_api.h"

struct CUgraphNode_st {
    cudaGraphNodeType type;
    bool cooperative;
    std::function<void()> work;
};

namespace cuda_on_cpu {

// Keeps an error for cudaGetLastError.
cudaError_t report(cudaError_t error);

cudaError_t submit(cudaStream_t stream, CUgraphNode_st node);

// What allocates or waits is no work of a stream: during a capture it is an error, and the capture is lost.
cudaError_t refuse_while_capturing();

}  // namespace cuda_on_cpu
