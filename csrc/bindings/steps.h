// The calls of optimizer steps: lists of tensors are converted to segments and groups.
#pragma once

#include "tensors.h"

namespace ddpcore {

inline const float* scalar(const Tensor& like, const Tensor& tensor, const char* name) {
    STD_TORCH_CHECK(
        tensor.numel() == 1 && tensor.scalar_type() == ScalarType::Float && same_device(like, tensor),
        "ddpcore: ", name, " must be one float32 on the device of params");
    return tensor.const_data_ptr<float>();
}

inline float* mutable_scalar(const Tensor& like, const Tensor& tensor, const char* name) {
    scalar(like, tensor, name);
    return tensor.mutable_data_ptr<float>();
}

inline SgdRule sgd_rule(double momentum, double dampening, bool nesterov, bool decoupled) {
    return {static_cast<float>(momentum), static_cast<float>(1.0 - dampening), nesterov, decoupled};
}

// The arguments of every step beside its tensors, in the order of the schemas.
struct GroupLists {
    const std::vector<int64_t>& sizes;  // segments of each group, in the order of params
    const std::vector<double>& lr;
    const std::vector<double>& weight_decay;
    const Tensors& device_lr;           // empty, or one a group
    const Tensors& steps;               // empty, or one a group
    const std::vector<int64_t>* adapt;  // one a group

    std::vector<StepGroup> groups(const Tensor& like) const {
        const size_t num_groups = sizes.size();
        STD_TORCH_CHECK(
            lr.size() == num_groups && weight_decay.size() == num_groups &&
                (device_lr.empty() || device_lr.size() == num_groups) &&
                (steps.empty() || steps.size() == num_groups) && (adapt == nullptr || adapt->size() == num_groups),
            "ddpcore: lr, weight_decay, device_lr, steps and adapt must have the length of group_sizes");
        std::vector<StepGroup> groups(num_groups);
        for (size_t i = 0; i < num_groups; ++i) {
            groups[i] = {
                static_cast<float>(lr[i]), static_cast<float>(weight_decay[i]),
                device_lr.empty() ? nullptr : scalar(like, device_lr[i], "a device_lr"),
                steps.empty() ? nullptr : mutable_scalar(like, steps[i], "a step"),
                adapt != nullptr && (*adapt)[i] != 0};
        }
        return groups;
    }
};

struct ScalingArguments {
    const std::optional<Tensor>& grad_scale;
    const std::optional<Tensor>& found_inf;
    const std::optional<Tensor>& norm_squared;
    double max_norm;
    bool maximize;

    GradScaling scaling(const Tensor& like) const {
        GradScaling result{nullptr, nullptr, nullptr, static_cast<float>(max_norm), maximize};
        if (grad_scale.has_value()) result.grad_scale = scalar(like, *grad_scale, "grad_scale");
        if (found_inf.has_value()) result.found_inf = scalar(like, *found_inf, "found_inf");
        if (norm_squared.has_value()) {
            STD_TORCH_CHECK(
                norm_squared->numel() == 1 && norm_squared->scalar_type() == ScalarType::Double &&
                    same_device(like, *norm_squared),
                "ddpcore: norm_squared must be one float64 on the device of params");
            result.norm_squared = norm_squared->const_data_ptr<double>();
        }
        return result;
    }
};

// Whether the states of a step are bf16 and rounded stochastically, and by which random numbers.
struct StateArguments {
    const std::vector<int64_t>& firsts;  // empty, or the index of each param's first element among the random numbers
    int64_t seed;

    bool rounded(const Tensors& params, const Tensors& masters, const Tensors& steps) const {
        bool fits = firsts.empty() || (firsts.size() == params.size() && masters.empty() && !steps.empty());
        for (const int64_t first : firsts) fits = fits && first >= 0 && first % 4 == 0;
        STD_TORCH_CHECK(
            fits,
            "ddpcore: state_firsts must be empty, or a multiple of 4 for each param, with steps and without masters");
        return !firsts.empty();
    }

    template <typename Segment>
    void place(std::vector<Segment>& segments, StepArgs<Segment>& args) const {
        args.rounded_states = true;
        args.state_seed = static_cast<uint64_t>(seed);
        for (size_t i = 0; i < segments.size(); ++i) segments[i].first_index = firsts[i];
    }
};

// The params, gradients and masters of a step, in place or as dense copies, and their dtype and sizes.
struct StepTensors {
    DenseCopies copies;
    std::vector<StepGroup> groups;
    DType dtype = DType::kFloat32;
    bool masters = false;
    int64_t num_blocks = 0;
    int64_t numel = 0;

