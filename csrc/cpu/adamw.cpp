// adamw_step_: Adam over a list of tensors in one pass. Traffic: 28 bytes a parameter in fp32 (read weight, gradient
// and both moments; write weight and moments).
#include "adam.h"
#include "kernels.h"

namespace ddpcore::cpu {

DDPCORE_CLONES void adamw_step_(const AdamArgs& args, int64_t begin_block, int64_t end_block) {
    AdamGroupScales group_scales(args, args.rule);
    with_weights(args.dtype, args.masters, [&]<typename T, bool Master>() __attribute__((always_inline)) {
        for_each_part(
            args.segments, args.num_segments, begin_block, end_block, run_of(args, end_block - begin_block),
            [&](const AdamSegment& segment, int64_t first, int64_t last) __attribute__((always_inline)) {
                mix_part<T>(args, segment, first, last);
                const AdamScales scales = group_scales.of(segment.group);
                const float lr = lr_of(args.groups[segment.group]);
                const AdamPlace<T, Master> at(segment, first);
                DDPCORE_IVDEP
                for (int64_t i = 0; i < last - first; ++i) {
                    const float weight = at.weights[i];
                    float exp_avg = at.exp_avg[i], exp_avg_sq = at.exp_avg_sq[i];
                    adam_moments(weight, load(at.grad[i]), exp_avg, exp_avg_sq, scales);
                    at.exp_avg[i] = exp_avg;
                    at.exp_avg_sq[i] = exp_avg_sq;
                    const float update = adam_update(weight, exp_avg, exp_avg_sq, scales);
                    at.weights.set(i, adam_element(weight, update, lr, scales.keep));
                }
            });
    });
}

}  // namespace ddpcore::cpu
