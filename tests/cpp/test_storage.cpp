// Conversions of bf16 and fp16, all of them: against decoding by ldexp and rounding by search among all values.
#include "testing.h"

namespace ddpcore::test {
namespace {

template <typename T>
struct Format;
template <>
struct Format<BFloat16> {
    static constexpr int kDigits = 7, kExponentBits = 8;
};
template <>
struct Format<Float16> {
    static constexpr int kDigits = 10, kExponentBits = 5;
};

template <typename T>
constexpr uint32_t kInfinity = ((1u << Format<T>::kExponentBits) - 1u) << Format<T>::kDigits;

// The value of a code, by the definition of the format. The code of infinity decodes to the next power of two here,
// which is where rounding to nearest places the border to overflow.
template <typename T>
double decode(uint32_t code) {
    constexpr int kDigits = Format<T>::kDigits, kBias = (1 << (Format<T>::kExponentBits - 1)) - 1;
    const int exponent = static_cast<int>((code & 0x7fffu) >> kDigits);
    const int digits = static_cast<int>(code & ((1u << kDigits) - 1u));
    const double magnitude = exponent == 0 ? std::ldexp(digits, 1 - kBias - kDigits)
                                           : std::ldexp((1 << kDigits) + digits, exponent - kBias - kDigits);
    return (code & 0x8000u) != 0 ? -magnitude : magnitude;
}

template <typename T>
class StorageTest : public ::testing::Test {
  protected:
    static void SetUpTestSuite() {
        values_.clear();
        for (uint32_t code = 0; code <= kInfinity<T>; ++code) values_.push_back(decode<T>(code));
    }

    // The code nearest to a finite value; of two equally near ones the even.
    static uint16_t nearest(float value) {
        const double magnitude = std::abs(static_cast<double>(value));
        const auto above = std::lower_bound(values_.begin(), values_.end(), magnitude);
        auto code = static_cast<uint32_t>(std::min<int64_t>(above - values_.begin(), kInfinity<T>));
        if (code > 0) {
            const double up = values_[code] - magnitude, down = magnitude - values_[code - 1];
            if (down < up || (down == up && code % 2 == 1)) --code;
        }
        return static_cast<uint16_t>(code | (std::signbit(value) ? 0x8000u : 0u));
    }

    static std::vector<double> values_;
};

template <typename T>
std::vector<double> StorageTest<T>::values_;

using HalfStorages = ::testing::Types<BFloat16, Float16>;
TYPED_TEST_SUITE(StorageTest, HalfStorages);

TYPED_TEST(StorageTest, LoadsEveryCode) {
    using T = TypeParam;
    for (uint32_t code = 0; code < 65536; ++code) {
        const float value = cpu::load(T{static_cast<uint16_t>(code)});
        if ((code & 0x7fffu) > kInfinity<T>) {
            ASSERT_TRUE(std::isnan(value)) << code;
        } else if ((code & 0x7fffu) == kInfinity<T>) {
            ASSERT_TRUE(std::isinf(value)) << code;
        } else {
            ASSERT_EQ(value, decode<T>(code)) << code;
        }
        ASSERT_EQ(std::signbit(value), (code & 0x8000u) != 0) << code;
    }
}

TYPED_TEST(StorageTest, EveryCodeComesBack) {
    using T = TypeParam;
    for (uint32_t code = 0; code < 65536; ++code) {
        const uint16_t back = cpu::store<T>(cpu::load(T{static_cast<uint16_t>(code)})).bits;
        if ((code & 0x7fffu) > kInfinity<T>) {
            ASSERT_GT(back & 0x7fffu, kInfinity<T>) << code;
        } else {
            ASSERT_EQ(back, code);
        }
    }
}

// Every exponent of fp32 with every pattern of the digits that a 16-bit format keeps, and for each the low digits at
// and around zero, the tie and the top. Subnormals of fp16 keep fewer digits, so their ties are among the kept
// patterns.
TYPED_TEST(StorageTest, StoresNearestAroundEveryTie) {
    using T = TypeParam;
    constexpr uint32_t kDropped = 23 - Format<T>::kDigits, kTie = 1u << (kDropped - 1);
    for (uint32_t upper = 0; upper < (255u << Format<T>::kDigits); ++upper) {
        for (const uint32_t low : {0u, 1u, kTie - 1, kTie, kTie + 1, 2 * kTie - 1}) {
            const uint32_t bits = (upper << kDropped) | low;
            for (const uint32_t sign : {0u, 0x80000000u}) {
                const float value = cpu::float_of(bits | sign);
                ASSERT_EQ(cpu::store<T>(value).bits, this->nearest(value)) << std::hexfloat << value;
            }
        }
    }
}

TYPED_TEST(StorageTest, StoresNearestAnywhere) {
    using T = TypeParam;
    constexpr uint32_t kStride = 4099;  // a prime: about a million values over all bit patterns
    for (uint64_t bits = 0; bits <= 0xffffffffu; bits += kStride) {
        const float value = cpu::float_of(static_cast<uint32_t>(bits));
        if (std::isfinite(value)) {
            ASSERT_EQ(cpu::store<T>(value).bits, this->nearest(value)) << std::hexfloat << value;
        }
    }
}

TYPED_TEST(StorageTest, StoresInfinityAndNan) {
    using T = TypeParam;
    ASSERT_EQ(cpu::store<T>(HUGE_VALF).bits, kInfinity<T>);
    ASSERT_EQ(cpu::store<T>(-HUGE_VALF).bits, kInfinity<T> | 0x8000u);
    // NaNs whose digits all lie among the dropped ones must not become infinity.
    for (const uint32_t bits : {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0x7f801fffu, 0x7f80ffffu, 0x7fbfffffu}) {
        for (const uint32_t sign : {0u, 0x80000000u}) {
            const uint32_t stored = cpu::store<T>(cpu::float_of(bits | sign)).bits;
            ASSERT_GT(stored & 0x7fffu, kInfinity<T>) << std::hex << bits;
            ASSERT_EQ(stored >> 15, sign >> 31) << std::hex << bits;
        }
    }
}

TEST(StorageFloatTest, IsTheIdentity) {
    for (const uint32_t bits : {0u, 0x80000000u, 1u, 0x3f800000u, 0x7f7fffffu, 0x7f800000u, 0x7fc00001u}) {
        ASSERT_EQ(cpu::bits_of(cpu::store<float>(cpu::load(cpu::float_of(bits)))), bits);
    }
}

}  // namespace
}  // namespace ddpcore::test