    // Calls add(index, group, param, numel, first_block), with a dense param, for every segment.
    template <typename Add>
    void fill(
        const Tensors& params, const Tensors& grads, const Tensors& master_list, const GroupLists& lists, Add&& add) {
        STD_TORCH_CHECK(!params.empty(), "ddpcore: a step needs at least one param");
        STD_TORCH_CHECK(grads.size() == params.size(), "ddpcore: params and grads must have the same length");
        dtype = dtype_of(params[0], "params");
        masters = !master_list.empty();
        STD_TORCH_CHECK(
            !masters || (master_list.size() == params.size() && dtype != DType::kFloat32),
            "ddpcore: masters must be empty, or one a param, of bfloat16 or float16 params");
        groups = lists.groups(params[0]);
        size_t group = 0;
        int64_t left = lists.sizes.empty() ? 0 : lists.sizes[0];
        for (size_t i = 0; i < params.size(); ++i) {
            while (left == 0 && group + 1 < groups.size()) left = lists.sizes[++group];
            STD_TORCH_CHECK(left > 0, "ddpcore: group_sizes must add up to the number of params");
            --left;
            STD_TORCH_CHECK(
                params[i].scalar_type() == params[0].scalar_type() && same_device(params[i], params[0]),
                "ddpcore: all params of one call must have one dtype and one device");
            const int64_t numel_i = params[i].numel();
            add(i, static_cast<int64_t>(group), copies.dense(params[i], true), numel_i, num_blocks);
            num_blocks += num_blocks_of(numel_i);
            numel += numel_i;
        }
        while (left == 0 && group + 1 < groups.size()) left = lists.sizes[++group];
        STD_TORCH_CHECK(left == 0, "ddpcore: group_sizes must add up to the number of params");
    }

    const void* read(const Tensor& param, const Tensor& tensor, const char* name) {
        check_fits(param, tensor, param.scalar_type(), "its param", name);
        return copies.in_order_of(param, tensor, false).const_data_ptr();
    }
    void* write(const Tensor& param, const Tensor& tensor, ScalarType stored, const char* name) {
        check_fits(param, tensor, stored, "its param", name);
        return copies.in_order_of(param, tensor, true).mutable_data_ptr();
    }
    float* write_float(const Tensor& param, const Tensor& tensor, const char* name) {
        return static_cast<float*>(write(param, tensor, ScalarType::Float, name));
    }
};

// A float64 buffer that an optimizer keeps between steps: at its start two partial sums a block, at its end the
// counters of the CUDA kernels. So partial sums of a large step, as of all learners, never overwrite the counters of a
// smaller step.
struct Scratch {
    NormPartials* partials = nullptr;
    uint64_t* tickets = nullptr;

    Scratch(const Tensor& like, const Tensor& scratch, int64_t num_blocks, size_t num_segments) {
        const int64_t needed = 2 * num_blocks + static_cast<int64_t>(num_segments) + 2;
        STD_TORCH_CHECK(
            scratch.scalar_type() == ScalarType::Double && scratch.is_contiguous() && same_device(like, scratch) &&
                scratch.numel() >= needed,
            "ddpcore: scratch must be float64 on the device of params, at least ", needed, " elements, zero at first");
        partials = static_cast<NormPartials*>(scratch.mutable_data_ptr());
        const int64_t num_tickets = static_cast<int64_t>(num_segments) + 2;
        tickets = static_cast<uint64_t*>(scratch.mutable_data_ptr()) + scratch.numel() - num_tickets;
    }
};

inline Trust* trust_rows(const Tensor& like, const Tensor& trust, size_t num_segments) {
    STD_TORCH_CHECK(
        trust.scalar_type() == ScalarType::Double && trust.is_contiguous() && same_device(like, trust) &&
            trust.numel() == 3 * static_cast<int64_t>(num_segments),
        "ddpcore: trust must be float64 [params, 3] on the device of params");
    return static_cast<Trust*>(trust.mutable_data_ptr());
}

template <typename Segment>
StepArgs<Segment> step_args(
    const std::vector<Segment>& segments, const StepTensors& tensors, const GradScaling& scaling) {
    return {
        segments.data(),
        static_cast<int64_t>(segments.size()),
        tensors.num_blocks,
        tensors.groups.data(),
        static_cast<int64_t>(tensors.groups.size()),
        tensors.dtype,
        tensors.masters,
        scaling,
        nullptr};
}

// The passes of one call, and the sums of squares between them.
struct PassArguments {
    const std::string& name;
    const std::optional<Tensor>& sums;

    Passes passes() const {
        if (name == "both") return Passes::kBoth;
        if (name == "first") return Passes::kFirst;
        STD_TORCH_CHECK(name == "second", "ddpcore: passes must be both, first or second, not ", name);
        return Passes::kSecond;
    }

    NormPartials* squares(const Tensor& like, size_t num_segments) const {
        const bool fits = sums.has_value() && sums->scalar_type() == ScalarType::Double && sums->is_contiguous() &&
                          same_device(like, *sums) && sums->numel() == 2 * static_cast<int64_t>(num_segments);
        STD_TORCH_CHECK(
            passes() == Passes::kBoth ? !sums.has_value() : fits,
            "ddpcore: squares must be float64 [params, 2] on the device of params, or None with passes 'both'");
        return sums.has_value() ? static_cast<NormPartials*>(sums->mutable_data_ptr()) : nullptr;
    }
};

// The tensors of an SGD or LARS step.
struct SgdCall {
    StepTensors tensors;
    std::vector<SgdSegment> segments;
    SgdArgs args{};

