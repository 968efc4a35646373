// The instruction set is chosen when the library is loaded, not when it is compiled: each kernel with DDPCORE_CLONES is
// compiled for AVX-512, for AVX2 and for the baseline, and the loader picks one.
#pragma once

#include <algorithm>

#include "../math.h"
#include "kernels.h"
#include "storage.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
#define DDPCORE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define DDPCORE_HAS_CLONES
#else
#define DDPCORE_CLONES
#endif

// The iterations of a loop are independent: each reads and writes its own element only.
#if defined(__GNUC__) && !defined(__clang__)
#define DDPCORE_IVDEP _Pragma("GCC ivdep")
#else
#define DDPCORE_IVDEP
#endif

namespace ddpcore::cpu {

inline constexpr int64_t kRun = 16;  // blocks of a part that is processed in ascending order

inline constexpr int kLanes =
    16;  // running sums of a block: element i goes to lane i % kLanes, on every instruction set

// The sum of the lanes of a block, in one fixed order: a balanced tree.
DDPCORE_INLINE double sum_lanes(const double* lanes) {
    double tree[kLanes];
    for (int i = 0; i < kLanes; ++i) tree[i] = lanes[i];
    for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) tree[i] = tree[i] + tree[i + width];
    }
    return tree[0];
}

// lanes[i % kLanes] += value(i)^2 for i in [0, numel), element by element in this order.
template <typename Value>
DDPCORE_INLINE void add_squares(double* __restrict lanes, int64_t numel, Value&& value) {
    int64_t i = 0;
    double sums[kLanes];  // a copy without other pointers to it, so that it stays in registers
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] = lanes[lane];
    for (; i + kLanes <= numel; i += kLanes) {
        DDPCORE_IVDEP
        for (int lane = 0; lane < kLanes; ++lane) sums[lane] += squared(value(i + lane));
    }
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = sums[lane];
    for (int lane = 0; i < numel; ++i, ++lane) lanes[lane] += squared(value(i));
}

// sum + value^2. The square of a float is exact in double, so a fused operation has the bits of two operations.
template <bool kFused>
DDPCORE_INLINE double add_square(double sum, float value) {
    const double wide = value;
    if constexpr (kFused) return __builtin_fma(wide, wide, sum);
    return sum + wide * wide;
}

// Defines kernel(args, begin_block, end_block), which calls blocks<kFused>. kFused: there are instructions for fused
// operations. DDPCORE_CLONES would compile both values of kFused for each instruction set, which takes three times as
// long.
#define DDPCORE_VERSION(attribute, kernel, blocks, Args, fused)                       \
    attribute void kernel(const Args& args, int64_t begin_block, int64_t end_block) { \
        blocks<fused>(args, begin_block, end_block);                                  \
    }
