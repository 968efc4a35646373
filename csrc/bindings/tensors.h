// Checks and conversions of tensors, for both backends.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../args.h"

namespace ddpcore {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

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

// Whether the elements occupy their memory without gaps or overlaps, in some order of the dimensions.
inline bool is_dense(const Tensor& tensor) {
    if (tensor.is_contiguous()) return true;
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    std::vector<bool> placed(sizes.size(), false);
    int64_t expected = 1;
    for (size_t step = 0; step < sizes.size(); ++step) {  // each step finds the next dimension outwards
        bool found = false;
        for (size_t d = 0; d < sizes.size() && !found; ++d) {
            if (placed[d] || (sizes[d] > 1 && strides[d] != expected)) continue;
            placed[d] = found = true;
            expected *= sizes[d];
        }
        if (!found) return false;
    }
    return true;
}

inline bool same_shape(const Tensor& left, const Tensor& right) {
    const auto sizes = left.sizes(), others = right.sizes();
    return sizes.size() == others.size() && std::equal(sizes.begin(), sizes.end(), others.begin());
}

// Whether two tensors of the same shape, the first one dense, have their elements in the same order in memory.
inline bool same_order(const Tensor& dense, const Tensor& tensor) {
    const auto sizes = dense.sizes(), strides = dense.strides(), others = tensor.strides();
    for (size_t d = 0; d < sizes.size(); ++d) {
        if (sizes[d] > 1 && strides[d] != others[d]) return dense.numel() == 0;
    }
    return true;
}

inline void check_fits(
    const Tensor& reference, const Tensor& tensor, ScalarType dtype, const char* reference_name, const char* name) {
    STD_TORCH_CHECK(
        same_device(reference, tensor) && tensor.scalar_type() == dtype, "ddpcore: ", name,
        dtype == reference.scalar_type() ? " must have the device and dtype of "
        : dtype == ScalarType::BFloat16  ? " must be bfloat16 on the device of "
                                         : " must be float32 on the device of ",
        reference_name);
    STD_TORCH_CHECK(same_shape(reference, tensor), "ddpcore: ", name, " must have the shape of ", reference_name);
}

// check_fits, and the tensor must have the strides of the reference: for tensors that are not copied.
inline void check_like(const Tensor& reference, const Tensor& tensor, const char* reference_name, const char* name) {
    check_fits(reference, tensor, reference.scalar_type(), reference_name, name);
    STD_TORCH_CHECK(
        is_dense(reference) && same_order(reference, tensor), "ddpcore: ", name, " must have the strides of ",
        reference_name, ", both dense");
}

inline void check_flat(const Tensor& tensor, const char* name) {
    STD_TORCH_CHECK(tensor.is_contiguous(), "ddpcore: ", name, " must be contiguous");
}

// A new float64 tensor on the device of `like`, for the sums of a kernel or its scratch.
inline Tensor new_sums(const Tensor& like, std::vector<int64_t> sizes) {
    return torch::stable::new_empty(like, sizes, ScalarType::Double);
}

// Copies of tensors whose strides the kernels cannot use. They exist during the call. copy_back() copies the results of
// the kernels to the original tensors.
class DenseCopies {
  public:
    // The tensor itself, or a dense copy.
    Tensor dense(const Tensor& tensor, bool written) {
        return is_dense(tensor) ? tensor : keep(tensor, torch::stable::contiguous(tensor), written);
    }

    // The tensor itself, or a copy in the order of `dense`.
    Tensor in_order_of(const Tensor& dense, const Tensor& tensor, bool written) {
        if (same_order(dense, tensor)) return tensor;
        int32_t dtype = 0, device_type = 0, device_index = 0;
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device_type));
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &device_index));
        AtenTensorHandle handle = nullptr;
        TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
            dense.dim(), dense.sizes().data(), dense.strides().data(), dtype, device_type, device_index, &handle));
        Tensor copy(handle);
        torch::stable::copy_(copy, tensor);
        return keep(tensor, copy, written);
    }

    void copy_back() {
        for (auto& [original, copy] : written_) torch::stable::copy_(original, copy);
    }

  private:
    Tensor keep(const Tensor& original, Tensor copy, bool written) {
        const auto sizes = original.sizes(), strides = original.strides();
        for (size_t d = 0; written && d < sizes.size();
             ++d) {  // checked here, because copy_back() runs after the kernels
            STD_TORCH_CHECK(
                sizes[d] < 2 || strides[d] != 0, "ddpcore: a tensor that is written must not overlap itself in memory");
        }
        (written ? written_ : read_).emplace_back(original, copy);
        return copy;
    }
    std::vector<std::pair<Tensor, Tensor>> written_, read_;
};

}  // namespace ddpcore
