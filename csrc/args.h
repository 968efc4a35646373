// What every kernel takes: plain structs over raw pointers, the same for the CPU and the CUDA twin. No torch here.
//
// A kernel walks *blocks* of kBlock consecutive elements, aligned to the start of each tensor. Blocks are the unit in
// which work is shared between threads and in which sums are formed, so a sum has the same bits for any number of
// threads and for a list of tensors as for one flat buffer that holds them.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define DDPCORE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define DDPCORE_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace ddpcore {

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16 };

inline constexpr int64_t kBlock = 4096;  // elements; 16 KiB of fp32, so a block and its partners stay in L1/L2

inline int64_t num_blocks_of(int64_t numel) {
    return (numel + kBlock - 1) / kBlock;
}

// Hyperparameters of momentum SGD, named as in torch.optim.SGD.
struct SgdRule {
    float lr;
    float momentum;
    float one_minus_dampening;  // formed in double, then rounded: 1 - 0.9f would lose digits
    float weight_decay;
    float grad_sign;  // -1 to maximize, else 1
    bool nesterov;
    bool first_step;  // the momentum buffer holds nothing yet: it becomes the gradient, undampened
};

// One tensor of an optimizer step. `momentum` is null when SgdRule::momentum is zero.
struct SgdSegment {
    void* param;
    const void* grad;
    void* momentum;
    int64_t numel;
    int64_t first_block;  // sum of num_blocks_of() over the segments before this one
};

struct SgdArgs {
    const SgdSegment* segments;  // host memory; a CUDA twin passes them on in kernel arguments
    int64_t num_segments;
    int64_t num_blocks;
    DType dtype;
    SgdRule rule;
};

// weights <- self_weight * weights + sum_k peer_weights[k] * peers[k], added in the order of k.
struct MixArgs {
    void* weights;
    const void* const* peers;   // host memory, num_peers pointers of the same dtype and numel as weights
    const float* peer_weights;  // host memory
    int64_t num_peers;
    float self_weight;
    int64_t numel;
    DType dtype;
    double* partials;  // scratch [num_blocks, num_peers]: one row a block
    double* sums;      // [num_peers]: squared distance of the weights (before mixing) to each peer
};

// MixArgs followed by one SGD step on the mixed weights.
struct MixSgdArgs {
    MixArgs mix;
    const void* grad;
    void* momentum;  // null when rule.momentum is zero
    SgdRule rule;
};

// weights <- matrix @ weights for a stack of learners; row j adds its own term first, then the others in ascending
// order.
struct StackedMixArgs {
    void* weights;        // [num_learners, numel], rows contiguous
    const float* matrix;  // [num_learners, num_learners]; on the device of the weights
    int64_t num_learners;
    int64_t numel;
    DType dtype;
    double* partials;  // scratch [num_blocks, num_learners]: one row a block
    double* sums;      // [num_learners]: squared distance of each learner (before mixing) to the mean
};

struct NormSegment {
    const void* data;
    int64_t numel;
    int64_t first_block;
};

struct NormArgs {
    const NormSegment* segments;  // host memory
    int64_t num_segments;
    int64_t num_blocks;
    DType dtype;
    double* partials;  // scratch [num_blocks]: sum of squares of each block
    double* sums;      // [num_segments]
};

// The segment that owns a block: the last one whose first_block is not above it. Empty segments own no block.
template <typename Segment>
DDPCORE_HOST_DEVICE int64_t segment_of_block(const Segment* segments, int64_t num_segments, int64_t block) {
    int64_t low = 0, high = num_segments - 1;
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (segments[middle].first_block <= block) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

}  // namespace ddpcore
