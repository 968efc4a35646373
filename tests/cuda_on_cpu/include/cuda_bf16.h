// Replaces CUDA's header of this name. The conversions are those of the CPU kernels, which
// tests/cpp/test_storage.cpp compares with exact arithmetic.
#pragma once

#include "cpu/storage.h"
#include "cuda_runtime_api.h"

struct __nv_bfloat16 {
    unsigned short __x;
};

inline float __bfloat162float(__nv_bfloat16 value) {
    return ddpcore::cpu::load(ddpcore::cpu::BFloat16{value.__x});
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    return {ddpcore::cpu::store<ddpcore::cpu::BFloat16>(value).bits};
}
inline __nv_bfloat16 __float2bfloat16(float value) {
    return __float2bfloat16_rn(value);
}
