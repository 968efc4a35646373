// lars_step_: layer-wise adaptive SGD over a list of tensors. Two passes over each batch of tensors: norms, then the
// step. Traffic in fp32 with momentum: 20 bytes a parameter if the second pass finds weights and gradients in the
// cache, else 28; 4 less with momentum of bf16.
#include "kernels.h"
#include "sgd.h"

namespace ddpcore::cpu {

namespace {

template <bool kFused>
DDPCORE_INLINE void lars_norms_blocks(const LarsArgs& args, int64_t begin_block, int64_t end_block) {
    const SgdArgs& sgd = args.sgd;
    with_weights(sgd.dtype, sgd.masters, [&]<typename T, bool Master>() __attribute__((always_inline)) {
        for_each_part(
            sgd.segments, sgd.num_segments, begin_block, end_block, 1,
            [&](const SgdSegment& segment, int64_t first, int64_t last) __attribute__((always_inline)) {
                mix_part<T>(sgd, segment, first, last);
                const Weights<T, Master> weights{
                    static_cast<T*>(segment.param) + first, Master ? segment.master + first : nullptr};
                const T* grad = static_cast<const T*>(segment.grad) + first;
                args.partials[segment.first_block + first / kBlock] = sum_two_squares<kFused>(
                    last - first, [=](int64_t i, float& weight, float& gradient) __attribute__((always_inline)) {
                        weight = weights[i];
                        gradient = load(grad[i]);
                    });
            });
    });
}

}  // namespace

DDPCORE_FUSED_VERSIONS(lars_norms, lars_norms_blocks, LarsArgs)

void lars_trust(const LarsArgs& args, int64_t begin_segment, int64_t end_segment) {
    const float grad = grad_factor(args.sgd.scaling);
    for (int64_t index = begin_segment; index < end_segment; ++index) {
        const SgdSegment& segment = args.sgd.segments[index];
        const NormPartials squares =
            args.passes == Passes::kSecond
                ? args.squares[index]
                : sum_partials(args.partials + segment.first_block, num_blocks_of(segment.numel));
        args.trust[index] =
            ddpcore::lars_trust(args.rule, args.sgd.rule, args.sgd.groups[segment.group], grad, squares);
    }
}

DDPCORE_CLONES void lars_step_(const LarsArgs& args, int64_t begin_block, int64_t end_block) {
    const SgdArgs& sgd = args.sgd;
    const float grad = grad_factor(sgd.scaling);
    with_stepped_weights(sgd, [&]<typename T, bool Master>() __attribute__((always_inline)) {
        for_each_part_backwards(
            sgd.segments, sgd.num_segments, begin_block, end_block, run_of(sgd, kRun),
            [&](const SgdSegment& segment, int64_t first, int64_t last) __attribute__((always_inline)) {
                const StepGroup& group = sgd.groups[segment.group];
                const SgdScales scales = lars_scales(
                    sgd_scales(sgd.rule, group, grad), args.rule.variant, args.trust[&segment - sgd.segments].ratio);
                sgd_part<T, Master>(sgd, segment, first, last, scales, sgd_flags(sgd.rule, group));
            });
    });
}

}  // namespace ddpcore::cpu
