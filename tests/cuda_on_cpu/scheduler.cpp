#include "scheduler.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include <sanitizer/asan_interface.h>

namespace cuda_on_cpu {

Position position;

namespace {

Scheduler* active = nullptr;

int num_threads_of(const Launch& launch) {
    return static_cast<int>(launch.block.x * launch.block.y * launch.block.z);
}

template <typename T>
void shuffle(T begin, T end, Random& random) {
    for (auto left = static_cast<size_t>(end - begin); left > 1; --left) {
        std::swap(begin[static_cast<int64_t>(left) - 1], begin[static_cast<int64_t>(random.below(left))]);
    }
}

uint3 index_in(const dim3& size, size_t rank) {
    return {
        static_cast<unsigned>(rank % size.x), static_cast<unsigned>(rank / size.x % size.y),
        static_cast<unsigned>(rank / size.x / size.y)};
}

// No std::copy: AddressSanitizer has a memmove that copies byte by byte.
void copy_bytes(std::span<unsigned char> target, std::span<const unsigned char> source) {
    std::memcpy(target.data(), source.data(), source.size());
}

}  // namespace

uint64_t Random::operator()() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

unsigned char garbage_of(uint64_t seed) {
    return Random(seed)() % 2 == 0 ? 0xff : 0x7b;
}

void Scheduler::run(const Launch& launch, uint64_t seed) {
    launch_ = &launch;
    seed_ = seed;
    random_ = Random(seed);
    pick_ = static_cast<Pick>(random_.below(3));
    order_ = static_cast<Order>(random_.below(4));
    garbage_ = garbage_of(seed + 1);
    idle_switches_ = 0;
    num_at_grid_ = 0;
    active = this;
    static_shared_ = static_shared_of(launch.kernel);
    __asan_unpoison_memory_region(dynamic_shared_memory(), kMaxSharedBytes);
    __asan_poison_memory_region(dynamic_shared_memory() + launch.shared_bytes, kMaxSharedBytes - launch.shared_bytes);
    const size_t num_blocks = static_cast<size_t>(launch.grid.x) * launch.grid.y * launch.grid.z;
    waiting_blocks_.resize(num_blocks);
    std::iota(waiting_blocks_.begin(), waiting_blocks_.end(), 0);
    shuffle(waiting_blocks_.begin(), waiting_blocks_.end(), random_);
    const size_t num_resident = launch.cooperative ? num_blocks : std::min(num_blocks, 1 + random_.below(3));
    while (slots_.size() < num_resident) slots_.push_back(std::make_unique<Block>());
    resident_.clear();
    entered_ = nullptr;
    for (size_t i = 0; i < num_resident; ++i) {
        resident_.push_back(slots_[i].get());
        start_block(*slots_[i]);
    }
    running_ = &main_;
    current_ = nullptr;
    if (Thread* thread = next()) resume(*thread);
    active = nullptr;
}

// Starts the next block of the grid in this slot, if there is one.
bool Scheduler::start_block(Block& block) {
    if (waiting_blocks_.empty()) return false;
    block.index = index_in(launch_->grid, waiting_blocks_.back());
    waiting_blocks_.pop_back();
    block.num_threads = num_threads_of(*launch_);
    block.num_done = block.num_at_barrier = 0;
    block.lanes_waiting.assign(static_cast<size_t>((block.num_threads + kWarp - 1) / kWarp), 0);
    if (block.threads.size() < static_cast<size_t>(block.num_threads)) {
        block.threads.resize(static_cast<size_t>(block.num_threads));
    }
    for (int rank = 0; rank < block.num_threads; ++rank) {
        Thread& thread = block.threads[static_cast<size_t>(rank)];
        thread.block = &block;
        thread.rank = rank;
        thread.index = index_in(launch_->block, static_cast<size_t>(rank));
        if (!thread.fiber) thread.fiber = std::make_unique<Fiber>(fiber_main);
        group_.push_back(&thread);
    }
    line_up(block);
    block.static_shared.assign(static_shared_.size(), garbage_);
    block.dynamic_shared.assign(launch_->shared_bytes, garbage_);
    if (entered_ == &block) entered_ = nullptr;
    return true;
}

// Between threads, each fiber waits at the end of this loop.
void Scheduler::fiber_main() {
    for (;;) {
        active->launch_->body();
        active->thread_done();
    }
}

void Scheduler::thread_done() {
    Block& block = *current_->block;
    current_->state = Thread::State::kDone;
    idle_switches_ = 0;
    if (++block.num_done == block.num_threads && !start_block(block)) std::erase(resident_, &block);
    suspend();
}

// Suspends the running thread. After the last thread, the launch returns.
void Scheduler::suspend() {
    if (Thread* thread = next()) {
        resume(*thread);
    } else {
        Fiber& from = *running_;
        running_ = &main_;
        Fiber::switch_to(from, main_);
    }
}

void Scheduler::resume(Thread& thread) {
    current_ = &thread;
    enter(*thread.block);
    position = {thread.index, thread.block->index, launch_->block, launch_->grid};
    Fiber& from = *running_;
    running_ = thread.fiber.get();
    if (running_ != &from) Fiber::switch_to(from, *running_);
}

// Replaces the shared memory of the previous block with that of this block.
void Scheduler::enter(Block& block) {
    if (entered_ == &block) return;
    const std::span dynamic_shared(dynamic_shared_memory(), launch_->shared_bytes);
    if (entered_ != nullptr) {
        copy_bytes(entered_->static_shared, static_shared_);
        copy_bytes(entered_->dynamic_shared, dynamic_shared);
    }
    copy_bytes(static_shared_, block.static_shared);
    copy_bytes(dynamic_shared, block.dynamic_shared);
    entered_ = &block;
}

// The next thread; null if the grid is done. It seldom changes to another block while this one can continue.
Thread* Scheduler::next() {
    Block* block = current_ != nullptr ? current_->block : nullptr;
    if (block == nullptr || block->ready.empty() || (resident_.size() > 1 && random_() % 256 == 0)) {
        block = block_with_work();
    }
    if (block == nullptr && !resident_.empty()) deadlock();
    return block != nullptr ? take(*block) : nullptr;
}

Block* Scheduler::block_with_work() {
    if (resident_.empty()) return nullptr;
    const size_t first = random_.below(resident_.size());
    for (size_t i = 0; i < resident_.size(); ++i) {
        Block* block = resident_[(first + i) % resident_.size()];
        if (!block->ready.empty()) return block;
    }
    return nullptr;
}

Thread* Scheduler::take(Block& block) {
    if (pick_ == Pick::kOldest) return block.ready.take_first();
    if (pick_ == Pick::kAny) std::swap(block.ready[random_.below(block.ready.size())], block.ready[0]);
    return pick_ == Pick::kAny ? block.ready.take_first() : block.ready.take_last();
}

void Scheduler::line_up(Block& block) {
    const auto begin = group_.begin(), end = group_.end();
    if (order_ == Order::kShuffled) {
        shuffle(begin, end, random_);
    } else if (order_ == Order::kWarpsShuffled && group_.size() > kWarp) {
        std::vector<size_t> place(block.lanes_waiting.size());
        std::iota(place.begin(), place.end(), 0);
        shuffle(place.begin(), place.end(), random_);
        const auto place_of = [&](const Thread* t) { return place[static_cast<size_t>(t->rank / kWarp)]; };
        std::stable_sort(begin, end, [&](const Thread* a, const Thread* b) { return place_of(a) < place_of(b); });
    } else if (order_ == Order::kDescending) {
        std::reverse(begin, end);
    }
    for (Thread* thread : group_) {
        thread->state = Thread::State::kReady;
        block.ready.put_last(thread);
    }
    group_.clear();
}

// Sometimes lets other threads run first. The thread becomes the last of the ready ones, so that in a loop that waits
// for another thread, that thread runs.
void Scheduler::may_switch() {
    if (random_() % 4 != 0) return;
    if (++idle_switches_ > 5'000'000) fail(*current_, "waits in a loop for what never comes");
    Block& block = *current_->block;
    if (pick_ == Pick::kNewest) {
        block.ready.put_first(current_);
    } else {
        block.ready.put_last(current_);
    }
    if (random_() % 8 == 0) {
        resume(*take(*block_with_work()));
    } else {
        suspend();
    }
}

void may_switch() {
    active->may_switch();
}

uint64_t operate_in_warp(const LaneCall& call) {
    return active->operate_in_warp(call);
}

int barrier(bool predicate, Where where) {
    return active->barrier(predicate, where);
}

void grid_barrier(Where where) {
    active->grid_barrier(where);
}

}  // namespace cuda_on_cpu
