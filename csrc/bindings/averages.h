// The calls of averages and sums: tensors are checked and converted to the structs of args.h.
#pragma once

#include <algorithm>

#include "steps.h"

namespace ddpcore {

inline Noise noise_of(double std, int64_t seed, int64_t step, int64_t first) {
    return {static_cast<float>(std), static_cast<uint64_t>(seed), static_cast<uint64_t>(step), first};
}

struct MixCall {
    std::vector<const void*> peers;
    std::vector<float> peer_weights;
    Tensor partials;
    Tensor sums;
    MixArgs args{};

    MixCall(
        const Tensor& weights, const Tensors& peer_tensors, double self_weight,
        const std::vector<double>& weights_of_peers, const Noise& noise, const std::optional<Tensor>& out)
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
        args = {
            weights.mutable_data_ptr(),
            peers.data(),
            peer_weights.data(),
            static_cast<int64_t>(peers.size()),
            static_cast<float>(self_weight),
            weights.numel(),
            dtype_of(weights, "weights"),
            partials.mutable_data_ptr<double>(),
            sums.mutable_data_ptr<double>(),
            noise};
        if (out.has_value()) {
            check_like(weights, *out, "weights", "out");
            args.source = args.weights;
            args.weights = out->mutable_data_ptr();
            STD_TORCH_CHECK(
                std::find(peers.begin(), peers.end(), args.weights) == peers.end() || weights.numel() == 0,
                "ddpcore: out must not be a peer");
        }
    }
};

// The arguments of the mix before a step. Without peers the step has no mix.
struct MixArguments {
    const std::optional<Tensors>& peers;
    double self_weight;
    const std::optional<std::vector<double>>& peer_weights;
    const std::optional<std::vector<int64_t>>& offsets;
    Noise noise;
    const std::optional<Tensor>& out;
};

// The mix before a step: param i is elements [offsets[i], ...) of one row, and of the rows of peers and out.
struct StepMix {
    std::vector<const void*> peers;
    std::vector<float> peer_weights;
    MixArgs args{};

    // Moves the params of the step to their places in out.
    template <typename Call>
    StepMix(Call& call, const Tensors& params, const MixArguments& mix, Passes passes = Passes::kBoth) {
        if (!mix.peers.has_value()) return;
        STD_TORCH_CHECK(
            mix.peer_weights.has_value() && mix.offsets.has_value(), "ddpcore: peers need peer_weights and offsets");
        const std::vector<int64_t>& offsets = *mix.offsets;
        const GradScaling& scaling = call.args.scaling;
        STD_TORCH_CHECK(
            !call.args.masters && !call.args.rounded_states && scaling.grad_scale == nullptr &&
                scaling.found_inf == nullptr && passes == Passes::kBoth,
            "ddpcore: a step with a mix takes no masters, state_firsts, grad_scale, found_inf or passes: call mix_ "
            "first, and then the step without a mix");
        const Tensor& like = params[0];
        const int64_t size = like.element_size();
        STD_TORCH_CHECK(offsets.size() == params.size(), "ddpcore: offsets must have the length of params");
        STD_TORCH_CHECK(
            mix.peer_weights->size() == mix.peers->size(), "ddpcore: peers and peer_weights must have the same length");
        int64_t least = 0;    // the length of a row
        char* row = nullptr;  // an empty tensor has no address
        for (size_t i = 0; i < params.size() && row == nullptr; ++i) {
            if (params[i].numel() > 0) row = static_cast<char*>(params[i].mutable_data_ptr()) - offsets[i] * size;
        }
        for (size_t i = 0; i < params.size(); ++i) {
            STD_TORCH_CHECK(
                offsets[i] >= 0 && is_dense(params[i]) &&
                    (params[i].numel() == 0 || params[i].const_data_ptr() == row + offsets[i] * size),
                "ddpcore: params must be dense views of one row, from offsets on");
            least = std::max(least, offsets[i] + params[i].numel());
        }
        for (const Tensor& peer : *mix.peers) {
            check_row(like, peer, least, "a peer");
            STD_TORCH_CHECK(
                peer.const_data_ptr() != row || least == 0, "ddpcore: a peer must not be the weights themselves");
            peers.push_back(peer.const_data_ptr());
        }
        for (double weight : *mix.peer_weights) peer_weights.push_back(static_cast<float>(weight));
        args = {
            row,
            peers.data(),
            peer_weights.data(),
            static_cast<int64_t>(peers.size()),
            static_cast<float>(mix.self_weight),
            least,
            call.args.dtype,
            nullptr,
            nullptr,
            mix.noise};
        if (mix.out.has_value()) {
            check_row(like, *mix.out, least, "out");
            args.source = row;
            args.weights = mix.out->mutable_data_ptr();
            STD_TORCH_CHECK(
                std::find(peers.begin(), peers.end(), args.weights) == peers.end() || least == 0,
                "ddpcore: out must not be a peer");
        }
        for (size_t i = 0; i < params.size(); ++i) {
            call.segments[i].param = static_cast<char*>(args.weights) + offsets[i] * size;
        }
        call.args.mix = &args;
    }
    StepMix(const StepMix&) = delete;

