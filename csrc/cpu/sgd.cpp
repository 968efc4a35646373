// sgd_step_: momentum SGD over a list of tensors. Traffic: 20 bytes a parameter in fp32 with momentum, 16 with momentum
// of bf16.
#include "sgd.h"

#include "kernels.h"

namespace ddpcore::cpu {

DDPCORE_CLONES void sgd_step_(const SgdArgs& args, int64_t begin_block, int64_t end_block) {
    const float grad = grad_factor(args.scaling);
    with_stepped_weights(args, [&]<typename T, bool Master>() __attribute__((always_inline)) {
        for_each_part(
            args.segments, args.num_segments, begin_block, end_block, run_of(args, end_block - begin_block),
            [&](const SgdSegment& segment, int64_t first, int64_t last) __attribute__((always_inline)) {
                const StepGroup& group = args.groups[segment.group];
                const SgdScales scales = sgd_scales(args.rule, group, grad);
                const int flags = sgd_flags(args.rule, group);
                step_part<T>(
                    args, segment, first, last, [&](int64_t begin, int64_t end) __attribute__((always_inline)) {
                        sgd_part<T, Master>(args, segment, begin, end, scales, flags);
                    });
            });
    });
}

}  // namespace ddpcore::cpu
