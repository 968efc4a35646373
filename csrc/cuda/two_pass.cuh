// The two passes of LARS and LAMB in one cooperative launch: norms of each tensor, then its step.
//
// The second pass needs the trust ratio of the whole tensor, so the first pass over the tensor must end before it.
// Batches of whole tensors are so small that the second pass finds its data in L2. Batches overlap: phase k runs the
// second pass over batch k-1 and the first pass over batch k, and ends with one barrier of the grid. One barrier is
// enough: the two passes of a phase use different tensors, and all data that the second pass over batch k reads, with
// the trust ratios, was written in phase k. So a step has as many barriers as batches, and all CUDA blocks have work
// between two barriers.
//
// There is one partial sum for each block of kBlock elements. The CUDA block that finishes the last block of a tensor
// adds the partial sums in the order of the blocks, whatever the order in which they were finished, and writes the
// tensor's Trust. So the bits are the same on every run and GPU.
//
// If the device does not support cooperative launches, there are two launches, one for each pass, over one batch of all
// tensors. The bits are the same; the second pass reads from memory. A step on shards has these two launches too: the
// caller sums the squares of all shards between them.
#pragma once

#include <cooperative_groups.h>

#include "mix.cuh"
#include "segments.cuh"
#include "sum.cuh"

namespace ddpcore::cuda {

// The arguments of a launch beside its StepTable.
template <int capacity>
struct Batches {
    NormPartials* partials;
    Trust* trust;
    NormPartials* squares;  // of each segment; written by phase 0, or read by phase 1. Null: one call has both passes
    uint64_t* tickets;      // for each segment: the number of blocks whose first pass is done; zero between steps
    int32_t num_batches;
    int32_t begin_phase;
    int32_t end_phase;
    uint16_t ends[capacity];  // for each batch: the segment after its last one
};

// Optimizer defines both passes over a block, in static functions: Lars or Lamb.
template <typename Optimizer, typename Mix, int capacity>
class TwoPasses {
  public:
    using Segment = typename Optimizer::Segment;
    using Rule = typename Optimizer::Rule;
    using Scales = typename Optimizer::Scales;
    using Table = StepTable<Segment, capacity>;

    // `scales` is in shared memory, one for each group.
    __device__ __forceinline__ TwoPasses(
        const Table& table, const Batches<capacity>& batches, const Rule& rule, const Mix& mix, const Scales* scales)
        : table_(table), list_(table.list), batches_(batches), rule_(rule), mix_(mix), scales_(scales) {}

    __device__ __forceinline__ void run() {
        if (batches_.begin_phase == 0) visit_empty_segments();
        if (has_squares()) write_trusts();
        for (int phase = batches_.begin_phase; phase < batches_.end_phase; ++phase) {
            if (phase > batches_.begin_phase) cooperative_groups::this_grid().sync();
            // The blocks of both passes are one sequence, of which a CUDA block takes every gridDim.x-th, so that the
            // numbers of blocks differ by at most one. The second pass runs first, while its batch is in L2, and starts
            // with the block that the first pass has read last.
            const Batch second = batch(phase - 1), first = batch(phase);
            const int dealt = second_pass(second, second.end_block - 1 - static_cast<int>(blockIdx.x));
            first_pass(first, first.begin_block + dealt);
        }
    }

  private:
    // 32-bit block numbers save registers and are enough for 8 tera-elements.
    struct Batch {
        int begin, end;  // segments
        int begin_block, end_block;
    };

    __device__ __forceinline__ Batch batch(int index) const {
        if (index < 0 || index >= batches_.num_batches) return {};
        const int begin = index == 0 ? 0 : batches_.ends[index - 1], end = batches_.ends[index];
        return {begin, end, first_block_of(begin), first_block_of(end)};
    }

    __device__ __forceinline__ int first_block_of(int segment) const {
        return static_cast<int>(segment < list_.num_segments ? list_.segments[segment].first_block : list_.end_block);
    }

    __device__ __forceinline__ int segment_of(const Batch& batch, int block) const {
        return batch.begin + segment_of_block(list_.segments + batch.begin, batch.end - batch.begin, block);
    }

    __device__ __forceinline__ const Scales& scales_of(const Segment& segment) const {
        return scales_[segment.group - table_.first_group];
    }

    // Writes the Trust of empty segments, which have no block.
    __device__ __forceinline__ void visit_empty_segments() const {
        for (int64_t i = blockIdx.x; i < list_.num_segments; i += gridDim.x) {
            if (list_.segments[i].numel == 0 && threadIdx.x == 0) write_trust(static_cast<int>(i), {0.0, 0.0});
        }
    }

    __device__ __forceinline__ bool has_squares() const {
        return batches_.squares != nullptr && batches_.begin_phase > 0;
    }

