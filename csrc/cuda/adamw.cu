// adamw_step_: Adam over a list of tensors in one pass. Traffic: 28 bytes a parameter in fp32 (read weight, gradient
// and both moments; write weight and moments), 22 in bf16 and fp16, with masters 30. With
// moments of bf16 20, and 14 in bf16 and fp16.
#include "adam.cuh"
#include "one_pass.cuh"

namespace ddpcore::cuda {

namespace {

template <typename T, bool Master, bool Rounded>
struct Adamw {
    using Segment = AdamSegment;
    using Place = AdamPlace<T, Master, Rounded>;
    using Moment = typename Place::Moment;
    using Rule = AdamRule;
    struct Scales {
        AdamScales adam;
        float lr;
        StateKey<Rounded> key;
    };
    static constexpr int kWidth = Place::kWidth;
    static constexpr int kResident = 2;  // 128 registers, for the shares of four tensors and the divisions

    struct Shares {
        Weights<T, Master, kWidth> weights;
        Share<T, kWidth> grads;
        Share<Moment, kWidth> exp_avgs, exp_avg_sqs;
    };

    static __device__ __forceinline__ Scales
    scales(const AdamRule& rule, const StepGroup& group, float grad, uint64_t seed) {
        return {adam_scales(rule, group, grad), lr_of(group), state_key<Rounded>(seed, group)};
    }

    static __device__ __forceinline__ void read(Shares& shares, const Place& at, const AdamRule&) {
        cuda::read<true>(shares.grads, at.grad, at.numel);
        cuda::read<true>(shares.exp_avgs, at.exp_avg, at.numel);
        cuda::read<true>(shares.exp_avg_sqs, at.exp_avg_sq, at.numel);
    }

    static __device__ __forceinline__ void step(Shares& shares, const Place& at, const Scales& scales) {
        typename Place::Words words(scales.key, at.index);
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
            const float weight = shares.weights[i];
            Moment &exp_avg = shares.exp_avgs[i], &exp_avg_sq = shares.exp_avg_sqs[i];
            step_moments<Rounded>(weight, load(shares.grads[i]), exp_avg, exp_avg_sq, scales.adam, words.of(i));
            const float update = adam_update(weight, load(exp_avg), load(exp_avg_sq), scales.adam);
            shares.weights.set(i, adam_element(weight, update, scales.lr, scales.adam.keep));
        }
        write(shares.weights, at.param, at.master);
        write<true>(shares.exp_avgs, at.exp_avg, at.numel);
        write<true>(shares.exp_avg_sqs, at.exp_avg_sq, at.numel);
    }

    static __device__ __forceinline__ void step_by_element(const Place& at, const Scales& scales) {
#pragma unroll 1
        for (int first = static_cast<int>(threadIdx.x); first < at.numel; first += kAhead * kThreads) {
            StoredWeight<T, Master> weights[kAhead]{};
            T grads[kAhead]{};
            Moment exp_avgs[kAhead]{}, exp_avg_sqs[kAhead]{};
#pragma unroll
            for (int k = 0; k < kAhead; ++k) {
                const int i = first + k * kThreads;
                if (i >= at.numel) continue;
                weights[k] = read_weight<Master>(at.param, at.master, i);
                grads[k] = at.grad[i];
                exp_avgs[k] = at.exp_avg[i];
                exp_avg_sqs[k] = at.exp_avg_sq[i];
            }
#pragma unroll
            for (int k = 0; k < kAhead; ++k) {
                const int i = first + k * kThreads;
                if (i >= at.numel) break;
                const float weight = weights[k].value();
                const uint32_t word = state_word<Rounded>(scales.key, at.index + i);
                step_moments<Rounded>(weight, load(grads[k]), exp_avgs[k], exp_avg_sqs[k], scales.adam, word);
                at.exp_avg[i] = exp_avgs[k];
                at.exp_avg_sq[i] = exp_avg_sqs[k];
                const float update = adam_update(weight, load(exp_avgs[k]), load(exp_avg_sqs[k]), scales.adam);
                write_weight<Master>(adam_element(weight, update, scales.lr, scales.adam.keep), at.param, at.master, i);
            }
        }
    }
};

}  // namespace

cudaError_t adamw_step_(const AdamArgs& args, cudaStream_t stream) {
    return with_mix(args, [&]<typename T, bool Master, bool Rounded>(const auto& mix) {
        return one_pass<Adamw<T, Master, Rounded>>(args, args.rule, mix, stream);
    });
}

}  // namespace ddpcore::cuda
