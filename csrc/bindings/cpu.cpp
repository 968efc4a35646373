// The CPU kernels as operators. Blocks are distributed over torch's threads, whose number torch.set_num_threads sets.
#include "../cpu/kernels.h"
#include "../math.h"

#include "operators.h"

namespace ddpcore {
namespace {

inline constexpr int64_t kGrain = 32768;  // elements a thread, as in torch's own kernels

template <typename Kernel, typename Args>
void spread(Kernel* kernel, const Args& args, int64_t begin_block, int64_t end_block, int64_t numel) {
    if (begin_block == end_block || numel == 0) return;
    // The blocks of small tensors have few elements, so a grain has more of them.
    const int64_t grain = (kGrain * (end_block - begin_block) + numel - 1) / numel;
    torch::stable::parallel_for(
        begin_block, end_block, grain, [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

inline constexpr int64_t kLarsBatch = 1 << 17;   // elements, of 8 bytes: weights and gradients
inline constexpr int64_t kLambBatch = 1 << 17;   // elements, of 8 bytes: weights and updates
inline constexpr int64_t kMaxBatchBlocks = 256;  // of a batch of several tensors
inline constexpr int64_t kMaxUpdateBlocks =
    1 << 10;  // 16 MiB: for more, it is faster to compute the updates again than to store them

// Two passes over batches of whole tensors, so small that the second pass finds its data in the cache. Both passes give
// a thread the same blocks, so the data is in the thread's own cache.
template <typename Segment, typename First, typename Between, typename Second>
void in_batches(
    const std::vector<Segment>& segments, int64_t num_blocks, int64_t batch_numel, First&& first, Between&& between,
    Second&& second) {
    const auto num_segments = static_cast<int64_t>(segments.size());
    for (int64_t begin = 0; begin < num_segments;) {
        int64_t end = begin + 1, numel = segments[static_cast<size_t>(begin)].numel;
        const int64_t begin_block = segments[static_cast<size_t>(begin)].first_block;
        for (; end < num_segments; ++end) {
            const Segment& next = segments[static_cast<size_t>(end)];
            const int64_t blocks = next.first_block + num_blocks_of(next.numel) - begin_block;
            if (numel + next.numel > batch_numel || blocks > kMaxBatchBlocks) break;
            numel += next.numel;
        }
        const int64_t end_block = end < num_segments ? segments[static_cast<size_t>(end)].first_block : num_blocks;
        first(begin_block, end_block, numel);
        between(begin, end);
        second(begin_block, end_block, numel);
        begin = end;
    }
}

template <typename Segment>
void count_step(const StepArgs<Segment>& args) {
    for (int64_t i = 0; i < args.num_groups; ++i) {
        const StepGroup& group = args.groups[i];
        if (group.step != nullptr) *group.step = next_count(*group.step, args.rounded_states);
    }
}

// The sums of squares of all segments, for the caller.
template <typename Segment>
void write_squares(const std::vector<Segment>& segments, const NormPartials* partials, NormPartials* squares) {
    for (size_t i = 0; i < segments.size(); ++i) {
        squares[i] = cpu::sum_partials(partials + segments[i].first_block, num_blocks_of(segments[i].numel));
    }
}

struct Cpu {
#define DDPCORE_RUN(name, Args)                                       \
    static void run(const Tensor&, const Args& args, int64_t numel) { \
        if (skips_step(args.scaling)) return;                         \
        spread(cpu::name, args, 0, args.num_blocks, numel);           \
        count_step(args);                                             \
    }
    DDPCORE_ONE_PASS_STEPS(DDPCORE_RUN)
#undef DDPCORE_RUN

    static void run(const Tensor&, const SgdCall& call, const LarsArgs& args) {
        const SgdArgs& sgd = call.args;
        if (skips_step(sgd.scaling)) return;
        if (args.passes == Passes::kFirst) {
            spread(cpu::lars_norms, args, 0, sgd.num_blocks, call.tensors.numel);
            return write_squares(call.segments, args.partials, args.squares);
        }
        if (args.passes == Passes::kSecond) {
            cpu::lars_trust(args, 0, sgd.num_segments);
            spread(cpu::lars_step_, args, 0, sgd.num_blocks, call.tensors.numel);
            return count_step(sgd);
        }
        in_batches(
            call.segments, sgd.num_blocks, kLarsBatch,
            [&](int64_t begin, int64_t end, int64_t numel) { spread(cpu::lars_norms, args, begin, end, numel); },
            [&](int64_t begin, int64_t end) { cpu::lars_trust(args, begin, end); },
            [&](int64_t begin, int64_t end, int64_t numel) { spread(cpu::lars_step_, args, begin, end, numel); });
        count_step(sgd);
    }

    static void run(const Tensor&, const AdamCall& call, LambArgs args) {
        if (skips_step(args.scaling)) return;
        if (args.passes == Passes::kFirst) {
            spread(cpu::lamb_moments_, args, 0, args.num_blocks, call.tensors.numel);
            return write_squares(call.segments, args.partials, args.squares);
        }
        if (args.passes == Passes::kSecond) {
            cpu::lamb_trust(args, 0, args.num_segments);
            spread(cpu::lamb_step_, args, 0, args.num_blocks, call.tensors.numel);
            return count_step(args);
        }
        thread_local std::vector<float> updates;  // kept between calls: new memory costs more time than it saves
        in_batches(
            call.segments, args.num_blocks, kLambBatch,
            [&](int64_t begin, int64_t end, int64_t numel) {
                const bool keep = end - begin <= kMaxUpdateBlocks;
                if (keep && updates.size() < static_cast<size_t>((end - begin) * kBlock)) {
                    updates.resize(static_cast<size_t>((end - begin) * kBlock));
                }
                args.updates = keep ? updates.data() : nullptr;
                args.updates_block = begin;
                spread(cpu::lamb_moments_, args, begin, end, numel);
            },
            [&](int64_t begin, int64_t end) { cpu::lamb_trust(args, begin, end); },
            [&](int64_t begin, int64_t end, int64_t numel) { spread(cpu::lamb_step_, args, begin, end, numel); });
        count_step(args);
    }

    static void run(const Tensor&, const MixCall& call) {
        const int64_t num_blocks = num_blocks_of(call.args.numel);
        spread(cpu::mix_, call.args, 0, num_blocks, call.args.numel);
        cpu::sum_partials(call.args.partials, call.args.sums, num_blocks, call.args.num_peers);
    }

    static void run(const Tensor&, const StackedMixCall& call) {
        call.check_entries();
        const int64_t num_blocks = num_blocks_of(call.args.numel);
        StackedMixArgs args = call.args;
        if (!call.distances) args.partials = nullptr;
        spread(cpu::mix_stacked_, args, 0, num_blocks, args.numel * args.num_learners);
        if (call.distances) cpu::sum_partials(call.args.partials, call.args.sums, num_blocks, call.args.num_learners);
    }

    static void run(const Tensor&, const AverageCall& call) {
        const AverageArgs& args = call.args;
        const int64_t num_blocks = num_blocks_of(args.numel);
        spread(cpu::average_, args, 0, num_blocks, args.numel * args.num_rows);
        cpu::sum_partials(args.partials, args.sums, num_blocks, args.num_rows);
    }

    static void segment_norms(const Tensor&, const NormCall& call) {
        spread(cpu::segment_norms, call.args, 0, call.args.num_blocks, call.numel);
        for (int64_t i = 0; i < call.args.num_segments; ++i) {
            const NormSegment& segment = call.segments[static_cast<size_t>(i)];
            cpu::sum_partials(
                call.args.partials + segment.first_block, call.args.sums + i, num_blocks_of(segment.numel), 1);
        }
    }

    static void total_norm_(const Tensor&, const NormCall& call) {
        spread(cpu::total_norm_, call.args, 0, call.args.num_blocks, call.numel);
        cpu::sum_partials(call.args.partials, call.args.sums, call.args.num_blocks, 1);
    }

    static void noise_sums(const Tensor& like, const GramCall& call) {
        spread(cpu::noise_sums, call.args, 0, call.args.num_blocks, like.numel() * call.args.num_rows);
        cpu::sum_pairs(call.args);
    }
};

}  // namespace
}  // namespace ddpcore

STABLE_TORCH_LIBRARY_IMPL(ddpcore, CPU, library) {
    ddpcore::register_operators<ddpcore::Cpu>(library);
}
