// From tensors to the plain structs of args.h, with every check written once for both backends.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "../args.h"

namespace ddpcore {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline DType dtype_of(const Tensor& tensor, const char* name) {
    switch (tensor.scalar_type()) {
        case ScalarType::Float: return DType::kFloat32;
        case ScalarType::BFloat16: return DType::kBFloat16;
        case ScalarType::Half: return DType::kFloat16;
        default: STD_TORCH_CHECK(false, "ddpcore: ", name, " must be float32, bfloat16 or float16");
    }
    return DType::kFloat32;
}

inline bool same_device(const Tensor& left, const Tensor& right) {
    return left.device().type() == right.device().type() && left.get_device_index() == right.get_device_index();
}

// Whether the elements of both tensors stand in the same order in memory, without gaps or overlaps in the first one.
inline bool same_dense_layout(const Tensor& left, const Tensor& right) {
    if (left.dim() != right.dim()) return false;
    bool same_strides = true;
    for (int64_t d = 0; d < left.dim(); ++d) {
        if (left.size(d) != right.size(d)) return false;
        same_strides = same_strides && (left.size(d) <= 1 || left.stride(d) == right.stride(d));
    }
    if (left.is_contiguous()) return right.is_contiguous();
    if (!same_strides) return false;
    // Dense means: the strides are those of some order of the dimensions. Each step finds the next one outwards.
    std::vector<bool> placed(static_cast<size_t>(left.dim()), false);
    int64_t expected = 1;
    for (int64_t step = 0; step < left.dim(); ++step) {
        bool found = false;
        for (int64_t d = 0; d < left.dim() && !found; ++d) {
            const auto slot = static_cast<size_t>(d);
            if (placed[slot] || (left.size(d) > 1 && left.stride(d) != expected)) continue;
            placed[slot] = found = true;
            expected *= left.size(d);
        }
        if (!found) return false;
    }
    return true;
}

inline void check_like(const Tensor& reference, const Tensor& tensor, const char* reference_name, const char* name) {
    STD_TORCH_CHECK(
        same_device(reference, tensor) && reference.scalar_type() == tensor.scalar_type(), "ddpcore: ", name,
        " must have the device and dtype of ", reference_name);
    STD_TORCH_CHECK(
        same_dense_layout(reference, tensor), "ddpcore: ", name, " must have the shape and strides of ", reference_name,
        ", both dense");
}

inline void check_flat(const Tensor& tensor, const char* name) {
    STD_TORCH_CHECK(tensor.is_contiguous(), "ddpcore: ", name, " must be contiguous");
}

inline SgdRule sgd_rule(
    double lr, double momentum, double dampening, double weight_decay, bool nesterov, bool maximize, bool first_step) {
    return {
        static_cast<float>(lr),
        static_cast<float>(momentum),
        static_cast<float>(1.0 - dampening),
        static_cast<float>(weight_decay),
        maximize ? -1.0f : 1.0f,
        nesterov,
        first_step};
}

struct SgdCall {
    std::vector<SgdSegment> segments;
    SgdArgs args{};

    SgdCall(
        const std::vector<Tensor>& params, const std::vector<Tensor>& grads,
        const std::vector<Tensor>& momentum_buffers, const SgdRule& rule) {
        const bool momentum = rule.momentum != 0.0f;
        STD_TORCH_CHECK(grads.size() == params.size(), "ddpcore: params and grads must have the same length");
        STD_TORCH_CHECK(
            !momentum || momentum_buffers.size() == params.size(),
            "ddpcore: with momentum, momentum_buffers must have the length of params");
        segments.reserve(params.size());
        int64_t num_blocks = 0;
        for (size_t i = 0; i < params.size(); ++i) {
            STD_TORCH_CHECK(
                params[i].scalar_type() == params[0].scalar_type() && same_device(params[i], params[0]),
                "ddpcore: all params of one call must have one dtype and one device");
            check_like(params[i], grads[i], "its param", "a grad");
            if (momentum) check_like(params[i], momentum_buffers[i], "its param", "a momentum buffer");
            const int64_t numel = params[i].numel();
            segments.push_back(
                {params[i].mutable_data_ptr(), grads[i].const_data_ptr(),
                 momentum ? momentum_buffers[i].mutable_data_ptr() : nullptr, numel, num_blocks});
            num_blocks += num_blocks_of(numel);
        }
        const DType dtype = params.empty() ? DType::kFloat32 : dtype_of(params[0], "params");
        args = {segments.data(), static_cast<int64_t>(segments.size()), num_blocks, dtype, rule};
    }
};

// A new float64 tensor on the device of `like`: sums that a kernel returns, or its scratch.
inline Tensor new_sums(const Tensor& like, std::vector<int64_t> sizes) {
    return torch::stable::new_empty(like, sizes, ScalarType::Double);
}

struct MixCall {
    std::vector<const void*> peers;
    std::vector<float> peer_weights;
    Tensor partials;
    Tensor sums;
    MixArgs args{};

