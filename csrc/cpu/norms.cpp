// segment_norms: the sum of squares of each tensor of a list, by blocks aligned to the start of the tensor.
#include <algorithm>

#include "dispatch.h"
#include "kernels.h"

namespace ddpcore::cpu {

DDPCORE_CLONES void segment_norms(const NormArgs& args, int64_t begin_block, int64_t end_block) {
    if (begin_block >= end_block) return;
    with_storage(args.dtype, [&](auto* tag) __attribute__((always_inline)) {
        using T = std::remove_pointer_t<decltype(tag)>;
        int64_t index = segment_of_block(args.segments, args.num_segments, begin_block);
        for (int64_t block = begin_block; block < end_block; ++block) {
            while (block >= args.segments[index].first_block + num_blocks_of(args.segments[index].numel)) ++index;
            const NormSegment& segment = args.segments[index];
            const int64_t first = (block - segment.first_block) * kBlock;
            const int64_t numel = std::min(kBlock, segment.numel - first);
            const T* data = static_cast<const T*>(segment.data) + first;
            double lanes[kLanes] = {};
            add_squares(lanes, numel, [=](int64_t i) __attribute__((always_inline)) { return load(data[i]); });
            args.partials[block] = sum_lanes(lanes);
        }
    });
}

// The same partial sums. The caller adds all of them.
void total_norm_(const NormArgs& args, int64_t begin_block, int64_t end_block) {
    segment_norms(args, begin_block, end_block);
}

}  // namespace ddpcore::cpu
