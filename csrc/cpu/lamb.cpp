// lamb_step_: layer-wise adaptive Adam over a list of tensors. Two passes over each batch of tensors: the moments and
// the norms, then the step, which computes the update again. Traffic in fp32: 28 bytes a parameter if the second pass
// finds weights and moments in the cache, else 40; with moments of bf16 20 and 28.
#include <optional>

#include "adam.h"
#include "kernels.h"

namespace ddpcore::cpu {

namespace {

template <bool kFused, bool kKeep, typename T, bool Master>
DDPCORE_INLINE void moments_of_blocks(const LambArgs& args, int64_t begin_block, int64_t end_block) {
    AdamGroupScales group_scales(args, args.rule);
    for_each_part(
        args.segments, args.num_segments, begin_block, end_block, 1,
        [&](const AdamSegment& segment, int64_t first, int64_t last) __attribute__((always_inline)) {
            mix_part<T>(args, segment, first, last);
            const AdamScales scales = group_scales.of(segment.group);
            const AdamPlace<T, Master> at(segment, first);
            const int64_t block = segment.first_block + first / kBlock;
            float* updates = kKeep ? args.updates + (block - args.updates_block) * kBlock : nullptr;
            args.partials[block] = sum_two_squares<kFused>(
                last - first, [=](int64_t i, float& weight, float& update) __attribute__((always_inline)) {
                    weight = at.weights[i];
                    float exp_avg = at.exp_avg[i], exp_avg_sq = at.exp_avg_sq[i];
                    adam_moments(weight, load(at.grad[i]), exp_avg, exp_avg_sq, scales);
                    at.exp_avg[i] = exp_avg;
                    at.exp_avg_sq[i] = exp_avg_sq;
                    update = adam_update(weight, exp_avg, exp_avg_sq, scales);
                    if constexpr (kKeep) updates[i] = update;
                });
        });
}

// The same with rounded states.
template <bool kFused>
DDPCORE_INLINE void rounded_moments_of_blocks(const LambArgs& args, int64_t begin_block, int64_t end_block) {
    AdamGroupScales group_scales(args, args.rule);
    for_each_part(
        args.segments, args.num_segments, begin_block, end_block, 1,
        [&](const AdamSegment& segment, int64_t first, int64_t last) __attribute__((always_inline)) {
            const AdamScales scales = group_scales.of(segment.group);
            WideBlock at(args, segment, first, last);
            at.step_moments(scales, draw_of(args, segment, first));
            const int64_t block = segment.first_block + first / kBlock;
            float* updates = args.updates ? args.updates + (block - args.updates_block) * kBlock : at.grads;
            args.partials[block] = sum_two_squares<kFused>(
                last - first, [&](int64_t i, float& weight, float& update) __attribute__((always_inline)) {
                    weight = at.weights[i];
                    updates[i] = update = adam_update(weight, at.exp_avg[i], at.exp_avg_sq[i], scales);
                });
        });
}

template <bool kFused>
DDPCORE_INLINE void lamb_moments_blocks(const LambArgs& args, int64_t begin_block, int64_t end_block) {
    if (args.rounded_states) return rounded_moments_of_blocks<kFused>(args, begin_block, end_block);
    with_weights(args.dtype, args.masters, [&]<typename T, bool Master>() __attribute__((always_inline)) {
        if (args.updates != nullptr) {
            moments_of_blocks<kFused, true, T, Master>(args, begin_block, end_block);
        } else {
            moments_of_blocks<kFused, false, T, Master>(args, begin_block, end_block);
        }
    });
}

}  // namespace

DDPCORE_FUSED_VERSIONS(lamb_moments_, lamb_moments_blocks, LambArgs)

void lamb_trust(const LambArgs& args, int64_t begin_segment, int64_t end_segment) {
    for (int64_t index = begin_segment; index < end_segment; ++index) {
        const AdamSegment& segment = args.segments[index];
        const NormPartials squares =
            args.passes == Passes::kSecond
                ? args.squares[index]
                : sum_partials(args.partials + segment.first_block, num_blocks_of(segment.numel));
        args.trust[index] = ddpcore::lamb_trust(args.rule, args.groups[segment.group], squares);
    }
}

DDPCORE_CLONES void lamb_step_(const LambArgs& args, int64_t begin_block, int64_t end_block) {
    AdamGroupScales group_scales(args, args.rule);
    with_weights(args.dtype, args.masters, [&]<typename T, bool Master>() __attribute__((always_inline)) {
        for_each_part_backwards(
            args.segments, args.num_segments, begin_block, end_block, args.rounded_states ? 1 : kRun,
            [&](const AdamSegment& segment, int64_t first, int64_t last) __attribute__((always_inline)) {
                const StepGroup& group = args.groups[segment.group];
                const AdamScales scales = group_scales.of(segment.group);
                const float step_size = lamb_step_size(group, args.trust[&segment - args.segments]);
                const AdamPlace<T, Master> at(segment, first);
                const int64_t block = segment.first_block + first / kBlock;
                if (args.updates != nullptr) {
                    const float* updates = args.updates + (block - args.updates_block) * kBlock;
                    DDPCORE_IVDEP
                    for (int64_t i = 0; i < last - first; ++i) {
                        at.weights.set(i, adam_element(at.weights[i], updates[i], step_size, scales.keep));
                    }
                    return;
                }
                const float *exp_avg = at.exp_avg, *exp_avg_sq = at.exp_avg_sq;
                std::optional<WideMoments> wide;
                if (args.rounded_states) {
                    wide.emplace(segment, first, last);
                    exp_avg = wide->exp_avg;
                    exp_avg_sq = wide->exp_avg_sq;
                }
                DDPCORE_IVDEP
                for (int64_t i = 0; i < last - first; ++i) {
                    const float weight = at.weights[i];
                    const float update = adam_update(weight, exp_avg[i], exp_avg_sq[i], scales);
                    at.weights.set(i, adam_element(weight, update, step_size, scales.keep));
                }
            });
    });
}

}  // namespace ddpcore::cpu
