// The host functions except those of streams and graphs: launches, attributes and memory.
#include <link.h>

#include <cstdlib>
#include <cstring>
#include <map>

#include "cuda_on_cpu.h"
#include "scheduler.h"
#include "stream.h"

#include <sanitizer/asan_interface.h>

// These tests do not look for leaks, because that needs ptrace, which containers forbid.
extern "C" const char* __asan_default_options() {
    return "detect_leaks=0";
}

namespace ddpcore::cuda {

extern thread_local uint4 shared[];
thread_local uint4 shared[cuda_on_cpu::kMaxSharedBytes / sizeof(uint4)];

}  // namespace ddpcore::cuda

namespace cuda_on_cpu {

namespace {

constexpr size_t kSharedBytes = 48 * 1024;  // of a block, unless the kernel's attribute allows more
constexpr unsigned kMaxThreads = 1024;

cudaError_t last_error = cudaSuccess;
uint64_t next_seed =
    std::getenv("CUDA_ON_CPU_SEED") ? std::strtoull(std::getenv("CUDA_ON_CPU_SEED"), nullptr, 10) << 32 : 0;
std::map<const void*, size_t> shared_limits;

// Base and size of each allocation of cudaMalloc. It is poisoned while host code runs, so that a read of device memory
// by the host is an error, as on a machine with a GPU.
std::map<char*, size_t> allocations;

class DeviceMemoryOpen {
  public:
    DeviceMemoryOpen() {
        for (const auto& [base, bytes] : allocations) __asan_unpoison_memory_region(base, bytes);
    }
    ~DeviceMemoryOpen() {
        for (const auto& [base, bytes] : allocations) __asan_poison_memory_region(base, bytes);
    }
};

// Unpoisons the allocation that contains a pointer, if there is one.
class AllocationOpen {
  public:
    explicit AllocationOpen(const void* pointer)
        : entry_(allocations.upper_bound(static_cast<char*>(const_cast<void*>(pointer)))) {
        if (entry_ == allocations.begin() || pointer == nullptr) {
            entry_ = allocations.end();
        } else if (--entry_; static_cast<const char*>(pointer) > entry_->first + entry_->second) {
            entry_ = allocations.end();
        }
        if (entry_ != allocations.end()) __asan_unpoison_memory_region(entry_->first, entry_->second);
    }
    ~AllocationOpen() {
        if (entry_ != allocations.end()) __asan_poison_memory_region(entry_->first, entry_->second);
    }
    AllocationOpen(const AllocationOpen&) = delete;

  private:
    std::map<char*, size_t>::iterator entry_;
};

size_t shared_limit_of(const void* kernel) {
    const auto entry = shared_limits.find(kernel);
    return entry == shared_limits.end() ? kSharedBytes : entry->second;
}

bool is_cooperative(const cudaLaunchConfig_t& config) {
    for (unsigned i = 0; i < config.numAttrs; ++i) {
        if (config.attrs[i].id == cudaLaunchAttributeCooperative && config.attrs[i].val.cooperative != 0) return true;
    }
    return false;
}

}  // namespace

cudaError_t report(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

Device& device() {
    static Device instance = [] {
        Device fresh;
        if (const char* ratio = std::getenv("CUDA_ON_CPU_DOUBLE_RATIO")) fresh.double_ratio = std::atoi(ratio);
        return fresh;
    }();
    return instance;
}

void set_seed(uint64_t seed) {
    next_seed = seed << 32;
}

unsigned char* dynamic_shared_memory() {
    return reinterpret_cast<unsigned char*>(ddpcore::cuda::shared);
}

std::span<unsigned char> static_shared_of(const void* kernel) {
    struct Search {
        uintptr_t kernel;
        std::span<unsigned char> found;
    } search{reinterpret_cast<uintptr_t>(kernel), {}};
    const auto visit = [](dl_phdr_info* module, size_t, void* data) {
        auto& searched = *static_cast<Search*>(data);
        bool holds_kernel = false;
        size_t bytes = 0;
        for (const auto* header = module->dlpi_phdr; header != module->dlpi_phdr + module->dlpi_phnum; ++header) {
            const uintptr_t begin = module->dlpi_addr + header->p_vaddr;
            const bool inside = searched.kernel >= begin && searched.kernel < begin + header->p_memsz;
            holds_kernel = holds_kernel || (header->p_type == PT_LOAD && inside);
            if (header->p_type == PT_TLS) bytes = header->p_memsz;
        }
        if (!holds_kernel) return 0;
        if (module->dlpi_tls_data != nullptr)
            searched.found = {static_cast<unsigned char*>(module->dlpi_tls_data), bytes};
        return 1;
    };
    dl_iterate_phdr(visit, &search);
    return search.found;
}

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, std::function<void()> body) {
    const dim3 grid = config.gridDim, block = config.blockDim;
    const size_t num_blocks = static_cast<size_t>(grid.x) * grid.y * grid.z;
    const size_t num_threads = static_cast<size_t>(block.x) * block.y * block.z;
    if (num_blocks == 0 || num_threads == 0 || num_threads > kMaxThreads || grid.y > 65535 || grid.z > 65535) {
        return report(cudaErrorInvalidConfiguration);
    }
    if (config.dynamicSmemBytes > shared_limit_of(kernel)) return report(cudaErrorInvalidValue);
    const Launch launch{grid, block, config.dynamicSmemBytes, is_cooperative(config), kernel, std::move(body)};
    if (launch.cooperative && !device().cooperative) return report(cudaErrorInvalidValue);
    if (launch.cooperative) {
        int each = 0;
        max_active_blocks(&each, kernel, static_cast<int>(num_threads), config.dynamicSmemBytes);
        if (num_blocks > static_cast<size_t>(each) * static_cast<size_t>(device().num_multiprocessors)) {
            return report(cudaErrorCooperativeLaunchTooLarge);
        }
    }
    return submit(config.stream, {cudaGraphNodeTypeKernel, launch.cooperative, [launch] {
                                      static Scheduler scheduler;
                                      const DeviceMemoryOpen open;
                                      scheduler.run(launch, next_seed++);
                                  }});
}

cudaError_t max_active_blocks(int* num_blocks, const void* kernel, int threads, size_t shared_bytes) {
    const bool fits = threads <= static_cast<int>(kMaxThreads) && shared_bytes <= shared_limit_of(kernel);
    *num_blocks = fits ? device().blocks_per_multiprocessor : 0;
    return cudaSuccess;
}

cudaError_t set_attribute(const void* kernel, cudaFuncAttribute, int value) {
    if (value < 0 || static_cast<size_t>(value) > kMaxSharedBytes) return report(cudaErrorInvalidValue);
    shared_limits[kernel] = static_cast<size_t>(value);
    return cudaSuccess;
}

}  // namespace cuda_on_cpu

