// lamb_step_: layer-wise adaptive Adam over a list of tensors. Traffic in fp32: 28 bytes a parameter if the second pass
// reads weights and moments from L2 (first pass: read weight, gradient, moments, write moments; second: write weight),
// else 40. In bf16 and fp16 22 and 32, with masters 30 and 44. With moments of bf16 20 and 28, in bf16 and fp16 14
// and 20.
#include "adam.cuh"
#include "two_pass.cuh"

namespace ddpcore::cuda {

namespace {

template <typename T, bool Master, bool Rounded>
struct Lamb {
    using Segment = AdamSegment;
    using Place = AdamPlace<T, Master, Rounded>;
    using Moment = typename Place::Moment;
    using Rule = LambRule;
    struct Scales {
        AdamScales adam;
        StateKey<Rounded> key;
    };
    static constexpr int kWidth = Place::kWidth;
    static constexpr int kResident = 2;  // 128 registers, for the shares of four tensors and the divisions
    static constexpr int64_t kBytesReadAgain = sizeof(T) + (Master ? sizeof(float) : 0) + 2 * sizeof(Moment);

    static __device__ __forceinline__ Scales
    scales(const LambRule& rule, const StepGroup& group, float grad, uint64_t seed) {
        return {adam_scales(rule, group, grad), state_key<Rounded>(seed, group)};
    }

    static __device__ __forceinline__ Trust
    trust(const LambRule& rule, const StepGroup& group, const Scales&, const NormPartials& squares) {
        return lamb_trust(rule, group, squares);
    }

    static __device__ __forceinline__ float step_size(const StepGroup& group, const Trust& trust) {
        return lamb_step_size(group, trust);
    }

    template <typename Mix>
    static __device__ __forceinline__ NormPartials first(const Place& at, const Scales& scales, const Mix& mix) {
        Weights<T, Master, kWidth> weights;
        Share<T, kWidth> grads;
        Share<Moment, kWidth> exp_avgs, exp_avg_sqs;
        read<true, Again::kNo>(grads, at.grad, at.numel);
        mix.read_weights(weights, at);
        read<true>(exp_avgs, at.exp_avg, at.numel);
        read<true>(exp_avg_sqs, at.exp_avg_sq, at.numel);
        mix.mix_weights(weights, at);
        if constexpr (!std::is_same_v<Mix, NoMix>) write(weights, at.param, at.master);
        typename Place::Words words(scales.key, at.index);
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
            step_moments<Rounded>(weights[i], load(grads[i]), exp_avgs[i], exp_avg_sqs[i], scales.adam, words.of(i));
        }
        write<true>(exp_avgs, at.exp_avg, at.numel);
        write<true>(exp_avg_sqs, at.exp_avg_sq, at.numel);
        NormPartials sums{};
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
            const float weight = weights[i];
            const float update = adam_update(weight, load(exp_avgs[i]), load(exp_avg_sqs[i]), scales.adam);
            sums.weight = add_square(sums.weight, weight);
            sums.update = add_square(sums.update, update);
        }
        return sums;
    }

    static __device__ __forceinline__ NormPartials first_by_element(const Place& at, const Scales& scales) {
        const int count = count_in<kWidth>(at.numel);
        NormPartials sums{};
#pragma unroll 1
        for (int first = 0; first < count; first += kAhead) {
            StoredWeight<T, Master> weights[kAhead]{};
            T grads[kAhead]{};
            Moment exp_avgs[kAhead]{}, exp_avg_sqs[kAhead]{};
#pragma unroll
            for (int k = 0; k < kAhead; ++k) {
                const int i = place_of<kWidth>(first + k);
                if (first + k >= count) continue;
                weights[k] = read_weight<Master>(at.param, at.master, i);
                grads[k] = at.grad[i];
                exp_avgs[k] = at.exp_avg[i];
                exp_avg_sqs[k] = at.exp_avg_sq[i];
            }
#pragma unroll
            for (int k = 0; k < kAhead; ++k) {
                if (first + k >= count) break;
                const int i = place_of<kWidth>(first + k);
                const float weight = weights[k].value();
                const uint32_t word = state_word<Rounded>(scales.key, at.index + i);
                step_moments<Rounded>(weight, load(grads[k]), exp_avgs[k], exp_avg_sqs[k], scales.adam, word);
                at.exp_avg[i] = exp_avgs[k];
                at.exp_avg_sq[i] = exp_avg_sqs[k];
                sums.weight = add_square(sums.weight, weight);
                sums.update =
                    add_square(sums.update, adam_update(weight, load(exp_avgs[k]), load(exp_avg_sqs[k]), scales.adam));
            }
        }
        return sums;
    }

    static __device__ __forceinline__ void second(
        const Place& at, const LambRule&, const Scales& scales, float step_size) {
        Weights<T, Master, kWidth> weights;
        Share<Moment, kWidth> exp_avgs, exp_avg_sqs;
        read<true, Again::kNo>(exp_avgs, at.exp_avg, at.numel);
        read<true, Again::kNo>(exp_avg_sqs, at.exp_avg_sq, at.numel);
        read<Again::kNo>(weights, at.param, at.master);
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
            const float weight = weights[i];
            const float update = adam_update(weight, load(exp_avgs[i]), load(exp_avg_sqs[i]), scales.adam);
            weights.set(i, adam_element(weight, update, step_size, scales.adam.keep));
        }
        write<Again::kNo>(weights, at.param, at.master);
    }

    static __device__ __forceinline__ void second_by_element(
        const Place& at, const LambRule&, const Scales& scales, float step_size) {
#pragma unroll 1
        for (int first = static_cast<int>(threadIdx.x); first < at.numel; first += kAhead * kThreads) {
            StoredWeight<T, Master> weights[kAhead]{};
            Moment exp_avgs[kAhead]{}, exp_avg_sqs[kAhead]{};
#pragma unroll
            for (int k = 0; k < kAhead; ++k) {
                const int i = first + k * kThreads;
                if (i >= at.numel) continue;
                weights[k] = read_weight<Master>(at.param, at.master, i);
                exp_avgs[k] = at.exp_avg[i];
                exp_avg_sqs[k] = at.exp_avg_sq[i];
            }
#pragma unroll
            for (int k = 0; k < kAhead; ++k) {
                const int i = first + k * kThreads;
                if (i >= at.numel) break;
                const float weight = weights[k].value();
                const float update = adam_update(weight, load(exp_avgs[k]), load(exp_avg_sqs[k]), scales.adam);
                write_weight<Master>(adam_element(weight, update, step_size, scales.adam.keep), at.param, at.master, i);
            }
        }
    }
};

}  // namespace

cudaError_t lamb_step_(const LambArgs& args, cudaStream_t stream) {
    return with_mix(args, [&]<typename T, bool Master, bool Rounded>(const auto& mix) {
        return two_passes<Lamb<T, Master, Rounded>>(args, args, args.rule, mix, stream);
    });
}

}  // namespace ddpcore::cuda
