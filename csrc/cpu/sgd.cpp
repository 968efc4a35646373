// sgd_step_: momentum SGD over a list of tensors. Traffic: 20 bytes a parameter in fp32 with momentum.
#include "sgd.h"

#include <algorithm>

#include "kernels.h"

namespace ddpcore::cpu {

DDPCORE_CLONES void sgd_step_(const SgdArgs& args, int64_t begin_block, int64_t end_block) {
    if (begin_block >= end_block) return;
    with_storage(args.dtype, [&](auto* tag) __attribute__((always_inline)) {
        using T = std::remove_pointer_t<decltype(tag)>;
        with_sgd_flags(args.rule, [&]<int flags>() __attribute__((always_inline)) {
            int64_t index = segment_of_block(args.segments, args.num_segments, begin_block);
            for (int64_t block = begin_block; block < end_block; ++index) {
                const SgdSegment& segment = args.segments[index];
                const int64_t end = std::min(end_block, segment.first_block + num_blocks_of(segment.numel));
                if (end <= block) continue;
                const int64_t first = (block - segment.first_block) * kBlock;
                const int64_t last = std::min((end - segment.first_block) * kBlock, segment.numel);
                T* param = static_cast<T*>(segment.param) + first;
                T* momentum = segment.momentum ? static_cast<T*>(segment.momentum) + first : nullptr;
                const T* grad = static_cast<const T*>(segment.grad) + first;
                const SgdRule rule = args.rule;  // a copy: a store to param could otherwise change the rule
                DDPCORE_IVDEP
                for (int64_t i = 0; i < last - first; ++i) {
                    sgd_at<flags>(param, load(param[i]), grad, momentum, i, rule);
                }
                block = end;
            }
        });
    });
}

}  // namespace ddpcore::cpu
