// The synchronization of threads: of warps, of blocks and of the grid. Errors if threads wait for ever.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "scheduler.h"

#include <sanitizer/common_interface_defs.h>

namespace cuda_on_cpu {

namespace {

bool same_place(const Where& a, const Where& b) {
    return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

std::string text_of(const Where& where) {
    return std::string(where.file) + ":" + std::to_string(where.line);
}

std::string text_of(const uint3& index) {
    char text[40];
    std::snprintf(text, sizeof text, "(%u,%u,%u)", index.x, index.y, index.z);
    return text;
}

std::string hex(unsigned value) {
    char text[16];
    std::snprintf(text, sizeof text, "0x%08x", value);
    return text;
}

std::string kernel_name(const void* kernel) {
    char text[1024] = "";
    char* const inside = static_cast<char*>(const_cast<void*>(kernel)) + 1;  // it looks before a return address
    __sanitizer_symbolize_pc(inside, "%f", text, sizeof text);
    return text;
}

}  // namespace

// ---- warps ----

uint64_t Scheduler::operate_in_warp(const LaneCall& call) {
    Thread& thread = *current_;
    Block& block = *thread.block;
    const int warp = thread.rank / kWarp, lane = thread.rank % kWarp;
    if ((call.mask >> lane & 1u) == 0) fail(thread, text_of(call.where) + ": the mask does not name the caller");
    if (call.width < 1 || call.width > kWarp || (call.width & (call.width - 1)) != 0) {
        fail(thread, text_of(call.where) + ": width " + std::to_string(call.width) + " is no power of two up to 32");
    }
    thread.call = call;
    thread.state = Thread::State::kAtWarp;
    unsigned& waiting = block.lanes_waiting[static_cast<size_t>(warp)];
    waiting |= 1u << lane;
    if ((waiting & call.mask) == call.mask) finish_warp(block, warp, call.mask);
    suspend();
    return thread.result;
}

// All lanes of the mask have arrived: each gets its result, and all can continue.
void Scheduler::finish_warp(Block& block, int warp, unsigned mask) {
    Thread* const lanes = &block.threads[static_cast<size_t>(warp * kWarp)];
    const LaneCall& call = current_->call;
    uint64_t votes = 0;
    for (int lane = 0; lane < kWarp; ++lane) {
        if ((mask >> lane & 1u) == 0) continue;
        Thread& thread = lanes[lane];
        if (thread.call.mask != mask || thread.call.operation != call.operation ||
            !same_place(thread.call.where, call.where)) {
            fail(
                *current_, "the lanes of a warp wait at different places:\n  " + state(*current_) + "\n  " +
                               name(thread) + " " + state(thread));
        }
        votes |= thread.call.value << lane;
        group_.push_back(&thread);
    }
    for (Thread* thread : group_) {
        const bool votes_count = call.operation == WarpOperation::kVote;
        thread->result = votes_count                                  ? votes
                         : call.operation == WarpOperation::kSyncWarp ? 0
                                                                      : shuffled_value(*thread, lanes);
    }
    block.lanes_waiting[static_cast<size_t>(warp)] &= ~mask;
    idle_switches_ = 0;
    line_up(block);
}

uint64_t Scheduler::shuffled_value(const Thread& thread, const Thread* warp) {
    const LaneCall& call = thread.call;
    const int lane = thread.rank % kWarp;
    const int first = lane & ~(call.width - 1), last = first + call.width - 1;
    int source = lane;
    switch (call.operation) {
        case WarpOperation::kShuffleDown: source = lane + call.lane > last ? lane : lane + call.lane; break;
        case WarpOperation::kShuffleUp: source = lane - call.lane < first ? lane : lane - call.lane; break;
        case WarpOperation::kShuffleXor: source = (lane ^ call.lane) > last ? lane : lane ^ call.lane; break;
        default: source = first + (call.lane & (call.width - 1));
    }
    if (source < 0 || source >= kWarp || (call.mask >> source & 1u) == 0) {
        fail(
            thread, text_of(call.where) + ": reads lane " + std::to_string(source) + ", which mask " + hex(call.mask) +
                        " does not name");
    }
    return warp[source].call.value;
}

// ---- blocks and the grid ----

int Scheduler::barrier(bool predicate, Where where) {
    Thread& thread = *current_;
    thread.call = {WarpOperation::kSyncWarp, 0, predicate ? 1u : 0u, 0, 0, where};
    thread.state = Thread::State::kAtBarrier;
    if (++thread.block->num_at_barrier == thread.block->num_threads) finish_barrier(*thread.block);
    suspend();
    return static_cast<int>(thread.result);
}

void Scheduler::finish_barrier(Block& block) {
    uint64_t sum = 0;
    for (int rank = 0; rank < block.num_threads; ++rank) {
        Thread& thread = block.threads[static_cast<size_t>(rank)];
        if (!same_place(thread.call.where, current_->call.where)) {
            fail(
                *current_, "the threads of a block wait at different barriers:\n  " + state(*current_) + "\n  " +
                               name(thread) + " " + state(thread));
        }
        sum += thread.call.value;
        group_.push_back(&thread);
    }
    for (Thread* thread : group_) thread->result = sum;
    block.num_at_barrier = 0;
    idle_switches_ = 0;
    line_up(block);
}

void Scheduler::grid_barrier(Where where) {
    Thread& thread = *current_;
    if (!launch_->cooperative) fail(thread, text_of(where) + ": waits for the grid, but the launch is not cooperative");
    thread.call = {WarpOperation::kSyncWarp, 0, 0, 0, 0, where};
    thread.state = Thread::State::kAtGrid;
    const size_t num_blocks = static_cast<size_t>(launch_->grid.x) * launch_->grid.y * launch_->grid.z;
    if (++num_at_grid_ == num_blocks * static_cast<size_t>(thread.block->num_threads)) finish_grid_barrier();
    suspend();
}

void Scheduler::finish_grid_barrier() {
    num_at_grid_ = 0;
    idle_switches_ = 0;
    for (Block* block : resident_) {
        for (int rank = 0; rank < block->num_threads; ++rank) {
            Thread& thread = block->threads[static_cast<size_t>(rank)];
            if (!same_place(thread.call.where, current_->call.where)) {
                fail(
                    *current_, "the threads of a grid wait at different barriers:\n  " + state(*current_) + "\n  " +
                                   name(thread) + " " + state(thread));
            }
            group_.push_back(&thread);
        }
        line_up(*block);
    }
}

// ---- errors ----

std::string Scheduler::name(const Thread& thread) const {
    return "block " + text_of(thread.block->index) + " thread " + text_of(thread.index);
}

std::string Scheduler::state(const Thread& thread) const {
    switch (thread.state) {
        case Thread::State::kReady: return "could go on";
        case Thread::State::kAtWarp:
            return "waits at " + text_of(thread.call.where) + " for the lanes " + hex(thread.call.mask);
        case Thread::State::kAtBarrier: return "waits at " + text_of(thread.call.where) + " for its block";
        case Thread::State::kAtGrid: return "waits at " + text_of(thread.call.where) + " for the grid";
        case Thread::State::kDone: return "has returned";
    }
    return "";
}

void Scheduler::fail(const std::string& what) const {
    std::fprintf(
        stderr, "cuda_on_cpu: %s\n  in %s, CUDA_ON_CPU_SEED=%u, launch %u\n", what.c_str(),
        kernel_name(launch_->kernel).c_str(), static_cast<unsigned>(seed_ >> 32), static_cast<unsigned>(seed_));
    std::abort();
}

void Scheduler::fail(const Thread& thread, const std::string& what) const {
    fail(name(thread) + ": " + what);
}

// No thread can continue: reports the places where threads wait, with the first thread of each.
void Scheduler::deadlock() const {
    std::string what = "deadlock: no thread can go on";
    for (const Block* block : resident_) {
        std::string before;
        for (int rank = 0; rank < block->num_threads && what.size() < 2000; ++rank) {
            const Thread& thread = block->threads[static_cast<size_t>(rank)];
            if (state(thread) != before) what += "\n  from " + name(thread) + " on: " + state(thread);
            before = state(thread);
        }
    }
    fail(what);
}

}  // namespace cuda_on_cpu
