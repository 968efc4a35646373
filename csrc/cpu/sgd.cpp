// sgd_step_: momentum SGD over a list of tensors. Traffic: 20 bytes a parameter in fp32 with momentum.
#include "sgd.h"

#include "kernels.h"

namespace ddpcore::cpu {

DDPCORE_CLONES void sgd_step_(const SgdArgs& args, int64_t begin_block, int64_t end_block) {
    const float grad = grad_factor(args.scaling);
    with_weights(args.dtype, args.masters, [&]<typename T, bool Master>() __attribute__((always_inline)) {
        for_each_part(
            args.segments, args.num_segments, begin_block, end_block, run_of(args, end_block - begin_block),
            [&](const SgdSegment& segment, int64_t first, int64_t last) __attribute__((always_inline)) {
                mix_part<T>(args, segment, first, last);
                const StepGroup& group = args.groups[segment.group];
                sgd_part<T, Master>(
                    segment, first, last, sgd_scales(args.rule, group, grad), sgd_flags(args.rule, group));
            });
    });
}

}  // namespace ddpcore::cpu