  private:
    static void check_row(const Tensor& like, const Tensor& row, int64_t least, const char* name) {
        STD_TORCH_CHECK(
            row.dim() == 1 && row.is_contiguous() && row.numel() >= least && row.scalar_type() == like.scalar_type() &&
                same_device(row, like),
            "ddpcore: ", name, " must be a contiguous row with the dtype and device of params, as long as theirs");
    }
};

struct StackedMixCall {
    std::vector<const void*> others;
    Tensor partials;
    Tensor sums;
    bool distances;
    StackedMixArgs args{};

    StackedMixCall(
        const Tensor& weights, const Tensors& other_rows, const Tensor& offsets, const Tensor& columns,
        const Tensor& values, bool distances)
        : partials(weights), sums(weights), distances(distances) {  // replaced below, after the checks of the shape
        STD_TORCH_CHECK(weights.dim() == 2, "ddpcore: weights must be [learners, parameters]");
        check_flat(weights, "weights");
        const int64_t num_learners = weights.size(0), numel = weights.size(1);
        for (const Tensor& other : other_rows) {
            STD_TORCH_CHECK(
                other.dim() == 1 && other.size(0) == numel && other.is_contiguous() &&
                    other.scalar_type() == weights.scalar_type() && same_device(other, weights),
                "ddpcore: a row of others must be contiguous [parameters], with the dtype and device of weights");
            const auto* row = static_cast<const char*>(other.const_data_ptr());
            const auto* begin = static_cast<const char*>(weights.const_data_ptr());
            const int64_t size = weights.element_size();
            STD_TORCH_CHECK(
                row + numel * size <= begin || row >= begin + weights.numel() * size || weights.numel() == 0,
                "ddpcore: a row of others must not lie in weights");
            others.push_back(row);
        }
        check_vector(weights, offsets, ScalarType::Long, num_learners + 1, "offsets must be int64 [learners + 1]");
        check_vector(weights, columns, ScalarType::Long, columns.numel(), "columns must be int64 [entries]");
        check_vector(weights, values, ScalarType::Float, columns.numel(), "values must be float32 [entries]");
        partials = new_sums(weights, {num_blocks_of(numel), num_learners});
        sums = new_sums(weights, {num_learners});
        args = {
            weights.mutable_data_ptr(),
            others.data(),
            static_cast<int64_t>(others.size()),
            offsets.const_data_ptr<int64_t>(),
            columns.const_data_ptr<int64_t>(),
            values.const_data_ptr<float>(),
            num_learners,
            numel,
            dtype_of(weights, "weights"),
            partials.mutable_data_ptr<double>(),
            sums.mutable_data_ptr<double>()};
        num_entries = columns.numel();
    }

    // Checks the entries, which must be in host memory.
    void check_entries() const {
        bool ascending = args.offsets[0] == 0 && args.offsets[args.num_learners] == num_entries;
        for (int64_t j = 0; j < args.num_learners; ++j) ascending &= args.offsets[j] <= args.offsets[j + 1];
        STD_TORCH_CHECK(ascending, "ddpcore: offsets must ascend from 0 to the number of entries");
        const int64_t num_rows = args.num_learners + args.num_others;
        for (int64_t entry = 0; entry < num_entries; ++entry) {
            const int64_t column = args.columns[entry];
            STD_TORCH_CHECK(
                column >= 0 && column < num_rows, "ddpcore: column ", column, " names no row: there are ", num_rows);
        }
    }

    int64_t num_entries = 0;

  private:
    static void check_vector(
        const Tensor& weights, const Tensor& vector, ScalarType dtype, int64_t numel, const char* what) {
        STD_TORCH_CHECK(
            vector.dim() == 1 && vector.numel() == numel && vector.is_contiguous() && vector.scalar_type() == dtype &&
                same_device(vector, weights),
            "ddpcore: ", what, ", contiguous, on the device of weights");
    }
};

struct AverageCall {
    std::vector<void*> rows;
    std::optional<Tensor> partials, sums;
    AverageArgs args{};

