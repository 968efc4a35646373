#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include <sanitizer/common_interface_defs.h>

#if !defined(__x86_64__) && !defined(__aarch64__)
#error "no switch of stacks is written for this processor: add one below"
#endif

// Saves the registers that a call preserves on the old stack and loads those of the new one. In assembly, because
// swapcontext makes a system call, and a test makes millions of switches.
extern "C" void cuda_on_cpu_switch(void** save, void* load);
#ifdef __x86_64__
asm(R"(
.text
.globl cuda_on_cpu_switch
.type cuda_on_cpu_switch, @function
cuda_on_cpu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size cuda_on_cpu_switch, . - cuda_on_cpu_switch
)");
#else
asm(R"(
.text
.globl cuda_on_cpu_switch
.type cuda_on_cpu_switch, %function
cuda_on_cpu_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size cuda_on_cpu_switch, . - cuda_on_cpu_switch
)");
#endif

namespace cuda_on_cpu {

namespace {

// A copy of up to 32 KiB of kernel arguments lies on it. Pages that nobody touches cost nothing.
constexpr size_t kStackBytes = 128 * 1024;

Fiber* left = nullptr;     // the fiber that the last switch left
Fiber* entered = nullptr;  // and the one it went to

// What the first switch to a fiber takes from its stack: registers, all zero, and the address of start().
#ifdef __x86_64__
constexpr size_t kReturnWord = 6;
constexpr size_t kUsedWords = 8;  // start() finds the stack as after a call: 8 bytes off a multiple of 16
#else
constexpr size_t kReturnWord = 11;
constexpr size_t kUsedWords = 20;
#endif

}  // namespace

Fiber::Fiber(void (*entry)()) : entry_(entry), stack_bytes_(kStackBytes) {
    const auto guard = static_cast<size_t>(sysconf(_SC_PAGESIZE));  // below the stack: an overflow faults
    mapping_ =
        mmap(nullptr, guard + kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping_ == MAP_FAILED || mprotect(mapping_, guard, PROT_NONE) != 0) {
        std::perror("cuda_on_cpu: no memory for the stack of one more thread");
        std::abort();
    }
    char* const low = static_cast<char*>(mapping_) + guard;
    stack_ = low;
    auto** const top = reinterpret_cast<void**>(low + kStackBytes) - kUsedWords;
    top[kReturnWord] = reinterpret_cast<void*>(&Fiber::start);
    stack_pointer_ = top;
}

Fiber::~Fiber() {
    if (mapping_ != nullptr) munmap(mapping_, static_cast<size_t>(sysconf(_SC_PAGESIZE)) + kStackBytes);
}

void Fiber::switch_to(Fiber& from, Fiber& to) {
    left = &from;
    entered = &to;
    __sanitizer_start_switch_fiber(&from.fake_stack_, to.stack_, to.stack_bytes_);
    cuda_on_cpu_switch(&from.stack_pointer_, to.stack_pointer_);
    arrived();
}

void Fiber::arrived() {
    // Tells where the stack of the fiber that was left lies: so the stack of the OS thread becomes known.
    __sanitizer_finish_switch_fiber(entered->fake_stack_, &left->stack_, &left->stack_bytes_);
}

void Fiber::start() {
    arrived();
    entered->entry_();
    std::abort();
}

}  // namespace cuda_on_cpu
