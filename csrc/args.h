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

// What may differ between the parameter groups of one step.
struct StepGroup {
    float lr;
    float weight_decay;
    const float* device_lr;  // not null: read instead of lr. On the device of the tensors, as all pointers here
    float* step;             // steps taken before this one; the step adds one. Null: the group keeps no count
    bool adapt;              // LARS and LAMB: whether the trust ratio is used
};

// What all gradients of a step are multiplied by, and whether the step happens at all. Pointers may be null.
struct GradScaling {
    const float* grad_scale;     // gradients are this many times too large (torch.amp.GradScaler)
    const float* found_inf;      // nonzero: the step changes nothing and is not counted
    const double* norm_squared;  // of all gradients as they are stored, for max_norm
    float max_norm;              // longer gradients are shortened to this norm; 0: never
    bool maximize;
};

// Hyperparameters of momentum SGD, named as in torch.optim.SGD.
struct SgdRule {
    float momentum;
    float one_minus_dampening;  // formed in double, then rounded: 1 - 0.9f would lose digits
    bool nesterov;
    bool decoupled;  // weight decay shrinks the weight itself instead of joining the gradient
};

// One tensor of an SGD or LARS step.
struct SgdSegment {
    void* param;
    const void* grad;
    void* momentum;  // null where SgdRule::momentum is zero; fp32 beside a master, else stored like param
    float* master;   // fp32 weights behind a 16-bit param; null without
    int64_t numel;
    int64_t first_block;  // sum of num_blocks_of() over the segments before this one
    int64_t group;        // ascending
};

// The tensors of a step; sgd_step_ takes no more than this.
struct SgdArgs {
    const SgdSegment* segments;  // host memory; a CUDA twin passes them on in kernel arguments
    int64_t num_segments;
    int64_t num_blocks;
    const StepGroup* groups;  // host memory
    int64_t num_groups;
    DType dtype;   // of params and gradients
    bool masters;  // all segments have one
    SgdRule rule;
    GradScaling scaling;
    uint64_t* tickets;  // CUDA: counters that are zero between steps [num_segments + 2]; null where no group counts
};

// What a trust ratio was formed of; one row a segment. Norms are of the tensor that is adapted.
struct Trust {
    double ratio;
    double weight_norm;
    double update_norm;  // LARS: of the gradient; LAMB: of the update
};

// Two sums of squares of each block: of the weights and of the gradient (LARS) or update (LAMB).
struct NormPartials {
    double weight;
    double update;
};

// Where the learning rate and the trust ratio R act:
enum class LarsVariant : int32_t {
    kYou2017,     // m = momentum*m + lr*R*(g + decay*w);  w -= m
    kScaledGrad,  // m = momentum*m + R*(g + decay*w);     w -= lr*m
    kScaledLr,    // m = momentum*m + (g + decay*w);       w -= lr*R*m
};

struct LarsRule {
    LarsVariant variant;
    float trust_coefficient;
    float eps;
};

struct LarsArgs {
    SgdArgs sgd;
    LarsRule rule;
    NormPartials* partials;  // scratch [num_blocks]
    Trust* trust;            // [num_segments], written
};

// Where LAMB's weight decay acts.
enum class LambDecay : int32_t {
    kInUpdate,   // u = ... + decay*w, so that it is part of what the trust ratio scales
    kCoupled,    // g + decay*w enters the moments
    kDecoupled,  // w *= 1 - lr*decay, outside of the trust ratio
};

// Hyperparameters of LAMB. Betas stay double: powers of them correct the bias.
struct LambRule {
    double beta1;
    double beta2;
    float eps;
    bool debias;
    LambDecay decay;
    float min_ratio, max_ratio;              // bounds of the trust ratio
    float min_weight_norm, max_weight_norm;  // bounds of phi(|w|)
};

