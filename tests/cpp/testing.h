// What the kernel tests share: buffers with guarded ends, random data, and how far fp32 arithmetic may be from exact.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#include "args.h"
#include "cpu/kernels.h"
#include "cpu/storage.h"
#include "math.h"

namespace ddpcore::test {

using cpu::BFloat16;
using cpu::Float16;
using Storages = ::testing::Types<float, BFloat16, Float16>;

// Around the lanes of a sum (16), the block (4096), and many blocks with a rest.
inline const std::vector<int64_t> kSizes = {0, 1, 15, 16, 17, 4095, 4096, 4097, 100003};

// Elements from a 64-byte boundary to the tensor: aligned, misalignments that a slice of a flat buffer can have, and
// one at which a vector of fp32 is aligned and one of 16 bits is not.
inline const std::vector<int64_t> kOffsets = {0, 1, 3, 4};

template <typename T>
constexpr DType dtype_of() {
    if constexpr (std::is_same_v<T, float>) return DType::kFloat32;
    return std::is_same_v<T, BFloat16> ? DType::kBFloat16 : DType::kFloat16;
}

template <typename T>
bool same_bits(const T* left, const T* right, int64_t numel) {
    return numel == 0 || std::memcmp(left, right, static_cast<size_t>(numel) * sizeof(T)) == 0;
}

// A tensor `offset` elements after a 64-byte boundary; the bytes around it must stay what they are.
template <typename T>
class Buffer {
  public:
    explicit Buffer(int64_t numel = 0, int64_t offset = 0) : numel_(numel), bytes_(size_of(numel, offset), kGuard) {
        const auto address = reinterpret_cast<uintptr_t>(bytes_.data()) + kMargin;
        start_ = static_cast<size_t>((address + 63) / 64 * 64 - reinterpret_cast<uintptr_t>(bytes_.data())) +
                 static_cast<size_t>(offset) * sizeof(T);
        std::fill_n(bytes_.begin() + static_cast<int64_t>(start_), numel * static_cast<int64_t>(sizeof(T)), 0);
    }
    Buffer(const Buffer& other) : Buffer(other.numel_) { std::copy_n(other.data(), numel_, data()); }
    Buffer& operator=(const Buffer&) = delete;

    T* data() { return reinterpret_cast<T*>(bytes_.data() + start_); }
    const T* data() const { return reinterpret_cast<const T*>(bytes_.data() + start_); }
    int64_t numel() const { return numel_; }
    float operator[](int64_t i) const { return cpu::load(data()[i]); }
    void set(int64_t i, float value) { data()[i] = cpu::store<T>(value); }

    void randomize(uint32_t seed, float scale = 2.0f) {
        std::mt19937 engine(seed);
        for (int64_t i = 0; i < numel_; ++i) {
            set(i, scale * (static_cast<float>(engine() >> 8) * 0x1p-23f - 1.0f));
        }
    }

    bool same_bits(const Buffer& other) const {
        return numel_ == other.numel_ && ddpcore::test::same_bits(data(), other.data(), numel_);
    }

    bool guards_untouched() const {
        const auto first = bytes_.begin() + static_cast<int64_t>(start_);
        const auto is_guard = [](unsigned char byte) { return byte == kGuard; };
        return std::all_of(bytes_.begin(), first, is_guard) &&
               std::all_of(first + numel_ * static_cast<int64_t>(sizeof(T)), bytes_.end(), is_guard);
    }

  private:
    static constexpr unsigned char kGuard = 0xa5;
    static constexpr size_t kMargin = 64;
    static size_t size_of(int64_t numel, int64_t offset) {
        return static_cast<size_t>(numel + offset) * sizeof(T) + 3 * kMargin;
    }

    int64_t numel_;
    std::vector<unsigned char> bytes_;
    size_t start_;
};

// Half the distance between neighbours of the storage type near `magnitude`: the error of one rounding to nearest.
template <typename T>
double half_ulp(double magnitude) {
    constexpr int kDigits = std::is_same_v<T, float> ? 23 : std::is_same_v<T, BFloat16> ? 7 : 10;
    constexpr int kMinExponent = std::is_same_v<T, Float16> ? -14 : -126;
    const int exponent = magnitude > 0.0 ? std::max(std::ilogb(magnitude), kMinExponent) : kMinExponent;
    return std::ldexp(1.0, exponent - kDigits - 1);
}

// How far a stored result may be from the exact one. Each fp32 rounding on the way errs by at most half an ulp of an
// intermediate value, and no intermediate value is above `magnitude`, the sum of the absolute terms: `roundings` half
// ulps of it in all (one more for what they do to each other). A 16-bit type adds the rounding of its store.
template <typename T>
double tolerance(double exact, double magnitude, int roundings) {
    const double fp32 = (roundings + 1) * half_ulp<float>(magnitude);
    return std::is_same_v<T, float> ? fp32 : fp32 + half_ulp<T>(std::abs(exact) + fp32);
}

// Distances are sums of positive terms: relative errors of the terms do not grow. The difference is rounded to fp32
// (2^-24 relative, twice that for its square); the sum in double adds next to nothing.
inline double distance_tolerance(double exact) {
    return exact * 0x1p-22;
}

// All blocks, cut at random places and in random order; some ranges are empty.
inline std::vector<std::pair<int64_t, int64_t>> random_ranges(int64_t num_blocks, uint32_t seed) {
    std::mt19937 engine(seed);
    std::vector<int64_t> cuts = {0, num_blocks};
    for (int i = 0; i < 6; ++i) cuts.push_back(static_cast<int64_t>(engine() % static_cast<uint32_t>(num_blocks + 1)));
    std::sort(cuts.begin(), cuts.end());
    std::vector<std::pair<int64_t, int64_t>> ranges;
    for (size_t i = 1; i < cuts.size(); ++i) ranges.emplace_back(cuts[i - 1], cuts[i]);
    std::shuffle(ranges.begin(), ranges.end(), engine);
    return ranges;
}

// Fills in Segment::first_block and returns the number of blocks.
template <typename Segment>
int64_t number_blocks(std::vector<Segment>& segments) {
    int64_t num_blocks = 0;
    for (Segment& segment : segments) {
        segment.first_block = num_blocks;
        num_blocks += num_blocks_of(segment.numel);
    }
    return num_blocks;
}

inline std::vector<double> summed(const std::vector<double>& partials, int64_t num_columns) {
    std::vector<double> sums(static_cast<size_t>(num_columns));
    const int64_t num_rows = num_columns > 0 ? static_cast<int64_t>(partials.size()) / num_columns : 0;
    cpu::sum_partials(partials.data(), sums.data(), num_rows, num_columns);
    return sums;
}

}  // namespace ddpcore::test
