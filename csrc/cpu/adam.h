// What adamw_step_ and lamb_step_ share.
#pragma once

#include "dispatch.h"

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
          exp_avg(segment.exp_avg + first),
          exp_avg_sq(segment.exp_avg_sq + first) {}
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
