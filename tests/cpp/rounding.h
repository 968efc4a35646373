// Real numbers with a bound on how far an fp32 evaluation may be from them: a running error analysis. A test writes the
// equation once, in this type, and gets the exact result and the tolerance that the equation itself implies.
#pragma once

#include "testing.h"

namespace ddpcore::test {

struct Real {
    double value = 0.0;  // formed in double, whose own errors the slack of kRounding covers
    double error = 0.0;  // what fp32 arithmetic makes of the value differs by no more than this
};

// One rounding to fp32: half an ulp is at most 2^-24 of the value, and 2^-150 among the subnormals. A tiny more than
// that, because the value itself is only known to double.
inline constexpr double kRounding = 0x1.00001p-24, kSubnormalRounding = 0x1p-150;

inline Real rounded(double value, double error) {
    return {value, error + (std::abs(value) + error) * kRounding + kSubnormalRounding};
}

// A constant that is formed in double and rounded once; exact where fp32 has it.
inline Real constant(double value) {
    return static_cast<double>(static_cast<float>(value)) == value ? Real{value} : rounded(value, 0.0);
}

inline bool is_exactly(const Real& real, double value) {
    return real.error == 0.0 && real.value == value;
}

// Adding zero and multiplying by one round nothing.
inline Real operator+(const Real& left, const Real& right) {
    if (is_exactly(left, 0.0)) return right;
    if (is_exactly(right, 0.0)) return left;
    return rounded(left.value + right.value, left.error + right.error);
}

inline Real operator-(const Real& real) {
    return {-real.value, real.error};
}

inline Real operator-(const Real& left, const Real& right) {
    return left + -right;
}

inline Real operator*(const Real& left, const Real& right) {
    if (is_exactly(left, 1.0)) return right;
    if (is_exactly(right, 1.0)) return left;
    if (is_exactly(left, 0.0) || is_exactly(right, 0.0)) return {};
    const double error =
        std::abs(left.value) * right.error + std::abs(right.value) * left.error + left.error * right.error;
    return rounded(left.value * right.value, error);
}

inline Real operator/(const Real& left, const Real& right) {
    const double value = left.value / right.value, smallest = std::abs(right.value) - right.error;
    return rounded(value, smallest > 0.0 ? (left.error + std::abs(value) * right.error) / smallest : INFINITY);
}

inline Real square_root(const Real& real) {
    const double root = std::sqrt(real.value), below = std::sqrt(std::max(real.value - real.error, 0.0));
    return rounded(root, std::max(root - below, std::sqrt(real.value + real.error) - root));
}

// Whether `stored`, which was rounded once more to a 16-bit T, can be what fp32 arithmetic makes of `exact`. A bound so
// wide that it would bound nothing is refused.
template <typename T>
bool agrees(float stored, const Real& exact) {
    const double largest = std::abs(exact.value) + exact.error;
    const double bound = exact.error + (std::is_same_v<T, float> ? 0.0 : half_ulp<T>(largest));
    return std::abs(stored - exact.value) <= bound && exact.error <= 1e-4 * std::max(largest, 1.0);
}

}  // namespace ddpcore::test