    // A tensor is a row [numel], or rows [n, numel] that may be apart.
    AverageCall(const Tensors& tensors, int64_t size) {
        STD_TORCH_CHECK(!tensors.empty(), "ddpcore: an average needs at least one row");
        const Tensor& like = tensors[0];
        const int64_t numel = like.dim() == 0 ? 1 : like.size(like.dim() - 1);
        for (const Tensor& tensor : tensors) {
            const int64_t dim = tensor.dim();
            STD_TORCH_CHECK(
                (dim == 1 || dim == 2) && tensor.size(dim - 1) == numel && (numel < 2 || tensor.stride(dim - 1) == 1) &&
                    tensor.scalar_type() == like.scalar_type() && same_device(tensor, like),
                "ddpcore: rows must be contiguous, of one length, dtype and device");
            auto* row = static_cast<char*>(tensor.mutable_data_ptr());
            const int64_t bytes = dim == 1 ? 0 : tensor.stride(0) * tensor.element_size();
            for (int64_t i = 0, num = dim == 1 ? 1 : tensor.size(0); i < num; ++i) rows.push_back(row + i * bytes);
        }
        const auto num_rows = static_cast<int64_t>(rows.size());
        STD_TORCH_CHECK(size > 0 && num_rows % size == 0, "ddpcore: size must divide the number of rows, ", num_rows);
        const auto row_bytes = static_cast<int64_t>(numel * like.element_size());
        std::vector<void*> sorted = rows;
        std::sort(sorted.begin(), sorted.end());
        for (size_t i = 1; i < sorted.size(); ++i) {
            STD_TORCH_CHECK(
                static_cast<char*>(sorted[i]) - static_cast<char*>(sorted[i - 1]) >= row_bytes,
                "ddpcore: rows must not overlap in memory, because each is overwritten: pass copies of them");
        }
        partials = new_sums(like, {num_blocks_of(numel), num_rows});
        sums = new_sums(like, {num_rows});
        args = {
            rows.data(),
            num_rows,
            size,
            numel,
            dtype_of(like, "rows"),
            partials->mutable_data_ptr<double>(),
            sums->mutable_data_ptr<double>()};
    }
};

struct NormCall {
    DenseCopies copies;
    std::vector<NormSegment> segments;
    int64_t numel = 0;
    NormArgs args{};

    explicit NormCall(const Tensors& tensors) {
        STD_TORCH_CHECK(!tensors.empty(), "ddpcore: a norm needs at least one tensor");
        int64_t num_blocks = 0;
        for (const Tensor& tensor : tensors) {
            STD_TORCH_CHECK(
                tensor.scalar_type() == tensors[0].scalar_type() && same_device(tensor, tensors[0]),
                "ddpcore: all tensors of one call must have one dtype and one device");
            segments.push_back({copies.dense(tensor, false).const_data_ptr(), tensor.numel(), num_blocks});
            num_blocks += num_blocks_of(tensor.numel());
            numel += tensor.numel();
        }
        args.segments = segments.data();
        args.num_segments = static_cast<int64_t>(segments.size());
        args.num_blocks = num_blocks;
        args.dtype = dtype_of(tensors[0], "tensors");
    }
};

struct GramCall {
    std::vector<const void*> rows;
    std::vector<GramSegment> segments;
    Tensor partials, sums;
    GramArgs args{};

    GramCall(const Tensors& tensors, const std::vector<int64_t>& bounds, const std::optional<Tensor>& origin) {
        STD_TORCH_CHECK(!tensors.empty(), "ddpcore: noise sums need at least one row");
        const Tensor& like = tensors[0];
        for (const Tensor& row : tensors) rows.push_back(row_of(like, row, "rows"));
        const void* from = origin.has_value() ? row_of(like, *origin, "origin") : nullptr;
        bool fits = !bounds.empty() && bounds.front() == 0 && bounds.back() == like.numel();
        for (size_t s = 0; fits && s + 1 < bounds.size(); ++s) fits = bounds[s] <= bounds[s + 1];
        STD_TORCH_CHECK(fits, "ddpcore: bounds must ascend from 0 to the number of elements, ", like.numel());
        int64_t num_blocks = 0;
        for (size_t s = 0; s + 1 < bounds.size(); ++s) {
            segments.push_back({bounds[s], bounds[s + 1] - bounds[s], num_blocks});
            num_blocks += num_blocks_of(segments.back().numel);
        }
        const auto num_rows = static_cast<int64_t>(rows.size()), num_segments = static_cast<int64_t>(segments.size());
        partials = new_sums(like, {num_blocks, num_pairs_of(num_rows)});
        sums = new_sums(like, {num_segments, num_rows, num_rows});
        args = {
            rows.data(),
            from,
            num_rows,
            segments.data(),
            num_segments,
            num_blocks,
            dtype_of(like, "rows"),
            partials.mutable_data_ptr<double>(),
            sums.mutable_data_ptr<double>()};
    }

  private:
    static const void* row_of(const Tensor& like, const Tensor& row, const char* name) {
        STD_TORCH_CHECK(
            row.dim() == 1 && row.is_contiguous() && row.numel() == like.numel() &&
                row.scalar_type() == like.scalar_type() && same_device(row, like),
            "ddpcore: ", name, " must be contiguous rows of one length, dtype and device");
        return row.const_data_ptr();
    }
};

}  // namespace ddpcore
