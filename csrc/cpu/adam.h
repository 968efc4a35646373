// What adamw_step_ and lamb_step_ share.
#pragma once

#include "states.h"

namespace ddpcore::cpu {

// One part of a tensor.
template <typename T, bool Master>
struct AdamPlace {
    Weights<T, Master> weights;
    const T* grad;
    float* exp_avg;
    float* exp_avg_sq;

    DDPCORE_INLINE AdamPlace(const AdamSegment& segment, int64_t first)
        : weights{static_cast<T*>(segment.param) + first, Master ? segment.master + first : nullptr},
          grad(static_cast<const T*>(segment.grad) + first),
          exp_avg(static_cast<float*>(segment.exp_avg) + first),
          exp_avg_sq(static_cast<float*>(segment.exp_avg_sq) + first) {}
};

// The moments of a block whose states are rounded, in fp32.
struct WideMoments {
    float exp_avg[kBlock], exp_avg_sq[kBlock];
    int64_t numel;
    BFloat16 *stored, *stored_sq;

    DDPCORE_INLINE WideMoments(const AdamSegment& segment, int64_t first, int64_t last)
        : numel(last - first),
          stored(static_cast<BFloat16*>(segment.exp_avg) + first),
          stored_sq(static_cast<BFloat16*>(segment.exp_avg_sq) + first) {
        widen_states(stored, exp_avg, numel);
        widen_states(stored_sq, exp_avg_sq, numel);
    }
};

// All of such a block in fp32, so that the steps are compiled for one dtype.
struct WideBlock : WideMoments {
    float weights[kBlock], grads[kBlock];

    DDPCORE_INLINE WideBlock(const StepArgs<AdamSegment>& args, const AdamSegment& segment, int64_t first, int64_t last)
        : WideMoments(segment, first, last) {
        widen(args.dtype, segment.param, first, weights, numel);
        widen(args.dtype, segment.grad, first, grads, numel);
    }

    // Steps the moments. They are rounded before the update is formed of them, so that the passes of LAMB agree.
    DDPCORE_INLINE void step_moments(const AdamScales& scales, const Draw& draw) {
        DDPCORE_IVDEP
        for (int64_t i = 0; i < numel; ++i) adam_moments(weights[i], grads[i], exp_avg[i], exp_avg_sq[i], scales);
        round_states(draw, numel, exp_avg, stored, exp_avg_sq, stored_sq);
    }
};

// The scales of one group, cached: powers of beta are not computed for every block.
class AdamGroupScales {
  public:
    AdamGroupScales(const StepArgs<AdamSegment>& args, const AdamRule& rule)
        : groups_(args.groups), rule_(rule), grad_(grad_factor(args.scaling)) {}

    DDPCORE_INLINE const AdamScales& of(int64_t group) {
        if (group != group_) scales_ = adam_scales(rule_, groups_[group], grad_);
        group_ = group;
        return scales_;
    }

  private:
    const StepGroup* groups_;
    const AdamRule& rule_;
    float grad_;
    int64_t group_ = -1;
    AdamScales scales_{};
};

}  // namespace ddpcore::cpu