    __device__ __forceinline__ Trust trust_of(int index, const NormPartials& squares) const {
        const Segment& segment = list_.segments[index];
        return Optimizer::trust(rule_, table_.group_of(segment), scales_of(segment), squares);
    }

    // Every CUDA block of the second pass computes the ratios that it needs from the squares. So it need not wait for
    // this one, which is for the caller.
    __device__ __forceinline__ void write_trusts() const {
        if (threadIdx.x != 0) return;
        for (int64_t i = blockIdx.x; i < list_.num_segments; i += gridDim.x) {
            const int64_t row = list_.first_segment + i;
            batches_.trust[row] = trust_of(static_cast<int>(i), batches_.squares[row]);
        }
    }

    // From the last block of the batch to the first. Returns the distance from the first block of the batch to the next
    // block of this CUDA block, less one.
    __device__ __forceinline__ int second_pass(const Batch& batch, int block) const {
        while (block >= batch.begin_block) {
            const int index = segment_of(batch, block);
            const Segment& segment = list_.segments[index];
            const int64_t row = list_.first_segment + index;
            const auto step_size = Optimizer::step_size(
                table_.group_of(segment), has_squares() ? trust_of(index, batches_.squares[row]) : batches_.trust[row]);
            const int first_block = static_cast<int>(segment.first_block);
            for (; block >= first_block; block -= static_cast<int>(gridDim.x)) {
                const typename Optimizer::Place at(segment, (block - first_block) * kBlock);
                if (at.whole) {
                    Optimizer::second(at, rule_, scales_of(segment), step_size);
                } else {
                    Optimizer::second_by_element(at, rule_, scales_of(segment), step_size);
                }
            }
        }
        return batch.begin_block - 1 - block;
    }

    __device__ __forceinline__ void first_pass(const Batch& batch, int block) {
        while (block < batch.end_block) {
            const int index = segment_of(batch, block);
            const Segment& segment = list_.segments[index];
            const int first_block = static_cast<int>(segment.first_block);
            const int num_blocks = static_cast<int>((segment.numel + kBlock - 1) / kBlock);
            int done = 0;
            NormPartials total{};
            for (; block < first_block + num_blocks; block += static_cast<int>(gridDim.x), ++done) {
                const typename Optimizer::Place at(segment, (block - first_block) * kBlock);
                total = block_sum_(first_of_block(at, scales_of(segment)));
                if (threadIdx.x == 0) batches_.partials[block] = total;
            }
            if (num_blocks == 1) {
                if (threadIdx.x == 0) write_trust(index, total);
            } else if (__syncthreads_or(threadIdx.x == 0 && is_last(index, done, num_blocks))) {
                finish(index, num_blocks);
            }
        }
    }

    // With a mix, the first pass also writes the mixed weights.
    __device__ __forceinline__ NormPartials
    first_of_block(const typename Optimizer::Place& at, const Scales& scales) const {
        if (at.whole && mix_.aligned) return Optimizer::first(at, scales, mix_);
        mix_.mix_block(at);
        return Optimizer::first_by_element(at, scales);
    }

    // Adds the blocks of the segment that this CUDA block has done to the ticket. Returns whether all are done now.
    __device__ __forceinline__ bool is_last(int index, int done, int num_blocks) const {
        auto* ticket = reinterpret_cast<unsigned long long*>(batches_.tickets + list_.first_segment + index);
        __threadfence();  // partial sums before the ticket
        const auto before = atomicAdd(ticket, static_cast<unsigned long long>(done));
        if (before + static_cast<unsigned long long>(done) != static_cast<unsigned long long>(num_blocks)) return false;
        __threadfence();  // the ticket before others' partial sums
        *ticket = 0;
        return true;
    }

    // Thread t adds rows t, t + kThreads, ... to four sums in turn, so that four loads overlap.
    __device__ __forceinline__ void finish(int index, int num_blocks) {
        constexpr int kUnroll = 4;
        const NormPartials* rows = batches_.partials + list_.segments[index].first_block;
        NormPartials sums[kUnroll] = {};
        for (int row = static_cast<int>(threadIdx.x); row < num_blocks; row += kUnroll * kThreads) {
#pragma unroll
            for (int i = 0; i < kUnroll; ++i) {
                const int mine = row + i * kThreads;
                if (mine >= num_blocks) continue;
                sums[i].weight += __ldcg(&rows[mine].weight);  // from L2, to which other multiprocessors have written
                sums[i].update += __ldcg(&rows[mine].update);
            }
        }
        const NormPartials total = block_sum_(
            {(sums[0].weight + sums[2].weight) + (sums[1].weight + sums[3].weight),
             (sums[0].update + sums[2].update) + (sums[1].update + sums[3].update)});
        if (threadIdx.x == 0) write_trust(index, total);
    }

