// Replaces CUDA's header of this name; see cuda_bf16.h.
#pragma once

#include "cpu/storage.h"
#include "cuda_runtime_api.h"

struct __half {
    unsigned short __x;
};

inline float __half2float(__half value) {
    return ddpcore::cpu::load(ddpcore::cpu::Float16{value.__x});
}
inline __half __float2half_rn(float value) {
    return {ddpcore::cpu::store<ddpcore::cpu::Float16>(value).bits};
}
inline __half __float2half(float value) {
    return __float2half_rn(value);
}
