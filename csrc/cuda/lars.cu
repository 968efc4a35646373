// lars_step_: layer-wise adaptive SGD over a list of tensors. Traffic in fp32 with momentum: 20 bytes a parameter if
// the second pass reads weights and gradients from L2 (first pass: read weight, gradient; second: read momentum, write
// weight, momentum), else 28. In bf16 and fp16 half of that, with masters 22 and 30. With momentum of bf16 16 and 24,
// in bf16 and fp16 10 and 14.
#include "sgd.cuh"
#include "two_pass.cuh"

namespace ddpcore::cuda {

namespace {

template <typename T, bool Master, bool Rounded>
struct Lars {
    using Segment = SgdSegment;
    using Place = SgdPlace<T, Master, Rounded>;
    struct Rule {
        SgdRule sgd;
        LarsRule lars;
    };
    using Scales = SgdGroupScales<Rounded>;
    static constexpr int kResident = Rounded ? 2 : 3;  // 80 registers; with masters 24 bytes more, spilled
    static constexpr int64_t kBytesReadAgain = 2 * sizeof(T) + (Master ? sizeof(float) : 0);

    static __device__ __forceinline__ Scales
    scales(const Rule& rule, const StepGroup& group, float grad, uint64_t seed) {
        return sgd_group_scales<Rounded>(rule.sgd, group, grad, seed);
    }

    static __device__ __forceinline__ Trust
    trust(const Rule& rule, const StepGroup& group, const Scales& scales, const NormPartials& squares) {
        return lars_trust(rule.lars, rule.sgd, group, scales.sgd.grad, squares);
    }

    static __device__ __forceinline__ double step_size(const StepGroup&, const Trust& trust) { return trust.ratio; }

    template <typename Mix>
    static __device__ __forceinline__ NormPartials first(const Place& at, const Scales&, const Mix& mix) {
        Weights<T, Master> weights;
        Share<T, Place::kWidth> grads;
        read<true>(grads, at.grad, at.numel);
        mix.read_weights(weights, at);
        mix.mix_weights(weights, at);
        if constexpr (!std::is_same_v<Mix, NoMix>) write(weights, at.param, at.master);
        NormPartials sums{};
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
            sums.weight = add_square(sums.weight, weights[i]);
            sums.update = add_square(sums.update, load(grads[i]));
        }
        return sums;
    }

    static __device__ __forceinline__ NormPartials first_by_element(const Place& at, const Scales&) {
        const int count = count_in<Place::kWidth>(at.numel);
        NormPartials sums{};
#pragma unroll 4
        for (int i = 0; i < count; ++i) {
            const int element = place_of<Place::kWidth>(i);
            sums.weight = add_square(sums.weight, read_weight<Master>(at.param, at.master, element).value());
            sums.update = add_square(sums.update, load(at.grad[element]));
        }
        return sums;
    }

    static __device__ __forceinline__ void second(
        const Place& at, const Rule& rule, const Scales& shared, double ratio) {
        Weights<T, Master> weights;
        Share<T, Place::kWidth> grads;
        Share<typename Place::Momentum, Place::kWidth> momenta;
        read<true, Again::kNo>(grads, at.grad, at.numel);
        if (shared.flags & kMomentum) read<true, Again::kNo>(momenta, at.momentum, at.numel);
        read<Again::kNo>(weights, at.param, at.master);
        const SgdScales scales = lars_scales(shared.sgd, rule.lars.variant, ratio);
        sgd_share(weights, grads, momenta, scales, shared.flags, shared.key, at.index);
        write<Again::kNo>(weights, at.param, at.master);
        if (shared.flags & kMomentum) write<true, Again::kNo>(momenta, at.momentum, at.numel);
    }

    static __device__ __forceinline__ void second_by_element(
        const Place& at, const Rule& rule, const Scales& shared, double ratio) {
        sgd_by_element(at, lars_scales(shared.sgd, rule.lars.variant, ratio), shared.flags, shared.key);
    }
};

}  // namespace

cudaError_t lars_step_(const LarsArgs& args, cudaStream_t stream) {
    return with_mix(args.sgd, [&]<typename T, bool Master, bool Rounded>(const auto& mix) {
        return two_passes<Lars<T, Master, Rounded>>(args.sgd, args, {args.sgd.rule, args.rule}, mix, stream);
    });
}

}  // namespace ddpcore::cuda
