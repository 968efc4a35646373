// The CUDA kernels, with the names of those in csrc/cpu/kernels.h. A function processes whole tensors. It only launches
// work on `stream`: it does not allocate or synchronise, so a CUDA graph can capture it. It returns the error of its
// launches.
//
// Elements have the bits of the CPU kernels, except that a NaN may be another NaN. Sums add the same terms in another
// fixed order: they have the same bits on every run and GPU, but not the bits of the CPU. Only noise_sums has other
// bits where has_slow_doubles. A sum without elements is zero.
#pragma once

#include <cuda_runtime_api.h>

#include "../args.h"

namespace ddpcore::cuda {

inline constexpr int64_t kMaxPeers = 1024;     // of one mix, or rows of others; more: cudaErrorInvalidValue
inline constexpr int64_t kMaxStepPeers = 8;    // of one mix in a step
inline constexpr int64_t kMaxLearners = 1024;  // of one stacked mix; more: cudaErrorInvalidValue
inline constexpr int64_t kMaxRows = 256;       // of one noise_sums; more: cudaErrorInvalidValue
inline constexpr int64_t kMaxAveraged = 1024;  // rows of one mean of average_; more: cudaErrorInvalidValue

// With a mix: at most kMaxStepPeers peers and no masters, else cudaErrorInvalidValue.
#define DDPCORE_DECLARE(name, Args) cudaError_t name(const Args& args, cudaStream_t stream);
DDPCORE_ONE_PASS_STEPS(DDPCORE_DECLARE)
#undef DDPCORE_DECLARE
// One cooperative launch each, for up to some hundred tensors. It starts when its whole grid fits on the device.
cudaError_t lars_step_(const LarsArgs& args, cudaStream_t stream);
cudaError_t lamb_step_(const LambArgs& args, cudaStream_t stream);

cudaError_t mix_(const MixArgs& args, cudaStream_t stream);
cudaError_t mix_stacked_(const StackedMixArgs& args, cudaStream_t stream);
cudaError_t average_(const AverageArgs& args, cudaStream_t stream);
cudaError_t segment_norms(const NormArgs& args, cudaStream_t stream);
cudaError_t total_norm_(const NormArgs& args, cudaStream_t stream);
cudaError_t noise_sums(const GramArgs& args, cudaStream_t stream);

// Whether the current device runs double precision at less than an eighth of the fp32 rate: 1/32 or 1/64 on T4 and RTX
// 4090, 1/2 on A100 and H100. The environment variable DDPCORE_SLOW_DOUBLES makes it true on every device, for tests.
cudaError_t has_slow_doubles(bool* slow);

}  // namespace ddpcore::cuda
