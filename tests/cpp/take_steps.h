// What csrc/bindings/cpu.cpp does with the kernels of a step.
#pragma once

#include "steps.h"

namespace ddpcore::test {

// Blocks [begin, end) in one call, or, with a seed, in ranges cut and ordered by it.
template <typename Args>
void over_blocks(
    void (*kernel)(const Args&, int64_t, int64_t), const Args& args, int64_t begin, int64_t end, uint32_t seed) {
    if (seed == 0) return kernel(args, begin, end);
    for (const auto& [first, last] : random_ranges(end - begin, seed)) kernel(args, begin + first, begin + last);
}

// Calls batch(begin, end, begin_block, end_block) for all segments at once, or, with a seed, in batches.
template <typename Segment, typename Batch>
void in_batches(const std::vector<Segment>& segments, int64_t num_blocks, uint32_t seed, Batch&& batch) {
    const auto num_segments = static_cast<int64_t>(segments.size());
    const auto block_of = [&](int64_t s) {
        return s < num_segments ? segments[static_cast<size_t>(s)].first_block : num_blocks;
    };
    if (seed == 0) return batch(int64_t{0}, num_segments, int64_t{0}, num_blocks);
    for (const auto& [begin, end] : random_ranges(num_segments, seed)) {
        batch(begin, end, block_of(begin), block_of(end));
    }
}

template <typename Kind>
void take_step(SgdProblem<Kind>& problem, uint32_t seed = 0) {
    const SgdArgs args = problem.args();
    if (skips_step(args.scaling)) return;
    over_blocks(cpu::sgd_step_, args, 0, args.num_blocks, seed);
    problem.count_step();
}

template <typename Kind>
void take_step(AdamProblem<Kind>& problem, uint32_t seed = 0) {
    const AdamArgs args = problem.args();
    if (skips_step(args.scaling)) return;
    over_blocks(cpu::adamw_step_, args, 0, args.num_blocks, seed);
    problem.count_step();
}

// The second pass uses `trust` if given, so that a test can compare two kernels with the same ratios.
template <typename Kind>
void take_step(LarsProblem<Kind>& problem, uint32_t seed = 0, const Trust* trust = nullptr) {
    LarsArgs args = problem.args();
    if (skips_step(args.sgd.scaling)) return;
    LarsArgs second = args;
    if (trust != nullptr) second.trust = const_cast<Trust*>(trust);
    in_batches(
        problem.segments, problem.num_blocks, seed,
        [&](int64_t begin, int64_t end, int64_t begin_block, int64_t end_block) {
            over_blocks(cpu::lars_norms, args, begin_block, end_block, seed);
            cpu::lars_trust(args, begin, end);
            over_blocks(cpu::lars_step_, second, begin_block, end_block, seed == 0 ? 0 : seed + 1);
        });
    problem.count_step();
}

// Without a seed the second pass forms the updates anew, with one it finds them where the first pass has kept them.
template <typename Kind>
void take_step(LambProblem<Kind>& problem, uint32_t seed = 0, const Trust* trust = nullptr) {
    LambArgs args = problem.args();
    if (skips_step(args.scaling)) return;
    in_batches(
        problem.segments, problem.num_blocks, seed,
        [&](int64_t begin, int64_t end, int64_t begin_block, int64_t end_block) {
            Buffer<float> updates(seed == 0 ? 0 : (end_block - begin_block) * kBlock);
            args.updates = seed == 0 ? nullptr : updates.data();
            args.updates_block = begin_block;
            over_blocks(cpu::lamb_moments_, args, begin_block, end_block, seed);
            cpu::lamb_trust(args, begin, end);
            LambArgs second = args;
            if (trust != nullptr) second.trust = const_cast<Trust*>(trust);
            over_blocks(cpu::lamb_step_, second, begin_block, end_block, seed == 0 ? 0 : seed + 1);
            EXPECT_TRUE(updates.guards_untouched());
        });
    problem.count_step();
}

}  // namespace ddpcore::test
