// Runs a grid. Each CUDA thread is a fiber; a seed determines which fiber runs next.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "device.h"
#include "fiber.h"

namespace cuda_on_cpu {

struct Launch {
    dim3 grid, block;
    size_t shared_bytes = 0;
    bool cooperative = false;
    const void* kernel = nullptr;
    std::function<void()> body;
};

struct Block;
struct Thread;

// The threads of a block that can run, as a queue with two ends.
class ReadyThreads {
  public:
    bool empty() const { return first_ == last_; }
    size_t size() const { return last_ - first_; }
    Thread*& operator[](size_t i) { return ring_[(first_ + i) % kSize]; }
    Thread* take_first() { return ring_[first_++ % kSize]; }
    Thread* take_last() { return ring_[--last_ % kSize]; }
    void put_first(Thread* thread) { ring_[--first_ % kSize] = thread; }
    void put_last(Thread* thread) { ring_[last_++ % kSize] = thread; }

  private:
    static constexpr size_t kSize = 1024;
    Thread* ring_[kSize];
    size_t first_ = 0, last_ = 0;  // both may wrap around: only differences and remainders count
};

struct Thread {
    enum class State { kReady, kAtWarp, kAtBarrier, kAtGrid, kDone };

    Block* block = nullptr;
    int rank = 0;
    uint3 index{};
    State state = State::kDone;
    LaneCall call{};  // the call in which it waits; barriers use the value and the place only
    uint64_t result = 0;
    std::unique_ptr<Fiber> fiber;
};

// A slot of the device for a CUDA block. It keeps its fibers for the next block.
struct Block {
    uint3 index{};
    std::vector<Thread> threads;
    int num_threads = 0;
    int num_done = 0;
    int num_at_barrier = 0;
    std::vector<unsigned> lanes_waiting;  // of each warp: a bit for each lane in kAtWarp
    ReadyThreads ready;
    std::vector<unsigned char> static_shared, dynamic_shared;  // while another block runs
};

// A small fast generator (splitmix64).
class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t operator()();
    size_t below(size_t limit) { return static_cast<size_t>((*this)() % limit); }

  private:
    uint64_t state_;
};

class Scheduler {
  public:
    // The seed of the test in the upper half, the number of the launch in the lower.
    void run(const Launch& launch, uint64_t seed);

    // Called by the running thread.
    uint64_t operate_in_warp(const LaneCall& call);
    int barrier(bool predicate, Where where);
    void grid_barrier(Where where);
    void may_switch();

  private:
    // Which thread runs next: the first that became ready, the last one (so one warp runs as far ahead as possible), or
    // any. A launch has one Pick, and one Order in which threads become ready that are released together.
    enum class Pick { kOldest, kNewest, kAny };
    enum class Order { kAscending, kDescending, kShuffled, kWarpsShuffled };

    [[noreturn]] static void fiber_main();
    void thread_done();
    void suspend();
    Thread* next();
    Thread* take(Block& block);
    Block* block_with_work();
    void enter(Block& block);
    bool start_block(Block& block);
    void resume(Thread& thread);
    void line_up(Block& block);

    void finish_warp(Block& block, int warp, unsigned mask);
    uint64_t shuffled_value(const Thread& thread, const Thread* warp);
    void finish_barrier(Block& block);
    void finish_grid_barrier();

    std::string name(const Thread& thread) const;
    std::string state(const Thread& thread) const;
    [[noreturn]] void fail(const std::string& what) const;
    [[noreturn]] void fail(const Thread& thread, const std::string& what) const;
    [[noreturn]] void deadlock() const;

    const Launch* launch_ = nullptr;
    uint64_t seed_ = 0;
    Random random_{0};
    Pick pick_ = Pick::kOldest;
    Order order_ = Order::kAscending;
    unsigned char garbage_ = 0;
    std::vector<std::unique_ptr<Block>> slots_;
    std::vector<Block*> resident_;
    std::vector<size_t> waiting_blocks_;
    size_t num_at_grid_ = 0;
    int64_t idle_switches_ = 0;  // since the last progress of a thread: a large number is an endless loop
    Fiber main_;
    Fiber* running_ = nullptr;
    Thread* current_ = nullptr;
    std::vector<Thread*> group_;  // threads that are released together, for line_up
    Block* entered_ = nullptr;    // the block whose shared memory is active
    std::span<unsigned char> static_shared_;
};

// The contents of fresh memory: NaN, or large numbers of every type.
unsigned char garbage_of(uint64_t seed);

// The memory of the `__shared__` variables of the module with the kernel: its thread-local storage.
std::span<unsigned char> static_shared_of(const void* kernel);

// The storage behind dynamic_shared() of csrc/cuda/launch.cuh.
inline constexpr size_t kMaxSharedBytes = 227 * 1024;
unsigned char* dynamic_shared_memory();

}  // namespace cuda_on_cpu
