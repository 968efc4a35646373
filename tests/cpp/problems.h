// The tensors and arguments of one call of each kernel, with random contents; the tests compare what the call leaves.
#pragma once

#include <numeric>

#include "testing.h"

namespace ddpcore::test {

// Tensors of many sizes, some empty, also at both ends.
inline const std::vector<int64_t> kManySizes = {0, 1, 0, 0, 4096, 5, 8192, 0, 4097, 17, 12289, 3, 0};

template <typename T>
struct MixProblem {
    MixProblem(int64_t numel, int64_t num_peers, int64_t offset) : weights(numel, offset) {
        weights.randomize(1);
        for (int64_t k = 0; k < num_peers; ++k) {
            // Peers at other offsets than the weights, as slices of other buffers are.
            peers.push_back(std::make_unique<Buffer<T>>(numel, offset == 0 ? 0 : offset + k));
            peers.back()->randomize(static_cast<uint32_t>(100 + k));
            pointers.push_back(peers.back()->data());
            peer_weights.push_back(0.5f / static_cast<float>(k + 2) - (k == 3 ? 0.4f : 0.0f));
        }
        partials.assign(static_cast<size_t>(num_blocks() * num_peers), NAN);
    }

    MixArgs args() {
        return {
            .weights = weights.data(),
            .peers = pointers.data(),
            .peer_weights = peer_weights.data(),
            .num_peers = static_cast<int64_t>(peers.size()),
            .self_weight = 0.37f,
            .numel = weights.numel(),
            .dtype = dtype_of<T>(),
            .partials = partials.data(),
            .sums = nullptr,
            .noise = noise,
            .source = source};
    }

    int64_t num_blocks() const { return num_blocks_of(weights.numel()); }

    Buffer<T> weights;
    std::vector<std::unique_ptr<Buffer<T>>> peers;
    std::vector<const void*> pointers;
    std::vector<float> peer_weights;
    std::vector<double> partials;
    Noise noise{};
    const void* source = nullptr;  // of the weights before the mix, where that is not their own place
};

// Of a step and an index beyond 32 bits; the remainder of `first` says where in its four the first number stands.
inline Noise some_noise(int64_t first) {
    return {0.3f, 0x123456789abcdef0, (uint64_t{5} << 32) + 7, (int64_t{3} << 40) + first};
}

// A stack of learners, rows held elsewhere, and the matrix [num_learners, num_learners + num_others] that mixes them.
// Rows of their own memory, each at an offset.
template <typename T>
struct AverageProblem {
    AverageProblem(int64_t num_rows, int64_t size_, int64_t numel_, int64_t offset) : size(size_), numel(numel_) {
        for (int64_t k = 0; k < num_rows; ++k) {
            rows.push_back(std::make_unique<Buffer<T>>(numel, offset));
            rows.back()->randomize(static_cast<uint32_t>(7 + k));
            pointers.push_back(rows.back()->data());
        }
        partials.assign(static_cast<size_t>(num_blocks() * num_rows), NAN);
    }

    int64_t num_blocks() const { return num_blocks_of(numel); }
    AverageArgs args() {
        const auto num_rows = static_cast<int64_t>(rows.size());
        return {pointers.data(), num_rows, size, numel, dtype_of<T>(), partials.data(), nullptr};
    }

    int64_t size, numel;
    std::vector<std::unique_ptr<Buffer<T>>> rows;
    std::vector<void*> pointers;
    std::vector<double> partials;
};

template <typename T>
struct StackedProblem {
    StackedProblem(int64_t num_learners_, int64_t numel_, int64_t offset, int64_t num_others = 0)
        : num_learners(num_learners_),
          num_rows(num_learners_ + num_others),
          numel(numel_),
          weights(num_learners_ * numel_, offset) {
        weights.randomize(5);
        for (int64_t k = 0; k < num_others; ++k) {
            others.push_back(std::make_unique<Buffer<T>>(numel, offset == 0 ? 0 : offset + k));
            others.back()->randomize(static_cast<uint32_t>(200 + k));
            pointers.push_back(others.back()->data());
        }
        matrix.assign(static_cast<size_t>(num_learners * num_rows), 0.0f);
        partials.assign(static_cast<size_t>(num_blocks() * num_learners), NAN);
    }

    // Rows that sum to one, every third entry zero.
    void randomize_matrix() {
        std::mt19937 engine(3);
        for (int64_t j = 0; j < num_learners; ++j) {
            float sum = 0.0f;
            for (int64_t k = 0; k < num_rows; ++k) {
                entry(j, k) = (j + 2 * k) % 3 == 1 ? 0.0f : static_cast<float>(engine() % 1000) + 1.0f;
                sum += entry(j, k);
            }
            for (int64_t k = 0; k < num_rows; ++k) entry(j, k) /= std::max(sum, 1.0f);
        }
    }

