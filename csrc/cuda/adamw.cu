// adamw_step_: Adam over a list of tensors in one pass. Traffic: 28 bytes a parameter in fp32 (read weight, gradient
// and both moments; write weight and moments), 22 in bf16 and fp16, with masters 30.
#include "adam.cuh"
#include "one_pass.cuh"

namespace ddpcore::cuda {

namespace {

template <typename T, bool Master>
struct Adamw {
    using Segment = AdamSegment;
    using Place = AdamPlace<T, Master>;
    using Rule = AdamRule;
    struct Scales {
        AdamScales adam;
        float lr;
    };
    static constexpr int kWidth = Place::kWidth;
    static constexpr int kResident = 2;  // 128 registers, for the shares of four tensors and the divisions

    struct Shares {
        Weights<T, Master, kWidth> weights;
        Share<T, kWidth> grads;
        Share<float> exp_avgs, exp_avg_sqs;
    };

    static __device__ __forceinline__ Scales scales(const AdamRule& rule, const StepGroup& group, float grad) {
        return {adam_scales(rule, group, grad), lr_of(group)};
    }

    static __device__ __forceinline__ void read(Shares& shares, const Place& at, const AdamRule&) {
        cuda::read<true>(shares.grads, at.grad, at.numel);
        cuda::read<true>(shares.exp_avgs, at.exp_avg, at.numel);
        cuda::read<true>(shares.exp_avg_sqs, at.exp_avg_sq, at.numel);
    }

    static __device__ __forceinline__ void step(Shares& shares, const Place& at, const Scales& scales) {
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
            const float weight = shares.weights[i];
            adam_moments(weight, load(shares.grads[i]), shares.exp_avgs[i], shares.exp_avg_sqs[i], scales.adam);
            const float update = adam_update(weight, shares.exp_avgs[i], shares.exp_avg_sqs[i], scales.adam);
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
            float exp_avgs[kAhead]{}, exp_avg_sqs[kAhead]{};
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
                adam_moments(weight, load(grads[k]), exp_avgs[k], exp_avg_sqs[k], scales.adam);
                at.exp_avg[i] = exp_avgs[k];
                at.exp_avg_sq[i] = exp_avg_sqs[k];
                const float update = adam_update(weight, exp_avgs[k], exp_avg_sqs[k], scales.adam);
                write_weight<Master>(adam_element(weight, update, scales.lr, scales.adam.keep), at.param, at.master, i);
            }
        }
    }
};

}  // namespace

cudaError_t adamw_step_(const AdamArgs& args, cudaStream_t stream) {
    return with_mix(args, [&]<typename T, bool Master>(const auto& mix) {
        return one_pass<Adamw<T, Master>>(args, args.rule, mix, stream);
    });
}

}  // namespace ddpcore::cuda
