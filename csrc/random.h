// Random numbers from a counter: standard normal ones, and the bits by which states are rounded. A number depends on
// (seed, step, index) only, so it is the same on every rank, thread, instruction set and device, and for every
// partition of a buffer. The CPU and the CUDA kernels include this file.
//
// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") takes the seed as its key and the
// counter {index / 4, step}, each of 64 bits, low word first. The word of `index` is the one at index % 4. Box and
// Muller's method makes four normals of the four words; number `index` is the one at index % 4.
//
// All operations round in the same way on every device: + - * / and sqrt, without contraction, and integer operations.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "args.h"

namespace ddpcore {

struct Words {
    uint32_t words[4];
};

struct Normals {
    float values[4];
};

DDPCORE_HOST_DEVICE uint32_t low_word(uint64_t value) {
    return static_cast<uint32_t>(value);
}

DDPCORE_HOST_DEVICE uint32_t high_word(uint64_t value) {
    return static_cast<uint32_t>(value >> 32);
}

DDPCORE_HOST_DEVICE Words philox(Words counter, uint64_t key) {
    uint32_t c0 = counter.words[0], c1 = counter.words[1], c2 = counter.words[2], c3 = counter.words[3];
    uint32_t k0 = low_word(key), k1 = high_word(key);
    for (int round = 0; round < 10; ++round) {
        const uint64_t left = uint64_t{0xD2511F53} * c0, right = uint64_t{0xCD9E8D57} * c2;
        c0 = high_word(right) ^ c1 ^ k0;
        c1 = low_word(right);
        c2 = high_word(left) ^ c3 ^ k1;
        c3 = low_word(left);
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return {{c0, c1, c2, c3}};
}

// sqrt(-2 ln u) for u = (word/2 + 0.5) / 2^31, rounded to fp32: from 0 to 6.66. With u = 2^e m and m around 1,
// ln u = e ln 2 + 2 artanh((m-1) / (m+1)), with coefficients fitted to this range (relative error 1e-9).
DDPCORE_HOST_DEVICE float normal_radius(uint32_t word) {
    const float uniform = (static_cast<float>(static_cast<int32_t>(word >> 1)) + 0.5f) * 0x1p-31f;
    uint32_t bits;
    memcpy(&bits, &uniform, sizeof bits);
    const int32_t exponent = static_cast<int32_t>(bits - 0x3f3504f3u) >> 23;  // m from sqrt(1/2) to sqrt(2)
    bits -= static_cast<uint32_t>(exponent) << 23;
    float mantissa;
    memcpy(&mantissa, &bits, sizeof mantissa);
    const float ratio = (mantissa - 1.0f) / (mantissa + 1.0f), square = ratio * ratio;
    const float series = square * (0.33333388f + square * (0.19988766f + square * 0.14935999f));
    return sqrtf(static_cast<float>(exponent) * -1.38629436f - 4.0f * (ratio + ratio * series));
}

// Box and Muller 1958: two normals from two words: one gives the radius, one the angle 2 pi word / 2^32. The angle is
// a multiple of pi/2 plus a remainder of at most pi/4 in absolute value (relative error of the series 4e-9).
DDPCORE_HOST_DEVICE void normal_pair(uint32_t radius_word, uint32_t angle_word, float& first, float& second) {
    const float radius = normal_radius(radius_word);
    const uint32_t turned = angle_word + (1u << 29), quarter = turned >> 30;
    const int32_t rest = static_cast<int32_t>(turned & 0x3fffffffu) - (1 << 29);
    const float angle = static_cast<float>(rest) * 1.46291808e-9f;  // pi / 2^31
    const float square = angle * angle;
    const float sine = angle + angle * (square * (-0.16666655f + square * (0.008332178f + square * -0.00019517234f)));
    const float cosine =
        1.0f - square * (0.5f - square * (0.041666646f + square * (-0.0013887367f + square * 2.4438375e-05f)));
    const float x = (quarter & 1u) != 0 ? sine : cosine, y = (quarter & 1u) != 0 ? cosine : sine;
    first = radius * (((quarter + 1u) & 2u) != 0 ? -x : x);
    second = radius * ((quarter & 2u) != 0 ? -y : y);
}

// The words of indices 4 * counter to 4 * counter + 3.
DDPCORE_HOST_DEVICE Words four_words(uint64_t seed, uint64_t step, uint64_t counter) {
    return philox({{low_word(counter), high_word(counter), low_word(step), high_word(step)}}, seed);
}

// The word of one index.
DDPCORE_HOST_DEVICE uint32_t random_word(uint64_t seed, uint64_t step, uint64_t index) {
    const Words four = four_words(seed, step, index / 4);
    const uint32_t low = (index & 1) != 0 ? four.words[1] : four.words[0];
    const uint32_t high = (index & 1) != 0 ? four.words[3] : four.words[2];
    return (index & 2) != 0 ? high : low;
}

// The normals of the same indices as four_words.
DDPCORE_HOST_DEVICE Normals four_normals(uint64_t seed, uint64_t step, uint64_t counter) {
    const Words drawn = four_words(seed, step, counter);
    Normals normals;
    normal_pair(drawn.words[0], drawn.words[1], normals.values[0], normals.values[1]);
    normal_pair(drawn.words[2], drawn.words[3], normals.values[2], normals.values[3]);
    return normals;
}

// ---- stochastic rounding ----

// The random bits of a word for one of the two states of an element: the low half for the first one, the momentum or
// exp_avg, and the high half for exp_avg_sq.
enum class State { kFirst, kSecond };

DDPCORE_HOST_DEVICE uint32_t bits_for(State state, uint32_t word) {
    return state == State::kFirst ? word & 0xffffu : word >> 16;
}

// The bits of the bf16 number to which a value is rounded: the neighbour away from zero with a probability of the
// dropped 16 bits over 2^16, else the one towards zero. So the mean of the result is the value, and a bf16 number stays
// what it is. A finite value stays finite: beyond the largest bf16 number it becomes that. `random`: 16 bits.
DDPCORE_HOST_DEVICE uint16_t round_to_bf16(float value, uint32_t random) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t magnitude = bits & 0x7fffffffu, kept = bits >> 16, rounded = (bits + random) >> 16;
    const uint32_t special = magnitude > 0x7f800000u ? kept | 0x40u : kept;  // a quiet NaN
    return static_cast<uint16_t>(magnitude >= 0x7f7f0000u ? special : rounded);
}

}  // namespace ddpcore
