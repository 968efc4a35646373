// adamw_step_: Adam over a list of tensors in one pass. Traffic: 28 bytes a parameter in fp32 (read weight, gradient
// and both moments; write weight and moments), 20 with moments of bf16.
#include "adam.h"
#include "kernels.h"

namespace ddpcore::cpu {

namespace {

// The step with rounded states.
DDPCORE_INLINE void rounded_blocks(const AdamArgs& args, int64_t begin_block, int64_t end_block) {
    AdamGroupScales group_scales(args, args.rule);
    for_each_part(
        args.segments, args.num_segments, begin_block, end_block, 1,
        [&](const AdamSegment& segment, int64_t first, int64_t last) __attribute__((always_inline)) {
            const AdamScales scales = group_scales.of(segment.group);
            const float lr = lr_of(args.groups[segment.group]);
            WideBlock at(args, segment, first, last);
            at.step_moments(scales, draw_of(args, segment, first));
            DDPCORE_IVDEP
            for (int64_t i = 0; i < last - first; ++i) {
                const float update = adam_update(at.weights[i], at.exp_avg[i], at.exp_avg_sq[i], scales);
                at.weights[i] = adam_element(at.weights[i], update, lr, scales.keep);
            }
            narrow(args.dtype, segment.param, first, at.weights, last - first);
        });
}

}  // namespace

DDPCORE_CLONES void adamw_step_(const AdamArgs& args, int64_t begin_block, int64_t end_block) {
    if (args.rounded_states) return rounded_blocks(args, begin_block, end_block);
    AdamGroupScales group_scales(args, args.rule);
    with_weights(args.dtype, args.masters, [&]<typename T, bool Master>() __attribute__((always_inline)) {
        for_each_part(
            args.segments, args.num_segments, begin_block, end_block, end_block - begin_block,
            [&](const AdamSegment& segment, int64_t first, int64_t last) __attribute__((always_inline)) {
                const AdamScales scales = group_scales.of(segment.group);
                const float lr = lr_of(args.groups[segment.group]);
                step_part<T>(
                    args, segment, first, last, [&](int64_t begin, int64_t end) __attribute__((always_inline)) {
                        const AdamPlace<T, Master> at(segment, begin);
                        DDPCORE_IVDEP
                        for (int64_t i = 0; i < end - begin; ++i) {
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
    });
}

}  // namespace ddpcore::cpu
