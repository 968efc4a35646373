// The arguments of the kernels: plain structs of raw pointers, the same for the CPU and the CUDA kernel. This file does
// not use torch.
//
// A kernel processes *blocks* of kBlock consecutive elements, aligned to the start of each tensor. Threads share the
// work by blocks, and sums are formed by blocks. So a sum has the same bits for any number of threads, and for a list
// of tensors as for one flat buffer that holds them.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define DDPCORE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define DDPCORE_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace ddpcore {

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16 };

inline constexpr int64_t kBlock = 4096;  // elements; 16 KiB of fp32, so a block of each tensor of a step stays in L1/L2

inline int64_t num_blocks_of(int64_t numel) {
    return (numel + kBlock - 1) / kBlock;
}

// The values that may differ between the parameter groups of one step.
struct StepGroup {
    float lr;
    float weight_decay;
    const float* device_lr;  // not null: used instead of lr. On the device of the tensors, as all pointers here
    float* step;             // number of steps before this one; the step adds one. Null: the group has no step count
    bool adapt;              // LARS and LAMB: whether the trust ratio is used
};

// The factors of all gradients of a step, and whether the step is skipped. Pointers may be null.
struct GradScaling {
    const float* grad_scale;     // gradients are this many times too large (torch.amp.GradScaler)
    const float* found_inf;      // nonzero: the step changes nothing and is not counted
    const double* norm_squared;  // squared norm of all gradients as they are stored, for max_norm
    float max_norm;              // gradients with a larger norm are scaled down to it; 0: no clipping
    bool maximize;
};

// Gaussian noise: element i of a tensor gets std * (standard normal number first + i of random.h).
struct Noise {
    float std;  // 0: no noise
    uint64_t seed;
    uint64_t step;
    int64_t first;  // number of element 0, not negative
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
    double* partials;  // scratch [num_blocks, num_peers]: one row a block; null before a step, which forms no distances
    double* sums;      // [num_peers]: squared distance of the weights before the mix to each peer
    Noise noise{};
    const void* source = nullptr;  // weights before the mix, only read; null: those in `weights`
};

// What the steps of all optimizers have in common.
template <typename Segment>
struct StepArgs {
    const Segment* segments;  // host memory; the CUDA kernels get them as kernel arguments
    int64_t num_segments;
    int64_t num_blocks;
    const StepGroup* groups;  // host memory
    int64_t num_groups;
    DType dtype;   // of params and gradients
    bool masters;  // whether the segments have masters: all or none
    GradScaling scaling;
    uint64_t*
        tickets;  // CUDA: counters that are zero between steps [num_segments + 2]; null if no group has a step count
    // Not null: the weights are averaged before the step. The params are places in mix->weights, and no segment has a
    // master. The averaged weights are rounded to their dtype, so that one pass has the bits of mix_ and then the step.
    const MixArgs* mix = nullptr;
    // Momentum and moments are bf16, and are rounded stochastically by random.h, with this seed, the step count of the
    // group (0 without one) and the index of the element. Then no segment has a master, and there is no mix.
    bool rounded_states = false;
    uint64_t state_seed = 0;
};

// Hyperparameters of momentum SGD, named as in torch.optim.SGD.
struct SgdRule {
    float momentum;
    float one_minus_dampening;  // computed in double, then rounded, because 1 - 0.9f loses digits
    bool nesterov;
    bool decoupled;  // weight decay multiplies the weight, and is not added to the gradient
};

// One tensor of an SGD or LARS step.
struct SgdSegment {
    void* param;
    const void* grad;
    void*
        momentum;  // null if SgdRule::momentum is zero; bf16 if states are rounded, fp32 beside a master, else as param
    union {
        float* master;        // fp32 copy of a 16-bit param, or null
        int64_t first_index;  // rounded states: index of element 0 among the random numbers, a multiple of 4
    };
    int64_t numel;
    int64_t first_block;  // sum of num_blocks_of() over the segments before this one
    int64_t group;        // ascending
};

// The arguments of sgd_step_, and of the SGD part of lars_step_.
struct SgdArgs : StepArgs<SgdSegment> {
    SgdRule rule;
};

// The steps of one pass, with the structs of their arguments. The headers of both backends declare them by this list,
// and the bindings run them by it.
#define DDPCORE_ONE_PASS_STEPS(STEP) \
    STEP(sgd_step_, SgdArgs)         \
    STEP(adamw_step_, AdamArgs)

// The trust ratio of a segment and the norms that it was computed from.
struct Trust {
    double ratio;
    double weight_norm;
    double update_norm;  // LARS: of the gradient; LAMB: of the update
};

// The sums of squares of one block: of the weights, and of the gradient (LARS) or update (LAMB).
struct NormPartials {
    double weight;
    double update;
};

