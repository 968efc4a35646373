// States that are stored in bf16 and rounded stochastically (Rounded), and those that are stored as they are.
#pragma once

#include "../random.h"
#include "storage.cuh"

namespace ddpcore::cuda {

// The seed and the step of the random numbers of a group.
template <bool Rounded>
struct StateKey {};
template <>
struct StateKey<true> {
    uint64_t seed, step;
};

template <bool Rounded>
DDPCORE_HOST_DEVICE StateKey<Rounded> state_key(uint64_t seed, const StepGroup& group) {
    if constexpr (Rounded) {
        return {seed, step_of(group)};
    } else {
        return {};
    }
}

// The random words of a thread's share of a block, whose first element has this index. A draw is for four elements, so
// of() takes them in ascending order.
template <bool Rounded, int width>
class ShareWords {
  public:
    __device__ __forceinline__ ShareWords(const StateKey<Rounded>& key, int64_t index) : key_(key), index_(index) {}

    __device__ __forceinline__ uint32_t of(int i) {
        if constexpr (Rounded) {
            const auto index = static_cast<uint64_t>(index_ + place_of<width>(i));
            if (i % 4 == 0) four_ = four_words(key_.seed, key_.step, index / 4);
        }
        return four_.words[i % 4];
    }

  private:
    static_assert(width % 4 == 0);
    const StateKey<Rounded>& key_;
    int64_t index_;
    Words four_{};
};

// The random word of one element.
template <bool Rounded>
__device__ __forceinline__ uint32_t state_word(const StateKey<Rounded>& key, int64_t index) {
    if constexpr (Rounded) {
        return random_word(key.seed, key.step, static_cast<uint64_t>(index));
    } else {
        return 0;
    }
}

template <typename S, bool Rounded>
__device__ __forceinline__ S store_state(State state, float value, uint32_t word) {
    if constexpr (Rounded) {
        const uint16_t bits = round_to_bf16(value, bits_for(state, word));
        S result;
        static_assert(sizeof result == sizeof bits);
        memcpy(&result, &bits, sizeof result);
        return result;
    } else {
        return store<S>(value);
    }
}

}  // namespace ddpcore::cuda
