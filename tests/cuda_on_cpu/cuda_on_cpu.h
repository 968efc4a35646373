// Functions for tests that CUDA does not have.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cuda_on_cpu {

// The properties of the device. It is small, so that loops over blocks iterate and cooperative grids have few fibers.
struct Device {
    int num_multiprocessors = 3;
    int blocks_per_multiprocessor = 2;
    int l2_bytes = 1 << 20;
    bool cooperative = true;  // whether it supports cooperative launches
    int double_ratio = 2;     // of fp32 to double performance: the variable CUDA_ON_CPU_DOUBLE_RATIO, if it is set
};
Device& device();

// Sets the seed of all orders. The default is the environment variable CUDA_ON_CPU_SEED, or 0.
void set_seed(uint64_t seed);

}  // namespace cuda_on_cpu