    MixCall(
        const Tensor& weights, const std::vector<Tensor>& peer_tensors, double self_weight,
        const std::vector<double>& weights_of_peers)
        : partials(new_sums(weights, {num_blocks_of(weights.numel()), static_cast<int64_t>(peer_tensors.size())})),
          sums(new_sums(weights, {static_cast<int64_t>(peer_tensors.size())})) {
        check_flat(weights, "weights");
        STD_TORCH_CHECK(
            weights_of_peers.size() == peer_tensors.size(),
            "ddpcore: peers and peer_weights must have the same length");
        for (const Tensor& peer : peer_tensors) {
            check_like(weights, peer, "weights", "a peer");
            STD_TORCH_CHECK(
                peer.const_data_ptr() != weights.const_data_ptr() || weights.numel() == 0,
                "ddpcore: a peer must not be the weights themselves");
            peers.push_back(peer.const_data_ptr());
        }
        for (double weight : weights_of_peers) peer_weights.push_back(static_cast<float>(weight));
        args = {weights.mutable_data_ptr(),
                peers.data(),
                peer_weights.data(),
                static_cast<int64_t>(peers.size()),
                static_cast<float>(self_weight),
                weights.numel(),
                dtype_of(weights, "weights"),
                partials.mutable_data_ptr<double>(),
                sums.mutable_data_ptr<double>()};
    }
};

inline MixSgdArgs mix_sgd_args(
    const MixArgs& mix, const Tensor& weights, const Tensor& grad, const std::optional<Tensor>& momentum_buffer,
    const SgdRule& rule) {
    const bool momentum = rule.momentum != 0.0f;
    check_like(weights, grad, "weights", "grad");
    STD_TORCH_CHECK(!momentum || momentum_buffer.has_value(), "ddpcore: momentum needs a momentum_buffer");
    if (momentum) check_like(weights, *momentum_buffer, "weights", "momentum_buffer");
    return {mix, grad.const_data_ptr(), momentum ? momentum_buffer->mutable_data_ptr() : nullptr, rule};
}

struct StackedMixCall {
    Tensor partials;
    Tensor sums;
    StackedMixArgs args{};

    StackedMixCall(const Tensor& weights, const Tensor& matrix)
        : partials(weights), sums(weights) {  // replaced below, once the shape is known to be right
        STD_TORCH_CHECK(weights.dim() == 2, "ddpcore: weights must be [learners, parameters]");
        check_flat(weights, "weights");
        check_flat(matrix, "matrix");
        const int64_t num_learners = weights.size(0);
        STD_TORCH_CHECK(
            matrix.dim() == 2 && matrix.size(0) == num_learners && matrix.size(1) == num_learners,
            "ddpcore: matrix must be [learners, learners]");
        STD_TORCH_CHECK(
            matrix.scalar_type() == ScalarType::Float && same_device(matrix, weights),
            "ddpcore: matrix must be float32 on the device of weights");
        partials = new_sums(weights, {num_blocks_of(weights.size(1)), num_learners});
        sums = new_sums(weights, {num_learners});
        args = {
            weights.mutable_data_ptr(),
            matrix.const_data_ptr<float>(),
            num_learners,
            weights.size(1),
            dtype_of(weights, "weights"),
            partials.mutable_data_ptr<double>(),
            sums.mutable_data_ptr<double>()};
    }
};

struct NormCall {
    std::vector<NormSegment> segments;
    Tensor partials;
    Tensor sums;
    NormArgs args{};

    explicit NormCall(const std::vector<Tensor>& tensors)
        : partials(first_of(tensors)), sums(first_of(tensors)) {  // replaced below, once the sizes are known
        int64_t num_blocks = 0;
        for (const Tensor& tensor : tensors) {
            STD_TORCH_CHECK(
                tensor.scalar_type() == tensors[0].scalar_type() && same_device(tensor, tensors[0]),
                "ddpcore: all tensors of one call must have one dtype and one device");
            STD_TORCH_CHECK(same_dense_layout(tensor, tensor), "ddpcore: tensors must be dense");
            segments.push_back({tensor.const_data_ptr(), tensor.numel(), num_blocks});
            num_blocks += num_blocks_of(tensor.numel());
        }
        partials = new_sums(tensors[0], {num_blocks});
        sums = new_sums(tensors[0], {static_cast<int64_t>(tensors.size())});
        args = {
            segments.data(),
            static_cast<int64_t>(segments.size()),
            num_blocks,
            dtype_of(tensors[0], "tensors"),
            partials.mutable_data_ptr<double>(),
            sums.mutable_data_ptr<double>()};
    }

  private:
    static const Tensor& first_of(const std::vector<Tensor>& tensors) {
        STD_TORCH_CHECK(!tensors.empty(), "ddpcore: segment_norms needs at least one tensor");
        return tensors[0];
    }
};

}  // namespace ddpcore
