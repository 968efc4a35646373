// Instruction sets are chosen when the library is loaded, never by the machine that compiled it: each kernel below the
// DDPCORE_CLONES mark is compiled for AVX-512, for AVX2 and for the baseline, and the loader picks one.
#pragma once

#include <utility>

#include "../math.h"
#include "storage.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
#define DDPCORE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DDPCORE_CLONES
#endif

// Elements of one loop do not depend on each other: one is read before it is written, and no other is touched.
#if defined(__GNUC__) && !defined(__clang__)
#define DDPCORE_IVDEP _Pragma("GCC ivdep")
#else
#define DDPCORE_IVDEP
#endif

namespace ddpcore::cpu {

inline constexpr int kLanes =
    16;  // running sums of a block: element i goes to lane i % kLanes, on every instruction set

// The lanes of a block in one fixed order: a balanced tree.
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
    double sums[kLanes];  // a copy that nothing else can point at, so that it stays in registers
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] = lanes[lane];
    for (; i + kLanes <= numel; i += kLanes) {
        DDPCORE_IVDEP
        for (int lane = 0; lane < kLanes; ++lane) sums[lane] += squared(value(i + lane));
    }
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = sums[lane];
    for (int lane = 0; i < numel; ++i, ++lane) lanes[lane] += squared(value(i));
}

// Calls fn.template operator()<flags>() for the flags of the rule. Without momentum the other two flags never stand.
template <typename Fn, int... all>
DDPCORE_INLINE void with_sgd_flags(int flags, Fn&& fn, std::integer_sequence<int, all...>) {
    (void)((flags == all ? (fn.template operator()<all>(), true) : false) || ...);
}

template <typename Fn>
DDPCORE_INLINE void with_sgd_flags(const SgdRule& rule, Fn&& fn) {
    with_sgd_flags(
        sgd_flags(rule), fn,
        std::integer_sequence<
            int, 0, kMomentum, kMomentum | kFirstStep, kMomentum | kNesterov, kMomentum | kFirstStep | kNesterov,
            kDecay, kDecay | kMomentum, kDecay | kMomentum | kFirstStep, kDecay | kMomentum | kNesterov,
            kDecay | kMomentum | kFirstStep | kNesterov>{});
}

}  // namespace ddpcore::cpu
