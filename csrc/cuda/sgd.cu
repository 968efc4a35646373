// sgd_step_: momentum SGD over a list of tensors. Traffic: 20 bytes a parameter in fp32 with momentum (read weight,
// gradient, momentum; write weight, momentum), 10 in bf16 and fp16; without momentum 12 and 6. With masters 22 and 14.
// With momentum of bf16 16, and 10 in bf16 and fp16.
#include "sgd.cuh"

#include "one_pass.cuh"

namespace ddpcore::cuda {

namespace {

template <typename T, bool Master, bool Rounded>
struct Sgd {
    using Segment = SgdSegment;
    using Place = SgdPlace<T, Master, Rounded>;
    using Rule = SgdRule;
    using Scales = SgdGroupScales<Rounded>;
    static constexpr int kResident = 3;  // at most 80 registers

    struct Shares {
        Weights<T, Master> weights;
        Share<T, Place::kWidth> grads;
        Share<typename Place::Momentum, Place::kWidth> momenta;
    };

    static __device__ __forceinline__ Scales
    scales(const SgdRule& rule, const StepGroup& group, float grad, uint64_t seed) {
        return sgd_group_scales<Rounded>(rule, group, grad, seed);
    }

    static __device__ __forceinline__ void read(Shares& shares, const Place& at, const SgdRule& rule) {
        cuda::read<true>(shares.grads, at.grad, at.numel);
        if (rule.momentum != 0.0f) cuda::read<true>(shares.momenta, at.momentum, at.numel);
    }

    static __device__ __forceinline__ void step(Shares& shares, const Place& at, const Scales& scales) {
        sgd_share(shares.weights, shares.grads, shares.momenta, scales.sgd, scales.flags, scales.key, at.index);
        write(shares.weights, at.param, at.master);
        if (scales.flags & kMomentum) write<true>(shares.momenta, at.momentum, at.numel);
    }

    static __device__ __forceinline__ void step_by_element(const Place& at, const Scales& scales) {
        sgd_by_element(at, scales.sgd, scales.flags, scales.key);
    }
};

}  // namespace

cudaError_t sgd_step_(const SgdArgs& args, cudaStream_t stream) {
    return with_mix(args, [&]<typename T, bool Master, bool Rounded>(const auto& mix) {
        return one_pass<Sgd<T, Master, Rounded>>(args, args.rule, mix, stream);
    });
}

}  // namespace ddpcore::cuda