// The passes of a call of LARS or LAMB. A step on shards has two calls, and the caller sums the squares of all shards
// between them.
enum class Passes : int32_t {
    kBoth,
    kFirst,   // writes the sums of squares, in LAMB also the moments
    kSecond,  // computes the trust ratios from the given sums of squares, and steps
};

// The place of the learning rate and of the trust ratio R in the step:
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
    Passes passes = Passes::kBoth;
    NormPartials* squares = nullptr;  // [num_segments], the sums between the passes; null with kBoth
};

// The place of weight decay in Adam and LAMB.
enum class AdamDecay : int32_t {
    kInUpdate,   // LAMB: u = ... + decay*w, which the trust ratio scales
    kCoupled,    // both moments take g + decay*w in place of g
    kDecoupled,  // w *= 1 - lr*decay, which the trust ratio does not scale
};

// Hyperparameters of Adam. Betas are double, because the bias correction uses powers of them.
struct AdamRule {
    double beta1;
    double beta2;
    float eps;
    bool debias;
    AdamDecay decay;
};

// One tensor of an Adam or LAMB step.
struct AdamSegment {
    void* param;
    const void* grad;
    void* exp_avg;  // fp32, or bf16 if states are rounded
    void* exp_avg_sq;
    union {
        float* master;        // fp32 copy of a 16-bit param, or null
        int64_t first_index;  // as in SgdSegment
    };
    int64_t numel;
    int64_t first_block;
    int64_t group;
};

// Every group has a step count.
struct AdamArgs : StepArgs<AdamSegment> {
    AdamRule rule;
};

struct LambRule : AdamRule {
    float min_ratio, max_ratio;              // bounds of the trust ratio
    float min_weight_norm, max_weight_norm;  // bounds of phi(|w|)
};

struct LambArgs : StepArgs<AdamSegment> {
    LambRule rule;
    NormPartials* partials;  // scratch [num_blocks]
    Trust* trust;            // [num_segments], written
    float* updates;          // CPU: buffer for the updates of a batch of segments, kBlock a block; null: computed again
    int64_t updates_block;   // first block of that batch
    Passes passes = Passes::kBoth;    // as in LarsArgs
    NormPartials* squares = nullptr;  // as in LarsArgs
};

// weights <- matrix @ [weights; others] for a stack of learners. The matrix [num_learners, num_learners + num_others]
// is sparse, in compressed rows. Row j is the sum of its entries' products in the order of the entries; zero without
// entries.
struct StackedMixArgs {
    void* weights;              // [num_learners, numel], rows contiguous
    const void* const* others;  // host memory, num_others pointers to rows of the same dtype and numel
    int64_t num_others;
    const int64_t*
        offsets;  // [num_learners + 1]: the first entry of each row; like the next two, on the device of the weights
    const int64_t* columns;  // of each entry; num_learners + k is row k of others
    const float* values;     // of each entry
    int64_t num_learners;
    int64_t numel;
    DType dtype;
    double* partials;  // scratch [num_blocks, num_learners]: one row a block; on the CPU null for no distances
    double* sums;      // [num_learners]: squared distance of each learner before the mix to the mean
};

// Each `size` consecutive rows <- their mean: added in ascending order in fp32, and divided by size. The sums of the
// rows before tell whether all their numbers are finite.
struct AverageArgs {
    void* const* rows;  // host memory, num_rows pointers of one dtype, which do not overlap
    int64_t num_rows;   // a multiple of size
    int64_t size;
    int64_t numel;  // of a row
    DType dtype;
    double* partials;  // scratch [num_blocks, num_rows]
    double* sums;      // [num_rows]
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
struct GramSegment {
    int64_t first;
    int64_t numel;
    int64_t first_block;
};

// The Gram matrix of the rows x_i - origin for each segment: sums[s, i, j] = <x_i - origin, x_j - origin> over segment
// s. Each difference is rounded to fp32, so that the products are exact in double.
struct GramArgs {
    const void* const* rows;  // host memory, num_rows pointers of one dtype
    const void* origin;       // of the same dtype and length; null: zero
    int64_t num_rows;
    const GramSegment* segments;  // host memory
    int64_t num_segments;
    int64_t num_blocks;
    DType dtype;
    double* partials;  // scratch [num_blocks, num_pairs_of(num_rows)]
    double* sums;      // [num_segments, num_rows, num_rows], symmetric
};

DDPCORE_HOST_DEVICE int64_t num_pairs_of(int64_t num_rows) {
    return num_rows * (num_rows + 1) / 2;
}

// The index of the pair i <= j in the order (0, 0), (0, 1), ..., (1, 1), ...
DDPCORE_HOST_DEVICE int64_t pair_of(int64_t i, int64_t j, int64_t num_rows) {
    return i * num_rows - i * (i - 1) / 2 + (j - i);
}

// The segment that holds a block: the last one with first_block <= block. Empty segments hold no block. A 32-bit Index
// is enough for 8 tera-elements, and takes half the instructions of a 64-bit one on a GPU.
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
