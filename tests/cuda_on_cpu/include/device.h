// The functions of the scheduler for the headers in this folder: the index of the running thread, and synchronization.
#pragma once

#include <cstdint>

#include "cuda_runtime_api.h"

namespace cuda_on_cpu {

inline constexpr int kWarp = 32;

// Set before a thread continues.
struct Position {
    uint3 thread, block;
    dim3 block_dim, grid_dim;
};
extern Position position;

struct Where {
    const char* file;
    int line;
};

enum class WarpOperation { kSyncWarp, kVote, kShuffle, kShuffleUp, kShuffleDown, kShuffleXor };

// The call of one lane to an operation of the lanes of `mask`. All lanes must have the same operation, mask and place.
struct LaneCall {
    WarpOperation operation;
    unsigned mask;
    uint64_t value;
    int lane;   // of a shuffle: absolute, a distance, or a mask
    int width;  // of a shuffle
    Where where;
};

uint64_t operate_in_warp(const LaneCall& call);
int barrier(bool predicate, Where where);  // returns the number of threads of the block with a true predicate
void grid_barrier(Where where);
void may_switch();

}  // namespace cuda_on_cpu
