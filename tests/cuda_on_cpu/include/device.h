// What the shadow headers need of the scheduler: where the running thread is, and the ways in which it waits.
#pragma once

#include <cstdint>

#include "cuda_runtime_api.h"

namespace cuda_on_cpu {

inline constexpr int kWarp = 32;

// Set anew before a thread runs on.
struct Position {
    uint3 thread, block;
    dim3 block_dim, grid_dim;
};
extern Position position;

struct Where {
    const char* file;
    int line;
};

enum class Meeting { kSyncWarp, kVote, kShuffle, kShuffleUp, kShuffleDown, kShuffleXor };

// What one lane brings to a meeting of the lanes of `mask`; all must bring the same meeting, mask and place.
struct LaneCall {
    Meeting meeting;
    unsigned mask;
    uint64_t value;
    int lane;   // of a shuffle: absolute, a distance, or a mask
    int width;  // of a shuffle
    Where where;
};

uint64_t meet_in_warp(const LaneCall& call);
int barrier(bool predicate, Where where);  // returns how many threads of the block brought a true one
void grid_barrier(Where where);
void may_switch();

}  // namespace cuda_on_cpu
