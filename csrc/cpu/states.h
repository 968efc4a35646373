// States that are stored in bf16 and rounded stochastically. A block of them is widened to fp32, stepped by the code
// for fp32 states, and rounded.
#pragma once

#include "dispatch.h"

namespace ddpcore::cpu {

// The place of a block among the random numbers.
struct Draw {
    uint64_t seed;
    uint64_t step;
    int64_t index;  // of the first element; a multiple of 4
};

template <typename Segment>
DDPCORE_INLINE Draw draw_of(const StepArgs<Segment>& args, const Segment& segment, int64_t first) {
    return {args.state_seed, step_of(args.groups[segment.group]), segment.first_index + first};
}

// Copies numel stored states to `values`.
void widen_states(const BFloat16* stored, float* values, int64_t numel);

// Copies elements [first, first + numel) of a weight or gradient to `values`, and back, rounded to nearest.
void widen(DType dtype, const void* data, int64_t first, float* values, int64_t numel);
void narrow(DType dtype, void* data, int64_t first, const float* values, int64_t numel);

// Rounds numel values of the first state, and of the second one unless it is null, and stores them. `first` and
// `second` then hold what is stored.
void round_states(
    const Draw& draw, int64_t numel, float* first, BFloat16* stored_first, float* second, BFloat16* stored_second);

}  // namespace ddpcore::cpu
