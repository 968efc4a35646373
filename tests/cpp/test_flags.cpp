// Counters in shared memory under stress: processes that share a mapping, each with several threads. The order of who
// waits for whom is drawn from a seed. DDPCORE_STRESS_SECONDS and DDPCORE_STRESS_SEED change length and order.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

extern "C" {
uint32_t ddpcore_flag_read(uint32_t* flag);
void ddpcore_flag_post(uint32_t* flag, uint32_t value);
bool ddpcore_flag_wait(uint32_t* flag, uint32_t target, double seconds);
}

namespace {

constexpr int kProcesses = 4;
constexpr int kThreads = 8;  // of each process
constexpr int kMembers = kProcesses * kThreads;
constexpr int kWords = 512;       // of a member's segment
constexpr double kPatience = 60;  // seconds, so that a lost wake-up is a failure and no hang
constexpr uint32_t kRoundsAtATime = 50;

double number(const char* name, double otherwise) {
    const char* text = std::getenv(name);
    return text == nullptr ? otherwise : std::strtod(text, nullptr);
}

struct Member {
    // Flags: a counter, and how many sleep until it grows.
    alignas(64) uint32_t arrived[2];       // the segment of round i may be read once the counter is above i
    alignas(64) uint32_t finished[2];      // this member has read the segments of round i once the counter is above i
    alignas(64) uint32_t segment[kWords];  // plain memory: only the two flags order its writes and reads
};

struct Shared {
    Member members[kMembers];
    alignas(64) uint32_t last_round;  // member 0 decides, before each kRoundsAtATime rounds
    alignas(64) uint32_t decided[2];
};

// A wait whose wake-up is lost sees the value when its time is up.
bool wait_awake(uint32_t* flag, uint32_t target) {
    const auto start = std::chrono::steady_clock::now();
    const bool has_come = ddpcore_flag_wait(flag, target, kPatience);
    return has_come && std::chrono::steady_clock::now() - start < std::chrono::duration<double>(kPatience / 2);
}

uint32_t value_of(int member, uint32_t round, int word) {
    return (round * kMembers + member) * 2654435761u + word;
}

// All write their own segment, read those of two others, and go on when the readers of their own have finished.
bool take_part(Shared& shared, int me, uint32_t seed, uint32_t first, std::chrono::steady_clock::time_point end) {
    Member& own = shared.members[me];
    for (uint32_t i = 0;; ++i) {
        const uint32_t round = first + i;  // near 2^32, so that the counters wrap around
        if (i % kRoundsAtATime == 0) {
            if (me == 0) {
                shared.last_round = round + (std::chrono::steady_clock::now() < end ? kRoundsAtATime : 0);
                ddpcore_flag_post(shared.decided, round + 1);
            } else if (!wait_awake(shared.decided, round + 1)) {
                return false;
            }
            if (shared.last_round == round) return true;
        }
        std::mt19937 random(seed + round);  // the same on every member
        const int one = 1 + static_cast<int>(random() % (kMembers - 1));
        const int two = 1 + static_cast<int>(random() % (kMembers - 1));
        for (int word = 0; word < kWords; ++word) own.segment[word] = value_of(me, round, word);
        ddpcore_flag_post(own.arrived, round + 1);
        for (const int distance : {one, two}) {
            const int other = (me + distance) % kMembers;
            Member& theirs = shared.members[other];
            if (!wait_awake(theirs.arrived, round + 1)) return false;
            for (int word = 0; word < kWords; ++word) {
                if (theirs.segment[word] != value_of(other, round, word)) return false;
            }
        }
        ddpcore_flag_post(own.finished, round + 1);
        for (const int distance : {one, two}) {
            const int reader = (me + kMembers - distance) % kMembers;
            if (!wait_awake(shared.members[reader].finished, round + 1)) return false;
        }
        if ((i + 1) % kRoundsAtATime != 0) continue;
        for (Member& other : shared.members) {  // last_round is written again when all have read it
            if (!wait_awake(other.finished, round + 1)) return false;
        }
    }
}

bool run_threads(Shared& shared, int process, uint32_t seed, uint32_t first, double seconds) {
    const auto end = std::chrono::steady_clock::now() +
                     std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds));
    std::vector<std::thread> threads;
    std::vector<char> succeeded(kThreads, 0);
    for (int thread = 0; thread < kThreads; ++thread) {
        threads.emplace_back([&, thread] {
            succeeded[thread] = take_part(shared, process * kThreads + thread, seed, first, end) ? 1 : 0;
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (const char one : succeeded) {
        if (one == 0) return false;
    }
    return true;
}

TEST(FlagsStress, ProcessesOfThreadsReadEachOthersSegments) {
    const auto seed = static_cast<uint32_t>(number("DDPCORE_STRESS_SEED", 0));
    const double seconds = number("DDPCORE_STRESS_SECONDS", 1);
    void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    Shared& shared = *static_cast<Shared*>(memory);
    const uint32_t first = 0u - 120u;
    for (Member& member : shared.members) member.arrived[0] = member.finished[0] = first;
    shared.decided[0] = first;
    std::vector<pid_t> children;
    for (int process = 1; process < kProcesses; ++process) {
        const pid_t child = fork();  // before this process has threads
        ASSERT_GE(child, 0);
        if (child == 0) std::exit(run_threads(shared, process, seed, first, seconds) ? 0 : 1);
        children.push_back(child);
    }
    EXPECT_TRUE(run_threads(shared, 0, seed, first, seconds));
    for (const pid_t child : children) {
        int status = 0;
        ASSERT_EQ(waitpid(child, &status, 0), child);
        EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "a child ended with status " << status;
    }
    std::printf("seed %u: %u rounds of %d members\n", seed, shared.last_round - first, kMembers);
    EXPECT_GT(shared.last_round - first, 0u);
    munmap(memory, sizeof(Shared));
}

TEST(Flags, AWaitEndsInTimeAndValuesWrapAround) {
    alignas(64) uint32_t flag[2] = {0xfffffffeu, 0};
    EXPECT_FALSE(ddpcore_flag_wait(flag, 1, 0.01));
    EXPECT_FALSE(ddpcore_flag_wait(flag, 1, -1));
    ddpcore_flag_post(flag, 2);
    EXPECT_EQ(ddpcore_flag_read(flag), 2u);
    EXPECT_TRUE(ddpcore_flag_wait(flag, 0xfffffffeu, 0));
    EXPECT_TRUE(ddpcore_flag_wait(flag, 2, 1e300));
}

}  // namespace
