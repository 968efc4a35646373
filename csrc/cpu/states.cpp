// The conversions of states that are stored in bf16, for the steps of all optimizers.
#include "states.h"

#include "../random.h"

namespace ddpcore::cpu {

namespace {

inline constexpr int64_t kDrawn = 256;  // random words that stay in L1; a multiple of 4

template <State state>
DDPCORE_INLINE void round_by(const uint32_t* words, int64_t numel, float* values, BFloat16* stored) {
    DDPCORE_IVDEP
    for (int64_t i = 0; i < numel; ++i) {
        const BFloat16 rounded{round_to_bf16(values[i], bits_for(state, words[i]))};
        stored[i] = rounded;
        values[i] = load(rounded);
    }
}

}  // namespace

DDPCORE_CLONES void widen_states(const BFloat16* stored, float* values, int64_t numel) {
    DDPCORE_IVDEP
    for (int64_t i = 0; i < numel; ++i) values[i] = load(stored[i]);
}

DDPCORE_CLONES void widen(DType dtype, const void* data, int64_t first, float* values, int64_t numel) {
    with_storage(dtype, [&](auto* tag) __attribute__((always_inline)) {
        const auto* from = static_cast<decltype(tag)>(const_cast<void*>(data)) + first;
        DDPCORE_IVDEP
        for (int64_t i = 0; i < numel; ++i) values[i] = load(from[i]);
    });
}

DDPCORE_CLONES void narrow(DType dtype, void* data, int64_t first, const float* values, int64_t numel) {
    with_storage(dtype, [&](auto* tag) __attribute__((always_inline)) {
        auto* to = static_cast<decltype(tag)>(data) + first;
        DDPCORE_IVDEP
        for (int64_t i = 0; i < numel; ++i) to[i] = store<std::remove_pointer_t<decltype(tag)>>(values[i]);
    });
}

DDPCORE_CLONES void round_states(
    const Draw& draw, int64_t numel, float* first, BFloat16* stored_first, float* second, BFloat16* stored_second) {
    uint32_t words[kDrawn];
    for (int64_t begin = 0; begin < numel; begin += kDrawn) {
        const int64_t count = std::min(kDrawn, numel - begin), num_fours = (count + 3) / 4;
        const auto counter = static_cast<uint64_t>(draw.index + begin) / 4;
        for (int64_t i = 0; i < num_fours; ++i) {
            const Words four = four_words(draw.seed, draw.step, counter + static_cast<uint64_t>(i));
            for (int k = 0; k < 4; ++k) words[4 * i + k] = four.words[k];
        }
        round_by<State::kFirst>(words, count, first + begin, stored_first + begin);
        if (second != nullptr) round_by<State::kSecond>(words, count, second + begin, stored_second + begin);
    }
}

}  // namespace ddpcore::cpu