    SgdCall(
        const Tensors& params, const Tensors& grads, const Tensors& momentum_buffers, const Tensors& masters,
        const GroupLists& lists, const SgdRule& rule, const ScalingArguments& scaling, const StateArguments& states) {
        const bool momentum = rule.momentum != 0.0f, rounded = states.rounded(params, masters, lists.steps) && momentum;
        STD_TORCH_CHECK(
            !momentum || momentum_buffers.size() == params.size(),
            "ddpcore: with momentum, momentum_buffers must have the length of params");
        segments.reserve(params.size());
        tensors.fill(
            params, grads, masters, lists, [&](size_t i, int64_t group, Tensor param, int64_t numel, int64_t block) {
                const ScalarType stored = rounded           ? ScalarType::BFloat16
                                          : masters.empty() ? param.scalar_type()
                                                            : ScalarType::Float;
                segments.push_back(
                    {param.mutable_data_ptr(), tensors.read(param, grads[i], "a grad"),
                     momentum ? tensors.write(param, momentum_buffers[i], stored, "a momentum buffer") : nullptr,
                     masters.empty() ? nullptr : tensors.write_float(param, masters[i], "a master"), numel, block,
                     group});
            });
        args = {step_args(segments, tensors, scaling.scaling(params[0])), rule};
        if (rounded) states.place(segments, args);
    }
};

// The tensors of an Adam or LAMB step.
struct AdamCall {
    StepTensors tensors;
    std::vector<AdamSegment> segments;
    AdamArgs args{};

    AdamCall(
        const Tensors& params, const Tensors& grads, const Tensors& exp_avgs, const Tensors& exp_avg_sqs,
        const Tensors& masters, const GroupLists& lists, const AdamRule& rule, const ScalingArguments& scaling,
        const StateArguments& states) {
        STD_TORCH_CHECK(
            exp_avgs.size() == params.size() && exp_avg_sqs.size() == params.size(),
            "ddpcore: exp_avgs and exp_avg_sqs must have the length of params");
        STD_TORCH_CHECK(lists.steps.size() == lists.sizes.size(), "ddpcore: steps must have the length of group_sizes");
        const bool rounded = states.rounded(params, masters, lists.steps);
        const ScalarType stored = rounded ? ScalarType::BFloat16 : ScalarType::Float;
        segments.reserve(params.size());
        tensors.fill(
            params, grads, masters, lists, [&](size_t i, int64_t group, Tensor param, int64_t numel, int64_t block) {
                segments.push_back(
                    {param.mutable_data_ptr(), tensors.read(param, grads[i], "a grad"),
                     tensors.write(param, exp_avgs[i], stored, "an exp_avg"),
                     tensors.write(param, exp_avg_sqs[i], stored, "an exp_avg_sq"),
                     masters.empty() ? nullptr : tensors.write_float(param, masters[i], "a master"), numel, block,
                     group});
            });
        args = {step_args(segments, tensors, scaling.scaling(params[0])), rule};
        if (rounded) states.place(segments, args);
    }
};

inline LarsVariant lars_variant(const std::string& name) {
    if (name == "you2017") return LarsVariant::kYou2017;
    if (name == "scaled_grad") return LarsVariant::kScaledGrad;
    STD_TORCH_CHECK(name == "scaled_lr", "ddpcore: variant must be you2017, scaled_grad or scaled_lr, not ", name);
    return LarsVariant::kScaledLr;
}

inline AdamDecay adam_decay(const std::string& name) {
    if (name == "in_update") return AdamDecay::kInUpdate;
    if (name == "coupled") return AdamDecay::kCoupled;
    STD_TORCH_CHECK(name == "decoupled", "ddpcore: decay_mode must be in_update, coupled or decoupled, not ", name);
    return AdamDecay::kDecoupled;
}

inline AdamRule adamw_rule(double beta1, double beta2, double eps, bool decoupled) {
    return {beta1, beta2, static_cast<float>(eps), true, decoupled ? AdamDecay::kDecoupled : AdamDecay::kCoupled};
}

inline LambRule lamb_rule(
    double beta1, double beta2, double eps, bool debias, const std::string& decay_mode, double min_ratio,
    double max_ratio, double min_weight_norm, double max_weight_norm) {
    return {
        {beta1, beta2, static_cast<float>(eps), debias, adam_decay(decay_mode)},
        static_cast<float>(min_ratio),
        static_cast<float>(max_ratio),
        static_cast<float>(min_weight_norm),
        static_cast<float>(max_weight_norm)};
}

inline LarsArgs adaptive_args(const SgdArgs& sgd, const LarsRule& rule, NormPartials* partials, Trust* trust) {
    return {sgd, rule, partials, trust};
}

inline LambArgs adaptive_args(const AdamArgs& adam, const LambRule& rule, NormPartials* partials, Trust* trust) {
    return {adam, rule, partials, trust, nullptr, 0};
}

}  // namespace ddpcore
