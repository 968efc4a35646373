// A stack and the state of its code. One OS thread runs all fibers, one at a time.
#pragma once

#include <cstddef>

namespace cuda_on_cpu {

class Fiber {
  public:
    Fiber() = default;                // the stack of the OS thread
    explicit Fiber(void (*entry)());  // starts with entry(), which must not return
    Fiber(const Fiber&) = delete;
    ~Fiber();

    // Leaves the running fiber, which must be `from`; returns when another one switches back to it.
    static void switch_to(Fiber& from, Fiber& to);

  private:
    static void arrived();
    static void start();

    void (*entry_)() = nullptr;
    void* stack_pointer_ = nullptr;
    void* mapping_ = nullptr;
    const void* stack_ = nullptr;  // AddressSanitizer must know which stack is in use
    size_t stack_bytes_ = 0;
    void* fake_stack_ = nullptr;
};

}  // namespace cuda_on_cpu
