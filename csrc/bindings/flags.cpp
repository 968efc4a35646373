// Module ddpcore._flags: counters in memory that several processes map. One process increases a counter, others wait
// for it.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <thread>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>
#endif

namespace py = pybind11;

namespace {

constexpr size_t kLine = 64;                          // bytes: each flag has its own cache line
constexpr auto kSpin = std::chrono::microseconds(4);  // a longer spin delays ranks that share the core

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

class Flags {
  public:
    explicit Flags(const py::buffer& buffer) : memory_(buffer.request(true)) {
        const auto address = reinterpret_cast<uintptr_t>(memory_.ptr);
        if (memory_.itemsize != 1 || memory_.ndim != 1 || address % kLine != 0) {
            throw std::invalid_argument("flags need a writable buffer of bytes that starts on a cache line");
        }
        num_flags_ = static_cast<size_t>(memory_.size) / kLine;
    }

    uint32_t read(size_t index) const { return std::atomic_ref(*word(index)).load(std::memory_order_acquire); }

    // A process that reads this value sees all earlier writes of this process.
    void post(size_t index, uint64_t value) const {
        std::atomic_ref(*word(index)).store(static_cast<uint32_t>(value), std::memory_order_release);
        wake_all(word(index));
    }

    // Returns whether the flag reached the target within the time. A signal can end the wait early.
    bool wait(size_t index, uint64_t target, double seconds) const {
        uint32_t* flag = word(index);
        const auto goal = static_cast<uint32_t>(target);
        if (reached(read(index), goal)) return true;
        const py::gil_scoped_release release;
        const auto start = Clock::now();
        const auto deadline = start + std::chrono::nanoseconds(std::llround(1e9 * std::clamp(seconds, 0.0, 1e6)));
        for (;;) {
            const uint32_t value = std::atomic_ref(*flag).load(std::memory_order_acquire);
            if (reached(value, goal)) return true;
            const auto now = Clock::now();
            if (now >= deadline) return false;
            if (now - start >= kSpin) sleep_while(flag, value, deadline - now);
        }
    }

  private:
    uint32_t* word(size_t index) const {
        if (index >= num_flags_) throw std::out_of_range("no such flag");
        return reinterpret_cast<uint32_t*>(static_cast<char*>(memory_.ptr) + index * kLine);
    }

    py::buffer_info memory_;  // holds the buffer, so that its memory outlives the flags
    size_t num_flags_ = 0;
};

}  // namespace

PYBIND11_MODULE(_flags, module) {
    module.doc() = "Counters in memory that several processes map.";
    py::class_<Flags>(module, "Flags", "Counters in shared memory, one in each 64 bytes of a buffer.")
        .def(py::init<py::buffer>(), py::arg("buffer"))
        .def("read", &Flags::read, py::arg("index"), "The value of a flag.")
        .def("post", &Flags::post, py::arg("index"), py::arg("value"), "Set a flag and wake those who wait for it.")
        .def(
            "wait", &Flags::wait, py::arg("index"), py::arg("target"), py::arg("seconds"),
            "Whether the flag reached the target within that time; the GIL is free meanwhile.");
}
