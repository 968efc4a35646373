// sgd_step_ against momentum SGD in double, element by element.
#include "problems.h"

namespace ddpcore::test {
namespace {

// One element in double, each value with the sum of its absolute terms.
struct Exact {
    double weight, momentum, weight_magnitude, momentum_magnitude;
};

Exact exact_step(double weight, double grad, double momentum, const SgdRule& rule) {
    double direction = rule.grad_sign * grad + rule.weight_decay * weight;
    double magnitude = std::abs(grad) + rule.weight_decay * std::abs(weight);
    double momentum_magnitude = std::abs(momentum);
    if (rule.momentum != 0.0f) {
        const double decay = rule.momentum, fresh = rule.one_minus_dampening;
        momentum_magnitude = rule.first_step ? magnitude : decay * momentum_magnitude + fresh * magnitude;
        momentum = rule.first_step ? direction : decay * momentum + fresh * direction;
        magnitude = rule.nesterov ? magnitude + decay * momentum_magnitude : momentum_magnitude;
        direction = rule.nesterov ? direction + decay * momentum : momentum;
    }
    return {weight - rule.lr * direction, momentum, std::abs(weight) + rule.lr * magnitude, momentum_magnitude};
}

// Runs one step over all blocks and compares every element.
template <typename T>
void expect_exact(const std::vector<int64_t>& sizes, int64_t offset, const SgdRule& rule) {
    const SgdProblem<T> before(sizes, offset, rule), after(sizes, offset, rule);
    cpu::sgd_step_(after.args(), 0, after.num_blocks);
    for (size_t s = 0; s < sizes.size(); ++s) {
        for (int64_t i = 0; i < sizes[s]; ++i) {
            const double momentum = (*before.momenta[s])[i];
            const Exact exact = exact_step((*before.params[s])[i], (*before.grads[s])[i], momentum, rule);
            // 9 roundings: decay 2, momentum 3, Nesterov 2, step 2.
            ASSERT_NEAR((*after.params[s])[i], exact.weight, tolerance<T>(exact.weight, exact.weight_magnitude, 9))
                << "param " << i << " of segment " << s;
            if (rule.momentum == 0.0f) continue;
            ASSERT_NEAR(
                (*after.momenta[s])[i], exact.momentum, tolerance<T>(exact.momentum, exact.momentum_magnitude, 5))
                << "momentum " << i << " of segment " << s;
        }
        ASSERT_TRUE(after.params[s]->guards_untouched());
        ASSERT_TRUE(after.momenta[s]->guards_untouched());
        ASSERT_TRUE(after.grads[s]->same_bits(*before.grads[s]));
        if (rule.momentum == 0.0f) {
            ASSERT_TRUE(after.momenta[s]->same_bits(*before.momenta[s]));
        }
    }
}

template <typename T>
class SgdTest : public ::testing::Test {};
TYPED_TEST_SUITE(SgdTest, Storages);

TYPED_TEST(SgdTest, EveryRuleSizeAndAlignment) {
    for (const SgdRule& rule : all_rules()) {
        for (const int64_t numel : kSizes) {
            for (const int64_t offset : kOffsets) {
                SCOPED_TRACE(
                    ::testing::Message() << "flags " << sgd_flags(rule) << " numel " << numel << "+" << offset);
                ASSERT_NO_FATAL_FAILURE(expect_exact<TypeParam>({numel}, offset, rule));
            }
        }
    }
}

TYPED_TEST(SgdTest, ManySegmentsSomeEmpty) {
    for (const SgdRule& rule : all_rules()) ASSERT_NO_FATAL_FAILURE(expect_exact<TypeParam>(kManySizes, 1, rule));
}

TYPED_TEST(SgdTest, NoSegmentsAndOnlyEmptyOnes) {
    const SgdRule rule = all_rules().back();
    ASSERT_NO_FATAL_FAILURE(expect_exact<TypeParam>({}, 0, rule));
    ASSERT_NO_FATAL_FAILURE(expect_exact<TypeParam>({0, 0}, 0, rule));
}

TYPED_TEST(SgdTest, AnySplitIntoRangesHasTheSameBits) {
    for (const SgdRule& rule : all_rules()) {
        const SgdProblem<TypeParam> whole(kManySizes, 0, rule), split(kManySizes, 3, rule);
        cpu::sgd_step_(whole.args(), 0, whole.num_blocks);
        for (const auto& [begin, end] : random_ranges(split.num_blocks, 7)) cpu::sgd_step_(split.args(), begin, end);
        ASSERT_TRUE(split.same_bits(whole));
    }
}

// A buffer twice as long, stepped as one tensor and as two halves: which blocks the elements fall into does not matter.
TYPED_TEST(SgdTest, FlatBufferAndListOfTensorsHaveTheSameBits) {
    constexpr int64_t kFirst = 5003, kSecond = 9001;
    for (const SgdRule& rule : all_rules()) {
        const SgdProblem<TypeParam> flat({kFirst + kSecond}, 0, rule);
        SgdProblem<TypeParam> list({kFirst + kSecond}, 0, rule);
        const SgdSegment all = list.segments[0];
        SgdSegment rest = all;
        rest.param = list.params[0]->data() + kFirst;
        rest.grad = list.grads[0]->data() + kFirst;
        rest.momentum = all.momentum ? list.momenta[0]->data() + kFirst : nullptr;
        rest.numel = kSecond;
        list.segments = {all, rest};
        list.segments[0].numel = kFirst;
        list.num_blocks = number_blocks(list.segments);
        cpu::sgd_step_(flat.args(), 0, flat.num_blocks);
        cpu::sgd_step_(list.args(), 0, list.num_blocks);
        ASSERT_TRUE(list.same_bits(flat));
    }
}

}  // namespace
}  // namespace ddpcore::test
