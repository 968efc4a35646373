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

// sums[column] = sum over rows of partials[row, column], in the order of the rows.
inline void sum_partials(const double* partials, double* sums, int64_t num_rows, int64_t num_columns) {
    for (int64_t column = 0; column < num_columns; ++column) sums[column] = 0.0;
    for (int64_t row = 0; row < num_rows; ++row) {
        for (int64_t column = 0; column < num_columns; ++column) sums[column] += partials[row * num_columns + column];
    }
}

}  // namespace ddpcore::cpu