    __device__ __forceinline__ void write_trust(int index, const NormPartials& squares) const {
        const int64_t row = list_.first_segment + index;
        if (batches_.squares != nullptr) {
            batches_.squares[row] = squares;
        } else {
            batches_.trust[row] = trust_of(index, squares);
        }
    }

    const Table& table_;
    const SegmentTable<Segment, capacity>& list_;
    const Batches<capacity>& batches_;
    const Rule& rule_;
    const Mix& mix_;
    const Scales* scales_;
    BlockSum<kThreads, NormPartials> block_sum_;
};

// Optimizer::kResident CUDA blocks fit on a multiprocessor, so that one loads while another computes.
template <typename Optimizer, typename Mix, int capacity>
__global__ void __launch_bounds__(kThreads, std::min(Optimizer::kResident, Mix::kResident)) two_pass_kernel(
    GRID_CONSTANT(StepTable<typename Optimizer::Segment, capacity>) table, GRID_CONSTANT(Batches<capacity>) batches,
    GRID_CONSTANT(typename Optimizer::Rule) rule, GRID_CONSTANT(Mix) mix) {
    if (skips_step(table.scaling)) return;  // in all threads of the grid
    __shared__ typename Optimizer::Scales scales[kMaxGroups];
    fill_scales<Optimizer>(table, rule, scales);
    TwoPasses<Optimizer, Mix, capacity>(table, batches, rule, mix, scales).run();
    if (batches.end_phase > batches.num_batches) count_steps(table);
}

// A batch has whole consecutive segments with up to `budget` elements together, or one larger segment.
template <typename Segment, int capacity>
void fill_batches(Batches<capacity>& batches, const SegmentTable<Segment, capacity>& list, int64_t budget) {
    batches.num_batches = 0;
    int64_t numel = 0;
    for (int64_t i = 0; i < list.num_segments; ++i) {
        numel += list.segments[i].numel;
        if (i > 0 && numel > budget) {
            batches.ends[batches.num_batches++] = static_cast<uint16_t>(i);
            numel = list.segments[i].numel;
        }
    }
    if (list.num_segments > 0) batches.ends[batches.num_batches++] = static_cast<uint16_t>(list.num_segments);
    batches.begin_phase = 0;
    batches.end_phase = batches.num_batches + 1;
}

template <typename Optimizer, typename Mix, int capacity>
cudaError_t launch_two_passes(
    const StepTable<typename Optimizer::Segment, capacity>& table, Batches<capacity>& batches,
    const typename Optimizer::Rule& rule, Passes passes, const Mix& mix, cudaStream_t stream) {
    int device = 0, cooperative = 0, l2_bytes = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&cooperative, cudaDevAttrCooperativeLaunch, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, device);
    if (error != cudaSuccess) return error;
    const auto kernel = two_pass_kernel<Optimizer, Mix, capacity>;
    const int64_t num_blocks = std::max<int64_t>(table.list.end_block - table.list.begin_block, 1);
    if (cooperative != 0 && passes == Passes::kBoth) {
        // Half of L2: the other half is for the data that is read once, and for the next batch.
        fill_batches(batches, table.list, l2_bytes / 2 / Optimizer::kBytesReadAgain);
        return launch_cooperative(kernel, num_blocks, kThreads, 0, stream, table, batches, rule, mix);
    }
    fill_batches(batches, table.list, INT64_MAX);
    const int32_t end_phase = passes == Passes::kFirst ? 1 : batches.end_phase;
    batches.begin_phase = passes == Passes::kSecond ? 1 : 0;
    for (; batches.begin_phase < end_phase && error == cudaSuccess; ++batches.begin_phase) {
        batches.end_phase = batches.begin_phase + 1;
        error = launch(kernel, num_blocks, kThreads, 0, stream, table, batches, rule, mix);
    }
    return error;
}

// All launches of a step. `args` has the partial sums and the trust ratios.
template <typename Optimizer, typename Args, typename Mix>
cudaError_t two_passes(
    const StepArgs<typename Optimizer::Segment>& step, const Args& args, const typename Optimizer::Rule& rule,
    const Mix& mix, cudaStream_t stream) {
    using Segment = typename Optimizer::Segment;
    return for_each_step_chunk(step, [&]<int capacity>(const StepTable<Segment, capacity>& table) {
        Batches<capacity> batches;
        batches.partials = args.partials;
        batches.trust = args.trust;
        batches.squares = args.squares;
        batches.tickets = step.tickets;
        return launch_two_passes<Optimizer>(table, batches, rule, args.passes, mix, stream);
    });
}

}  // namespace ddpcore::cuda