using namespace cuda_on_cpu;

cudaError_t cudaGetLastError() {
    return std::exchange(last_error, cudaSuccess);
}

cudaError_t cudaPeekAtLastError() {
    return last_error;
}

const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInvalidConfiguration: return "invalid configuration argument";
        case cudaErrorCooperativeLaunchTooLarge: return "too many blocks in cooperative launch";
        case cudaErrorNotSupported: return "operation not supported";
        case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
        case cudaErrorStreamCaptureImplicit:
            return "operation would make the legacy stream depend on a capturing stream";
    }
    return "unrecognized error code";
}

cudaError_t cudaGetDeviceCount(int* count) {
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    return report(device == 0 ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = kSharedBytes; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = kMaxSharedBytes; break;
        case cudaDevAttrMultiProcessorCount: *value = device().num_multiprocessors; break;
        case cudaDevAttrL2CacheSize: *value = device().l2_bytes; break;
        case cudaDevAttrCooperativeLaunch: *value = device().cooperative ? 1 : 0; break;
        case cudaDevAttrSingleToDoublePrecisionPerfRatio: *value = device().double_ratio; break;
    }
    return cudaSuccess;
}

// ---- memory ----

// Exactly as large as requested, aligned to 256 bytes as CUDA's, and filled with arbitrary values.
cudaError_t cudaMalloc(void** pointer, size_t bytes) {
    *pointer = nullptr;
    if (const cudaError_t error = refuse_while_capturing(); error != cudaSuccess || bytes == 0) return error;
    if (posix_memalign(pointer, 256, bytes) != 0) return report(cudaErrorMemoryAllocation);
    std::memset(*pointer, garbage_of(next_seed), bytes);
    allocations[static_cast<char*>(*pointer)] = bytes;
    __asan_poison_memory_region(*pointer, bytes);
    return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
    if (const cudaError_t error = refuse_while_capturing(); error != cudaSuccess || pointer == nullptr) return error;
    const auto entry = allocations.find(static_cast<char*>(pointer));
    if (entry == allocations.end()) return report(cudaErrorInvalidValue);
    __asan_unpoison_memory_region(entry->first, entry->second);
    allocations.erase(entry);
    std::free(pointer);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    if (bytes == 0) return cudaSuccess;
    return submit(stream, {cudaGraphNodeTypeMemcpy, false, [=] {
                               const AllocationOpen open_target(target), open_source(source);
                               std::memmove(target, source, bytes);
                           }});
}

cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind kind) {
    if (const cudaError_t error = refuse_while_capturing(); error != cudaSuccess) return error;
    return cudaMemcpyAsync(target, source, bytes, kind, nullptr);
}

cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t stream) {
    return submit(stream, {cudaGraphNodeTypeMemset, false, [=] {
                               const AllocationOpen open(target);
                               std::memset(target, value, bytes);
                           }});
}

cudaError_t cudaMemset(void* target, int value, size_t bytes) {
    return cudaMemsetAsync(target, value, bytes, nullptr);
}
