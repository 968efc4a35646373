// The generator of csrc/random.h: published vectors, and its normals against Box and Muller's rule in double.
#include "random.h"

#include "testing.h"

namespace ddpcore::test {
namespace {

struct KnownAnswer {
    Words counter;
    uint64_t key;
    Words drawn;
};

// Those of Random123 for philox4x32-10 (Salmon et al. 2011), the key's low word first.
const KnownAnswer kKnownAnswers[] = {
    {{{0, 0, 0, 0}}, 0, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
    {{{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}},
     0xffffffffffffffff,
     {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
    {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
     0x299f31d0a4093822,
     {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}},
};

TEST(RandomTest, PhiloxGivesThePublishedWords) {
    for (const KnownAnswer& known : kKnownAnswers) {
        const Words drawn = philox(known.counter, known.key);
        for (int k = 0; k < 4; ++k) ASSERT_EQ(drawn.words[k], known.drawn.words[k]) << k;
    }
}

TEST(RandomTest, SeedStepAndIndexHave64BitsEach) {
    const uint64_t seed = 0x299f31d0a4093822, step = 0x0370734413198a2e, counter = 0x85a308d3243f6a88;
    const Words& words = kKnownAnswers[2].drawn;
    const Normals normals = four_normals(seed, step, counter);
    for (int k = 0; k < 4; k += 2) {
        float first, second;
        normal_pair(words.words[k], words.words[k + 1], first, second);
        ASSERT_EQ(normals.values[k], first);
        ASSERT_EQ(normals.values[k + 1], second);
    }
}

// About a million words all over their range, and all near both ends, where logarithm and angle are at their worst.
template <typename Visit>
void for_many_words(Visit&& visit) {
    for (uint64_t word = 0; word < uint64_t{1} << 32; word += 4099) visit(static_cast<uint32_t>(word));
    for (uint32_t near = 0; near < 100000; ++near) {
        visit(near);
        visit(0xffffffffu - near);
        for (uint32_t eighth = 1; eighth < 8; ++eighth) visit((eighth << 29) + near - 50000);
    }
}

// Of the radius, relative; of the pair, in units of the radius. Some roundings of 2^-24 each, and the series' own
// error.
constexpr double kRadiusError = 0x1p-22, kPairError = 0x1p-22;

TEST(RandomTest, RadiusIsThatOfTheRoundedUniform) {
    double largest = 0.0, worst = 0.0;
    for_many_words([&](uint32_t word) {
        const float uniform = static_cast<float>((static_cast<float>(word >> 1) + 0.5f) * 0x1p-31f);
        const double exact = std::sqrt(-2.0 * std::log(static_cast<double>(uniform)));
        const double error = std::abs(normal_radius(word) - exact);
        worst = std::max(worst, error - kRadiusError * exact);
        largest = std::max(largest, exact);
    });
    ASSERT_LE(worst, 0.0);
    ASSERT_GT(largest, 6.66);
    ASSERT_EQ(normal_radius(0xffffffff), 0.0f);
}

TEST(RandomTest, PairsLieOnTheCircleOfTheirRadius) {
    uint32_t radius_word = 12345;
    double worst = 0.0;  // in units of the radius
    for_many_words([&](uint32_t word) {
        radius_word = radius_word * 1664525u + 1013904223u;
        float first, second;
        normal_pair(radius_word, word, first, second);
        const double radius = normal_radius(radius_word), angle = M_PI * static_cast<int32_t>(word) / 0x1p31;
        if (radius == 0.0) return;
        worst = std::max(worst, std::abs(first / radius - std::cos(angle)));
        worst = std::max(worst, std::abs(second / radius - std::sin(angle)));
    });
    ASSERT_LE(worst, kPairError);
}

}  // namespace
}  // namespace ddpcore::test