struct LambSegment {
    void* param;
    const void* grad;
    float* exp_avg;
    float* exp_avg_sq;
    float* master;  // fp32 weights behind a 16-bit param; null without
    int64_t numel;
    int64_t first_block;
    int64_t group;
};

struct LambArgs {
    const LambSegment* segments;
    int64_t num_segments;
    int64_t num_blocks;
    const StepGroup* groups;  // every group counts its steps
    int64_t num_groups;
    DType dtype;
    bool masters;
    LambRule rule;
    GradScaling scaling;
    NormPartials* partials;  // scratch [num_blocks]
    Trust* trust;            // [num_segments], written
    uint64_t* tickets;       // as in SgdArgs
    float* updates;          // CPU: room for the updates of a batch of segments, kBlock a block; null: formed anew
    int64_t updates_block;   // first block of that batch
};

// std * the standard normals of random.h: element i of a tensor takes number first + i.
struct Noise {
    float std;  // 0: none
    uint64_t seed;
    uint64_t step;
    int64_t first;  // of the elements' numbers, not negative
};

// weights <- self_weight * weights + sum_k peer_weights[k] * peers[k] + noise, added in the order of k.
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
    Noise noise{};
    const void* source = nullptr;  // weights before the mix, which are not changed; null: they are in `weights`
};

// MixArgs followed by one SGD step on the mixed weights.
struct MixSgdArgs {
    MixArgs mix;
    const void* grad;
    void* momentum;  // null when rule.momentum is zero
    SgdRule rule;
    StepGroup group;
    bool maximize;
};

// weights <- matrix @ [weights; others] for a stack of learners, the matrix [num_learners, num_learners + num_others]
// in compressed rows. Row j adds the products of its entries in the order in which they stand; without entries it is
// zero.
struct StackedMixArgs {
    void* weights;              // [num_learners, numel], rows contiguous
    const void* const* others;  // host memory, num_others pointers to rows of the same dtype and numel
    int64_t num_others;
    const int64_t*
        offsets;  // [num_learners + 1]: where the entries of row j begin; as the next two on the weights' device
    const int64_t* columns;  // of each entry; from num_learners on a row of others
    const float* values;     // of each entry
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
    double* sums;      // [num_segments]; [1] of total_norm_
};

// Columns [first, first + numel) of every row.
struct NoiseSegment {
    int64_t first;
    int64_t numel;
    int64_t first_block;
};

// The inner products of rows x_i - origin, segment by segment. Each difference is rounded to fp32, so that the products
// are exact in double.
struct NoiseArgs {
    const void* const* rows;  // host memory, num_rows pointers of one dtype
    const void* origin;       // of the same; null: zero
    int64_t num_rows;
    const NoiseSegment* segments;  // host memory
    int64_t num_segments;
    int64_t num_blocks;
    DType dtype;
    double* partials;  // scratch [num_blocks, num_pairs_of(num_rows)]
    double* sums;      // [num_segments, num_rows, num_rows], symmetric
};

DDPCORE_HOST_DEVICE int64_t num_pairs_of(int64_t num_rows) {
    return num_rows * (num_rows + 1) / 2;
}

// Where the pair i <= j stands: (0, 0), (0, 1), ..., (1, 1), ...
DDPCORE_HOST_DEVICE int64_t pair_of(int64_t i, int64_t j, int64_t num_rows) {
    return i * num_rows - i * (i - 1) / 2 + (j - i);
}

// The segment that owns a block: the last one whose first_block is not above it. Empty segments own no block. An Index
// of 32 bits counts blocks of 8 tera-elements and takes half the instructions on a GPU.
template <typename Segment, typename Index>
DDPCORE_HOST_DEVICE Index segment_of_block(const Segment* segments, Index num_segments, Index block) {
    Index low = 0, high = num_segments - 1;
    while (low < high) {
        const Index middle = (low + high + 1) / 2;
        if (static_cast<Index>(segments[middle].first_block) <= block) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

}  // namespace ddpcore