    float& entry(int64_t j, int64_t k) { return matrix[static_cast<size_t>(j * num_rows + k)]; }
    double value(int64_t k, int64_t i) const {
        return k < num_learners ? weights[k * numel + i] : (*others[static_cast<size_t>(k - num_learners)])[i];
    }
    int64_t num_blocks() const { return num_blocks_of(numel); }

    // Puts the matrix into compressed rows: a learner's own term first, then the others that are not zero.
    StackedMixArgs args() {
        offsets = {0};
        columns.clear();
        values.clear();
        for (int64_t j = 0; j < num_learners; ++j) {
            columns.push_back(j);
            for (int64_t k = 0; k < num_rows; ++k) {
                if (k != j && entry(j, k) != 0.0f) columns.push_back(k);
            }
            for (size_t e = values.size(); e < columns.size(); ++e) values.push_back(entry(j, columns[e]));
            offsets.push_back(static_cast<int64_t>(columns.size()));
        }
        return {
            .weights = weights.data(),
            .others = pointers.data(),
            .num_others = static_cast<int64_t>(others.size()),
            .offsets = offsets.data(),
            .columns = columns.data(),
            .values = values.data(),
            .num_learners = num_learners,
            .numel = numel,
            .dtype = dtype_of<T>(),
            .partials = partials.data(),
            .sums = nullptr};
    }

    int64_t num_learners, num_rows, numel;
    Buffer<T> weights;
    std::vector<std::unique_ptr<Buffer<T>>> others;
    std::vector<const void*> pointers;
    std::vector<float> matrix, values;
    std::vector<int64_t> offsets, columns;
    std::vector<double> partials;
};

template <typename T>
struct NormProblem {
    NormProblem(const std::vector<int64_t>& sizes, int64_t offset, float scale = 2.0f) {
        uint32_t seed = 1;
        for (const int64_t numel : sizes) {
            data.push_back(std::make_unique<Buffer<T>>(numel, offset));
            data.back()->randomize(seed++, scale);
            segments.push_back({data.back()->data(), numel, 0});
        }
        partials.assign(static_cast<size_t>(number_blocks(segments)), NAN);
    }

    NormArgs args() {
        return {segments.data(), static_cast<int64_t>(segments.size()), num_blocks(), dtype_of<T>(), partials.data(),
                nullptr};
    }
    int64_t num_blocks() const { return static_cast<int64_t>(partials.size()); }

    // Each segment's partial sums in the order of its blocks.
    std::vector<double> sums() const {
        std::vector<double> result;
        for (const NormSegment& segment : segments) {
            double sum = 0.0;
            cpu::sum_partials(partials.data() + segment.first_block, &sum, num_blocks_of(segment.numel), 1);
            result.push_back(sum);
        }
        return result;
    }

    std::vector<std::unique_ptr<Buffer<T>>> data;
    std::vector<NormSegment> segments;
    std::vector<double> partials;
};

// Rows of one length, and segments of the given sizes.
template <typename T>
struct GramProblem {
    // third_scale: the magnitude of every third row.
    GramProblem(
        int64_t num_rows, const std::vector<int64_t>& sizes, int64_t offset, bool with_origin = false,
        float third_scale = 2.0f)
        : numel(std::accumulate(sizes.begin(), sizes.end(), int64_t{0})),
          origin(numel, offset),
          has_origin(with_origin) {
        for (int64_t k = 0; k < num_rows; ++k) {
            rows.push_back(std::make_unique<Buffer<T>>(numel, offset));
            rows.back()->randomize(static_cast<uint32_t>(300 + k), k % 3 == 2 ? third_scale : 2.0f);
            pointers.push_back(rows.back()->data());
        }
        origin.randomize(299);
        int64_t first = 0;
        for (const int64_t size : sizes) {
            segments.push_back({first, size, 0});
            first += size;
        }
        partials.assign(static_cast<size_t>(number_blocks(segments) * num_pairs_of(num_rows)), NAN);
        sums.assign(sizes.size() * static_cast<size_t>(num_rows * num_rows), NAN);
    }

    int64_t num_rows() const { return static_cast<int64_t>(rows.size()); }
    int64_t num_blocks() const { return static_cast<int64_t>(partials.size()) / num_pairs_of(num_rows()); }
    double value(int64_t k, int64_t i) const {
        const float row = (*rows[static_cast<size_t>(k)])[i];
        return has_origin ? row - origin[i] : row;
    }
    GramArgs args() {
        return {
            pointers.data(),
            has_origin ? origin.data() : nullptr,
            num_rows(),
            segments.data(),
            static_cast<int64_t>(segments.size()),
            num_blocks(),
            dtype_of<T>(),
            partials.data(),
            sums.data()};
    }

    int64_t numel;
    std::vector<std::unique_ptr<Buffer<T>>> rows;
    std::vector<const void*> pointers;
    Buffer<T> origin;
    bool has_origin;
    std::vector<GramSegment> segments;
    std::vector<double> partials, sums;
};

}  // namespace ddpcore::test
