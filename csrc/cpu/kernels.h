// The CPU kernels: functions of a range of blocks. The caller distributes the ranges over threads. Kernels with sums
// write one row of partial sums a block; after all ranges, the caller adds them with sum_partials, in the order of the
// blocks.
#pragma once

#include "../args.h"

namespace ddpcore::cpu {

#define DDPCORE_DECLARE(name, Args) void name(const Args& args, int64_t begin_block, int64_t end_block);
DDPCORE_ONE_PASS_STEPS(DDPCORE_DECLARE)
#undef DDPCORE_DECLARE
void mix_(const MixArgs& args, int64_t begin_block, int64_t end_block);
void mix_stacked_(const StackedMixArgs& args, int64_t begin_block, int64_t end_block);
void average_(const AverageArgs& args, int64_t begin_block, int64_t end_block);
void segment_norms(const NormArgs& args, int64_t begin_block, int64_t end_block);
void total_norm_(const NormArgs& args, int64_t begin_block, int64_t end_block);
void noise_sums(const GramArgs& args, int64_t begin_block, int64_t end_block);

// Averages elements [first, last) of the row, and forms no distances. The steps call it for each part of a tensor,
// which is then in the cache.
void mix_elements(const MixArgs& args, int64_t first, int64_t last);

// A step of LARS or LAMB: first pass, trust ratios and second pass over a batch of whole segments, in this order.
void lars_norms(const LarsArgs& args, int64_t begin_block, int64_t end_block);
void lars_trust(const LarsArgs& args, int64_t begin_segment, int64_t end_segment);
void lars_step_(const LarsArgs& args, int64_t begin_block, int64_t end_block);
void lamb_moments_(const LambArgs& args, int64_t begin_block, int64_t end_block);
void lamb_trust(const LambArgs& args, int64_t begin_segment, int64_t end_segment);
void lamb_step_(const LambArgs& args, int64_t begin_block, int64_t end_block);

// sums[column] = sum over rows of partials[row, column], in the order of the rows.
inline void sum_partials(const double* partials, double* sums, int64_t num_rows, int64_t num_columns) {
    for (int64_t column = 0; column < num_columns; ++column) sums[column] = 0.0;
    for (int64_t row = 0; row < num_rows; ++row) {
        for (int64_t column = 0; column < num_columns; ++column) sums[column] += partials[row * num_columns + column];
    }
}

inline NormPartials sum_partials(const NormPartials* partials, int64_t num_rows) {
    NormPartials sums{0.0, 0.0};
    for (int64_t row = 0; row < num_rows; ++row) {
        sums.weight += partials[row].weight;
        sums.update += partials[row].update;
    }
    return sums;
}

// Computes args.sums from args.partials: adds each pair in the order of the blocks, and writes both triangles.
inline void sum_pairs(const GramArgs& args) {
    const int64_t n = args.num_rows, num_pairs = num_pairs_of(n);
    for (int64_t s = 0; s < args.num_segments; ++s) {
        const GramSegment& segment = args.segments[s];
        const double* partials = args.partials + segment.first_block * num_pairs;
        double* sums = args.sums + s * n * n;
        for (int64_t i = 0; i < n; ++i) {
            for (int64_t j = i; j < n; ++j) {
                double sum = 0.0;
                for (int64_t block = 0; block < num_blocks_of(segment.numel); ++block) {
                    sum += partials[block * num_pairs + pair_of(i, j, n)];
                }
                sums[i * n + j] = sums[j * n + i] = sum;
            }
        }
    }
}

}  // namespace ddpcore::cpu
