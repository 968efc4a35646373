// The CPU kernels: range functions over blocks, which the caller spreads over threads. Those that sum leave one row of
// partial sums a block; when all ranges are done the caller adds them with sum_partials, in the order of the blocks.
#pragma once

#include "../args.h"

namespace ddpcore::cpu {

void sgd_step_(const SgdArgs& args, int64_t begin_block, int64_t end_block);
void mix_(const MixArgs& args, int64_t begin_block, int64_t end_block);
void mix_stacked_(const StackedMixArgs& args, int64_t begin_block, int64_t end_block);
void mix_sgd_step_(const MixSgdArgs& args, int64_t begin_block, int64_t end_block);
void segment_norms(const NormArgs& args, int64_t begin_block, int64_t end_block);
void total_norm_(const NormArgs& args, int64_t begin_block, int64_t end_block);

// Two passes over a batch of whole segments, in this order; between them the trust ratios of the batch.
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

}  // namespace ddpcore::cpu
