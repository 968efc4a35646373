// The CUDA kernels: twins of csrc/cpu/kernels.h by name. Each works on the whole tensor, only puts work on `stream` (no
// allocation, no synchronisation, so it can be captured into a CUDA graph) and returns the error of its launches.
//
// Elements have the bits of the CPU kernels (of a NaN only that it is one). Sums add the same terms in another fixed
// order: the same bits on every run and every GPU, but not those of the CPU. A sum over nothing (no elements, an empty
// segment) is written as zero.
#pragma once

#include <cuda_runtime_api.h>

#include "../args.h"

namespace ddpcore::cuda {

inline constexpr int64_t kMaxPeers = 1024;     // of one mix, or rows of others; above: cudaErrorInvalidValue
inline constexpr int64_t kMaxLearners = 1024;  // of one stacked mix; above: cudaErrorInvalidValue
inline constexpr int64_t kMaxRows = 256;       // of one noise_sums; above: cudaErrorInvalidValue

cudaError_t sgd_step_(const SgdArgs& args, cudaStream_t stream);
// One cooperative launch each, for up to some hundred tensors: it starts when the device has room for its whole grid.
cudaError_t lars_step_(const LarsArgs& args, cudaStream_t stream);
cudaError_t lamb_step_(const LambArgs& args, cudaStream_t stream);

cudaError_t mix_(const MixArgs& args, cudaStream_t stream);
cudaError_t mix_stacked_(const StackedMixArgs& args, cudaStream_t stream);
cudaError_t mix_sgd_step_(const MixSgdArgs& args, cudaStream_t stream);
cudaError_t segment_norms(const NormArgs& args, cudaStream_t stream);
cudaError_t total_norm_(const NormArgs& args, cudaStream_t stream);
cudaError_t noise_sums(const NoiseArgs& args, cudaStream_t stream);

}  // namespace ddpcore::cuda
