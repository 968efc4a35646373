// What a test may ask of the stand-in beyond CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cuda_on_cpu {

// The device that kernels are told of. Small, so that loops over blocks loop and cooperative grids stay few fibers.
struct Device {
    int num_multiprocessors = 3;
    int blocks_per_multiprocessor = 2;
    int l2_bytes = 1 << 20;
    bool cooperative = true;  // whether it can launch so
};
Device& device();

// Where all orders start from: at first the environment variable CUDA_ON_CPU_SEED, or 0.
void set_seed(uint64_t seed);

}  // namespace cuda_on_cpu
