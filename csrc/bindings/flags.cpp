// Counters in memory that several processes map. One process increases a counter, others wait for it. These are C
// functions, which ddpcore/comm/shared calls through ctypes: one library serves every version of Python.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <thread>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>
#endif

namespace {

// A process that sleeps wakes up tens of microseconds late. So a wait first spins, then yields the core to other
// processes after each look, and sleeps last. A longer spin delays ranks that share the core.
constexpr auto kSpin = std::chrono::microseconds(4);
constexpr auto kYield = std::chrono::microseconds(50);

using Clock = std::chrono::steady_clock;

#ifdef __linux__
// Not FUTEX_PRIVATE_FLAG: the waiters are other processes.
void sleep_while(uint32_t* word, uint32_t value, std::chrono::nanoseconds left) {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
    const timespec limit{static_cast<time_t>(seconds.count()), static_cast<long>((left - seconds).count())};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &limit, nullptr, 0);
}
void wake_all(uint32_t* word) {
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}
#else
void sleep_while(uint32_t*, uint32_t, std::chrono::nanoseconds left) {
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(left, std::chrono::microseconds(100)));
}
void wake_all(uint32_t*) {}
#endif

// 32-bit counters that only increase, modulo 2^32. A target is reached if it is less than 2^31 before the counter.
bool reached(uint32_t value, uint32_t target) {
    return static_cast<int32_t>(value - target) >= 0;
}

uint32_t load(uint32_t* flag) {
    return std::atomic_ref(*flag).load(std::memory_order_acquire);
}

// The second word of a flag's cache line: how many wait in the kernel. A waiter that is killed there stays in the
// count, which costs a call to the kernel and nothing else.
std::atomic_ref<uint32_t> sleepers_of(uint32_t* flag) {
    return std::atomic_ref(flag[1]);
}

}  // namespace

#define DDPCORE_EXPORT extern "C" __attribute__((visibility("default")))

DDPCORE_EXPORT uint32_t ddpcore_flag_read(uint32_t* flag) {
    return load(flag);
}

// A process that reads this value sees all earlier writes of this process.
DDPCORE_EXPORT void ddpcore_flag_post(uint32_t* flag, uint32_t value) {
    // Sequentially consistent: either this sees the waiter in the count, or the waiter sees the value and does not
    // sleep.
    std::atomic_ref(*flag).store(value, std::memory_order_seq_cst);
    if (sleepers_of(flag).load(std::memory_order_seq_cst) != 0) wake_all(flag);
}

// Returns whether the flag reached the target within the time. A signal can end the wait early.
DDPCORE_EXPORT bool ddpcore_flag_wait(uint32_t* flag, uint32_t target, double seconds) {
    const auto start = Clock::now();
    const auto deadline = start + std::chrono::nanoseconds(std::llround(1e9 * std::clamp(seconds, 0.0, 1e6)));
    for (;;) {
        const uint32_t value = load(flag);
        if (reached(value, target)) return true;
        const auto now = Clock::now();
        if (now >= deadline) return false;
        if (now - start < kSpin) continue;
        if (now - start < kSpin + kYield) {
            std::this_thread::yield();
            continue;
        }
        sleepers_of(flag).fetch_add(1, std::memory_order_seq_cst);
        sleep_while(flag, value, deadline - now);
        sleepers_of(flag).fetch_sub(1, std::memory_order_relaxed);
    }
}
