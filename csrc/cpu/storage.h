// Conversions between storage types and fp32. They use integer operations, so that every loop vectorises on every
// instruction set; GCC 12 does not vectorise conversions of _Float16 below AVX512-FP16.
#pragma once

#include <cstdint>
#include <cstring>

#include "../args.h"

namespace ddpcore::cpu {

#define DDPCORE_INLINE inline __attribute__((always_inline))

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

DDPCORE_INLINE float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

DDPCORE_INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

DDPCORE_INLINE float load(float value) {
    return value;
}

DDPCORE_INLINE float load(BFloat16 value) {
    return float_of(static_cast<uint32_t>(value.bits) << 16);
}

DDPCORE_INLINE float load(Float16 value) {
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
    const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
    // 2^112 moves the exponent from fp16's bias to fp32's and is exact for subnormals too; the top exponent is inf or
    // NaN.
    const uint32_t finite = bits_of(float_of(magnitude) * 0x1p112f);
    const uint32_t special = magnitude | 0x7f800000u;
    return float_of(sign | (magnitude >= 0x0f800000u ? special : finite));
}

template <typename T>
T store(float value);

template <>
DDPCORE_INLINE float store<float>(float value) {
    return value;
}

template <>
DDPCORE_INLINE BFloat16 store<BFloat16>(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
    const uint32_t quiet_nan = (bits >> 16) | 0x40u;
    return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded)};
}

template <>
DDPCORE_INLINE Float16 store<Float16>(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    // Normal range: rebias the exponent and round the 13 dropped bits to nearest, ties to even.
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Below 2^-14: adding 0.5 puts the last kept bit of an fp16 subnormal at fp32's last bit, so the adder rounds it.
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;  // NaN, or at least 65520: inf
    const uint32_t result = magnitude < (113u << 23) ? subnormal : (magnitude >= 0x477ff000u ? special : normal);
    return {static_cast<uint16_t>(sign | result)};
}

// The fp32 weight of a stored weight and its master. A master that does not round to the stored weight is out of date,
// because other code has written the weight (a checkpoint, an average with neighbours): then the stored weight is used.
template <typename T>
DDPCORE_INLINE float weight_of(T param, float master) {
    return store<T>(master).bits == param.bits ? master : load(param);
}

// The weights of one tensor, with or without masters (Master).
template <typename T, bool Master>
struct Weights {
    T* param;
    float* master;

    DDPCORE_INLINE float operator[](int64_t i) const {
        if constexpr (Master) return weight_of(param[i], master[i]);
        return load(param[i]);
    }
    DDPCORE_INLINE void set(int64_t i, float weight) const {
        param[i] = store<T>(weight);
        if constexpr (Master) master[i] = weight;
    }
};

// Calls fn with a null pointer whose type is the storage type, so that fn is compiled for each type.
template <typename Fn>
DDPCORE_INLINE void with_storage(DType dtype, Fn&& fn) {
    switch (dtype) {
        case DType::kFloat32: return fn(static_cast<float*>(nullptr));
        case DType::kBFloat16: return fn(static_cast<BFloat16*>(nullptr));
        case DType::kFloat16: return fn(static_cast<Float16*>(nullptr));
    }
}

// Calls fn.template operator()<T, Master>() for tensors with or without masters. fp32 tensors have no masters.
template <typename Fn>
DDPCORE_INLINE void with_weights(DType dtype, bool masters, Fn&& fn) {
    switch (dtype) {
        case DType::kFloat32: return fn.template operator()<float, false>();
        case DType::kBFloat16:
            return masters ? fn.template operator()<BFloat16, true>() : fn.template operator()<BFloat16, false>();
        case DType::kFloat16:
            return masters ? fn.template operator()<Float16, true>() : fn.template operator()<Float16, false>();
    }
}

}  // namespace ddpcore::cpu
