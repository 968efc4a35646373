// Streams and graphs. A graph keeps copies of kernel arguments, and pointers to all other data, as CUDA's does.
#include <set>
#include <vector>

#include "stream.h"

struct CUgraph_st {
    std::vector<CUgraphNode_st> nodes;  // each after the one before it
};
struct CUgraphExec_st {
    std::vector<CUgraphNode_st> nodes;
};
struct CUstream_st {
    std::unique_ptr<CUgraph_st> capture;
    bool invalidated = false;
};

namespace cuda_on_cpu {

namespace {

std::set<cudaStream_t> capturing;

cudaError_t invalidate(cudaError_t error) {
    for (CUstream_st* stream : capturing) stream->invalidated = true;
    return report(error);
}

}  // namespace

// The null stream waits for all other streams, which is not possible while one of them captures.
cudaError_t submit(cudaStream_t stream, CUgraphNode_st node) {
    if (stream != nullptr && stream->capture) {
        if (stream->invalidated) return report(cudaErrorStreamCaptureInvalidated);
        stream->capture->nodes.push_back(std::move(node));
        return cudaSuccess;
    }
    if (stream == nullptr && !capturing.empty()) return invalidate(cudaErrorStreamCaptureImplicit);
    node.work();
    return cudaSuccess;
}

cudaError_t refuse_while_capturing() {
    return capturing.empty() ? cudaSuccess : invalidate(cudaErrorStreamCaptureUnsupported);
}

}  // namespace cuda_on_cpu

using namespace cuda_on_cpu;

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    *stream = new CUstream_st;
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    capturing.erase(stream);
    delete stream;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) {
    return refuse_while_capturing();
}

cudaError_t cudaDeviceSynchronize() {
    return refuse_while_capturing();
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    if (stream == nullptr || stream->capture) return report(cudaErrorInvalidValue);
    stream->capture = std::make_unique<CUgraph_st>();
    stream->invalidated = false;
    capturing.insert(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    if (stream == nullptr || !stream->capture) return report(cudaErrorInvalidValue);
    capturing.erase(stream);
    const auto recorded = std::exchange(stream->capture, nullptr).release();
    *graph = stream->invalidated ? nullptr : recorded;
    if (*graph != nullptr) return cudaSuccess;
    delete recorded;
    return report(cudaErrorStreamCaptureInvalidated);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* num_nodes) {
    if (nodes == nullptr) {
        *num_nodes = graph->nodes.size();
        return cudaSuccess;
    }
    *num_nodes = std::min(*num_nodes, graph->nodes.size());
    for (size_t i = 0; i < *num_nodes; ++i) nodes[i] = &graph->nodes[i];
    return cudaSuccess;
}

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
    *type = node->type;
    return cudaSuccess;
}

cudaError_t cudaGraphKernelNodeGetAttribute(
    cudaGraphNode_t node, cudaLaunchAttributeID, cudaLaunchAttributeValue* value) {
    if (node->type != cudaGraphNodeTypeKernel) return report(cudaErrorInvalidValue);
    value->cooperative = node->cooperative ? 1 : 0;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
    *executable = new CUgraphExec_st{graph->nodes};
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
    for (const auto& node : executable->nodes) node.work();
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    delete executable;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}
