// Work on a stream runs at once, or becomes a node of the graph that the stream captures.
#pragma once

#include "cuda_runtime_api.h"

struct CUgraphNode_st {
    cudaGraphNodeType type;
    bool cooperative;
    std::function<void()> work;
};

namespace cuda_on_cpu {

// Stores an error for cudaGetLastError.
cudaError_t report(cudaError_t error);

cudaError_t submit(cudaStream_t stream, CUgraphNode_st node);

// Allocation and waiting cannot be captured: during a capture they are an error, and the capture becomes invalid.
cudaError_t refuse_while_capturing();

}  // namespace cuda_on_cpu