#if defined(DDPCORE_HAS_CLONES)
#define DDPCORE_FUSED_VERSIONS(kernel, blocks, Args)                                                 \
    namespace {                                                                                      \
    DDPCORE_VERSION(__attribute__((target("arch=x86-64-v4"))), kernel##_version, blocks, Args, true) \
    DDPCORE_VERSION(__attribute__((target("arch=x86-64-v3"))), kernel##_version, blocks, Args, true) \
    DDPCORE_VERSION(__attribute__((target("default"))), kernel##_version, blocks, Args, false)       \
    }                                                                                                \
    void kernel(const Args& args, int64_t begin_block, int64_t end_block) {                          \
        kernel##_version(args, begin_block, end_block);                                              \
    }
#elif defined(__x86_64__) && !defined(__FMA__)
#define DDPCORE_FUSED_VERSIONS(kernel, blocks, Args) DDPCORE_VERSION(, kernel, blocks, Args, false)
#else
#define DDPCORE_FUSED_VERSIONS(kernel, blocks, Args) DDPCORE_VERSION(, kernel, blocks, Args, true)
#endif

// The sums of squares of two values of each element, in the order of add_squares. value(i, first, second) computes
// both.
template <bool kFused, typename Value>
DDPCORE_INLINE NormPartials sum_two_squares(int64_t numel, Value&& value) {
    double firsts[kLanes] = {}, seconds[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= numel; i += kLanes) {
        float first[kLanes], second[kLanes];
        DDPCORE_IVDEP
        for (int lane = 0; lane < kLanes; ++lane) value(i + lane, first[lane], second[lane]);
        for (int lane = 0; lane < kLanes; ++lane) firsts[lane] = add_square<kFused>(firsts[lane], first[lane]);
        for (int lane = 0; lane < kLanes; ++lane) seconds[lane] = add_square<kFused>(seconds[lane], second[lane]);
    }
    for (int lane = 0; i < numel; ++i, ++lane) {
        float first, second;
        value(i, first, second);
        firsts[lane] = add_square<kFused>(firsts[lane], first);
        seconds[lane] = add_square<kFused>(seconds[lane], second);
    }
    return {sum_lanes(firsts), sum_lanes(seconds)};
}

// Calls fn.template operator()<flags>() for the flags of a group. Nesterov implies momentum.
template <typename Fn>
DDPCORE_INLINE void with_sgd_flags(int flags, Fn&& fn) {
    switch (flags) {
        case 0: return fn.template operator()<0>();
        case kDecay: return fn.template operator()<kDecay>();
        case kMomentum: return fn.template operator()<kMomentum>();
        case kDecay | kMomentum: return fn.template operator()<kDecay | kMomentum>();
        case kMomentum | kNesterov: return fn.template operator()<kMomentum | kNesterov>();
        case kDecay | kMomentum | kNesterov: return fn.template operator()<kDecay | kMomentum | kNesterov>();
    }
}

// Averages the weights [first, last) of a segment if the step begins with that.
template <typename T, typename Segment>
DDPCORE_INLINE void mix_part(const StepArgs<Segment>& args, const Segment& segment, int64_t first, int64_t last) {
    if (args.mix == nullptr) return;
    const int64_t place = static_cast<const T*>(segment.param) - static_cast<const T*>(args.mix->weights);
    mix_elements(*args.mix, place + first, place + last);
}

// Elements that are averaged and then stepped. With more, or with explicit prefetches, the processor prefetches less of
// the tensors that it leaves for a while: a step beyond the caches takes 15 to 50 % longer.
inline constexpr int64_t kMixed = 256;

// Calls step(first, last) for a part, or, if the weights are averaged first, for pieces of it after their average.
template <typename T, typename Segment, typename Step>
DDPCORE_INLINE void step_part(
    const StepArgs<Segment>& args, const Segment& segment, int64_t first, int64_t last, Step&& step) {
    const int64_t run = args.mix == nullptr ? last - first : kMixed;
    for (; first < last; first += run) {
        const int64_t end = std::min(first + run, last);
        mix_part<T>(args, segment, first, end);
        step(first, end);
    }
}

// Calls visit(segment, first, last) for the parts of segments in the blocks [begin_block, end_block), in order. A part
// is the elements [first, last) of the segment, at most `run` blocks.
template <typename Segment, typename Visit>
DDPCORE_INLINE void for_each_part(
    const Segment* segments, int64_t num_segments, int64_t begin_block, int64_t end_block, int64_t run, Visit&& visit) {
    if (begin_block >= end_block) return;
    int64_t index = segment_of_block(segments, num_segments, begin_block);
    for (int64_t block = begin_block; block < end_block;) {
        const Segment& segment = segments[index];
        const int64_t segment_end = segment.first_block + num_blocks_of(segment.numel);
        if (block >= segment_end) {
            ++index;
            continue;
        }
        const int64_t end = std::min({end_block, segment_end, block + run});
        const int64_t first = (block - segment.first_block) * kBlock;
        visit(segment, first, std::min((end - segment.first_block) * kBlock, segment.numel));
        block = end;
    }
}

// The same parts from the last one to the first, so that a second pass starts with data that the first pass left in the
// cache. The parts are long, because the processor prefetches memory in ascending order.
template <typename Segment, typename Visit>
DDPCORE_INLINE void for_each_part_backwards(
    const Segment* segments, int64_t num_segments, int64_t begin_block, int64_t end_block, int64_t run, Visit&& visit) {
    if (begin_block >= end_block) return;
    int64_t index = segment_of_block(segments, num_segments, end_block - 1);
    for (int64_t end = end_block; end > begin_block;) {
        while (segments[index].numel == 0 || end <= segments[index].first_block) --index;
        const Segment& segment = segments[index];
        const int64_t block = std::max({begin_block, segment.first_block, end - run});
        const int64_t first = (block - segment.first_block) * kBlock;
        visit(segment, first, std::min((end - segment.first_block) * kBlock, segment.numel));
        end = block;
    }
}

}  // namespace ddpcore::cpu
