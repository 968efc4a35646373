// One step of an optimizer against its equations, element by element, wherever the step is taken: step() leaves in the
// problem what the kernels have made of it.
#pragma once

#include "oracle.h"

namespace ddpcore::test {

// One step from what is stored, against the equations: errors of earlier steps are part of what is stored, so that the
// bounds are those of one step, and 20 steps are right because each one is.
template <typename Kind, typename Step>
void expect_exact(SgdProblem<Kind>& problem, bool first_step, Step&& step) {
    const Real factor = gradient_factor(problem.scaling);
    std::vector<std::vector<SgdElement>> exact(problem.sizes.size());
    for (size_t s = 0; s < exact.size(); ++s) {
        const GroupSetting& group = problem.settings[problem.group_of[s]];
        for (int64_t i = 0; i < problem.sizes[s]; ++i) {
            const SgdElement from{{problem.weight(s, i)}, {problem.momenta.at(s, i)}};
            exact[s].push_back(exact_sgd(from, factor * Real{problem.grads.at(s, i)}, group, problem.rule, first_step));
        }
    }
    const auto grads = problem.grads.copy();
    const auto momenta = problem.momenta.copy();
    step();
    for (size_t s = 0; s < exact.size(); ++s) {
        for (int64_t i = 0; i < problem.sizes[s]; ++i) {
            const SgdElement& element = exact[s][static_cast<size_t>(i)];
            ASSERT_NO_FATAL_FAILURE(problem.expect_weight(s, i, element.weight));
            if (problem.rule.momentum != 0.0f &&
                !agrees<typename Kind::Momentum>(problem.momenta.at(s, i), element.momentum)) {
                FAIL() << "momentum " << i << " of segment " << s << " is " << problem.momenta.at(s, i) << ", not "
                       << element.momentum.value << " +- " << element.momentum.error;
            }
        }
    }
    ASSERT_TRUE(problem.guards_untouched());
    ASSERT_TRUE(problem.grads.same_bits(grads));
    ASSERT_TRUE(problem.rule.momentum != 0.0f || problem.momenta.same_bits(momenta));
}

// One step from what is stored, against the equations; as for SGD.
template <typename Kind, typename Step>
void expect_exact(LarsProblem<Kind>& problem, bool first_step, Step&& step) {
    const Real factor = gradient_factor(problem.scaling);
    std::vector<ExactTrust> trust;
    std::vector<std::vector<SgdElement>> exact(problem.sizes.size());
    for (size_t s = 0; s < exact.size(); ++s) {
        const GroupSetting& group = problem.settings[problem.group_of[s]];
        trust.push_back(exact_lars_trust(problem, s));
        for (int64_t i = 0; i < problem.sizes[s]; ++i) {
            const SgdElement from{{problem.weight(s, i)}, {problem.momenta.at(s, i)}};
            exact[s].push_back(exact_lars(
                from, factor * Real{problem.grads.at(s, i)}, group, problem.rule, first_step, problem.lars.variant,
                trust[s].ratio));
        }
    }
    const auto grads = problem.grads.copy();
    const auto momenta = problem.momenta.copy();
    step();
    for (size_t s = 0; s < exact.size(); ++s) {
        ASSERT_NO_FATAL_FAILURE(expect_trust(problem.trust[s], trust[s], s));
        for (int64_t i = 0; i < problem.sizes[s]; ++i) {
            const SgdElement& element = exact[s][static_cast<size_t>(i)];
            ASSERT_NO_FATAL_FAILURE(problem.expect_weight(s, i, element.weight));
            const float momentum = problem.momenta.at(s, i);
            if (problem.rule.momentum != 0.0f && !agrees<typename Kind::Momentum>(momentum, element.momentum)) {
                FAIL() << "momentum " << i << " of segment " << s << " is " << momentum << ", not "
                       << element.momentum.value << " +- " << element.momentum.error;
            }
        }
    }
    ASSERT_TRUE(problem.guards_untouched());
    ASSERT_TRUE(problem.grads.same_bits(grads));
    ASSERT_TRUE(problem.rule.momentum != 0.0f || problem.momenta.same_bits(momenta));
}

template <typename Kind>
std::vector<std::vector<AdamElement>> exact_updates(const AdamProblem<Kind>& problem, const std::vector<int>& steps) {
    const Real factor = gradient_factor(problem.scaling);
    std::vector<std::vector<AdamElement>> exact(problem.sizes.size());
    for (size_t s = 0; s < exact.size(); ++s) {
        const size_t g = problem.group_of[s];
        for (int64_t i = 0; i < problem.sizes[s]; ++i) {
            const AdamElement from{
                {problem.weight(s, i)}, {problem.exp_avgs.at(s, i)}, {problem.exp_avg_sqs.at(s, i)}, {}};
            exact[s].push_back(exact_adam_update(
                from, factor * Real{problem.grads.at(s, i)}, problem.settings[g], problem.rule, steps[g]));
        }
    }
    return exact;
}

// Moments and weights of segment s. `ratio` is LAMB's.
template <typename Kind>
void expect_exact_segment(
    const AdamProblem<Kind>& problem, size_t s, const std::vector<AdamElement>& exact, const Real& ratio) {
    const GroupSetting& group = problem.settings[problem.group_of[s]];
    for (int64_t i = 0; i < problem.sizes[s]; ++i) {
        const AdamElement& element = exact[static_cast<size_t>(i)];
        if (!agrees<float>(problem.exp_avgs.at(s, i), element.exp_avg) ||
            !agrees<float>(problem.exp_avg_sqs.at(s, i), element.exp_avg_sq)) {
            FAIL() << "moments " << i << " of segment " << s << " are " << problem.exp_avgs.at(s, i) << " and "
                   << problem.exp_avg_sqs.at(s, i) << ", not " << element.exp_avg.value << " and "
                   << element.exp_avg_sq.value;
        }
        ASSERT_NO_FATAL_FAILURE(problem.expect_weight(s, i, exact_adam_weight(element, group, problem.rule, ratio)));
    }
}

// One step from what is stored, against the equations; as for SGD. `steps` of each group, this one included.
template <typename Kind, typename Step>
void expect_exact(AdamProblem<Kind>& problem, const std::vector<int>& steps, Step&& step) {
    const auto exact = exact_updates(problem, steps);
    const auto grads = problem.grads.copy();
    step();
    for (size_t s = 0; s < exact.size(); ++s) {
        ASSERT_NO_FATAL_FAILURE(expect_exact_segment(problem, s, exact[s], Real{1.0}));
    }
    ASSERT_TRUE(problem.guards_untouched());
    ASSERT_TRUE(problem.grads.same_bits(grads));
}

template <typename Kind, typename Step>
void expect_exact(LambProblem<Kind>& problem, const std::vector<int>& steps, Step&& step) {
    const auto exact = exact_updates(problem, steps);
    const auto grads = problem.grads.copy();
    step();
    for (size_t s = 0; s < exact.size(); ++s) {
        const GroupSetting& group = problem.settings[problem.group_of[s]];
        const ExactTrust trust = exact_lamb_trust(exact[s], group, problem.lamb);
        ASSERT_NO_FATAL_FAILURE(expect_trust(problem.trust[s], trust, s));
        ASSERT_NO_FATAL_FAILURE(expect_exact_segment(problem, s, exact[s], trust.ratio));
    }
    ASSERT_TRUE(problem.guards_untouched());
    ASSERT_TRUE(problem.grads.same_bits(grads));
}

// ---- on the CPU ----

template <typename Kind>
void expect_exact_step(SgdProblem<Kind>& problem, bool first_step, uint32_t seed = 0) {
    expect_exact(problem, first_step, [&] { take_step(problem, seed); });
}

template <typename Kind>
void expect_exact_step(LarsProblem<Kind>& problem, bool first_step, uint32_t seed = 0) {
    expect_exact(problem, first_step, [&] { take_step(problem, seed); });
}

template <typename Kind>
void expect_exact_step(AdamProblem<Kind>& problem, const std::vector<int>& steps, uint32_t seed = 0) {
    expect_exact(problem, steps, [&] { take_step(problem, seed); });
}

template <typename Kind>
void expect_exact_step(LambProblem<Kind>& problem, const std::vector<int>& steps, uint32_t seed = 0) {
    expect_exact(problem, steps, [&] { take_step(problem, seed); });
}

}  // namespace ddpcore::test
