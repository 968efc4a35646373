// Averages and norms against sums in double, wherever they are formed: mix() leaves the new weights in the problem,
// which is as it was made until then, and returns the squared distances.
#pragma once

#include "problems.h"

namespace ddpcore::test {

template <typename T, typename Mix>
void expect_exact(MixProblem<T>& after, Mix&& mix) {
    const MixArgs args = after.args();
    const int64_t numel = args.numel, num_peers = args.num_peers;
    const MixProblem<T> before(numel, num_peers, 0);
    const std::vector<double> sums = mix();
    std::vector<double> distances(static_cast<size_t>(num_peers));
    for (int64_t i = 0; i < numel; ++i) {
        double exact = static_cast<double>(args.self_weight) * before.weights[i], magnitude = std::abs(exact);
        for (size_t k = 0; k < distances.size(); ++k) {
            const double peer = (*before.peers[k])[i], term = before.peer_weights[k] * peer;
            exact += term;
            magnitude += std::abs(term);
            distances[k] += (before.weights[i] - peer) * (before.weights[i] - peer);
        }
        // One product for the own term, a product and a sum for each peer.
        ASSERT_NEAR(after.weights[i], exact, tolerance<T>(exact, magnitude, static_cast<int>(1 + 2 * num_peers))) << i;
    }
    for (size_t k = 0; k < distances.size(); ++k) {
        ASSERT_NEAR(sums[k], distances[k], distance_tolerance(distances[k])) << "peer " << k;
        ASSERT_TRUE(after.peers[k]->same_bits(*before.peers[k]));
    }
    ASSERT_TRUE(after.weights.guards_untouched());
}

template <typename T, typename Mix>
void expect_exact(StackedProblem<T>& after, Mix&& mix) {
    const int64_t num_learners = after.num_learners, numel = after.numel;
    StackedProblem<T> before(num_learners, numel, 0, static_cast<int64_t>(after.others.size()));
    before.matrix = after.matrix;
    const std::vector<double> sums = mix();
    std::vector<double> distances(static_cast<size_t>(num_learners)), slack(distances);
    for (int64_t i = 0; i < numel; ++i) {
        double mean = 0.0;
        for (int64_t j = 0; j < num_learners; ++j) mean += before.value(j, i) / static_cast<double>(num_learners);
        for (int64_t j = 0; j < num_learners; ++j) {
            double exact = 0.0, magnitude = 0.0;
            for (int64_t k = 0; k < before.num_rows; ++k) {
                exact += before.entry(j, k) * before.value(k, i);
                magnitude += std::abs(before.entry(j, k) * before.value(k, i));
            }
            ASSERT_NEAR(after.value(j, i), exact, tolerance<T>(exact, magnitude, static_cast<int>(2 * before.num_rows)))
                << "learner " << j << " element " << i;
            const double difference = std::abs(before.value(j, i) - mean);
            // Values are at most 2 and so is the mean: L sums, the share's rounding, its product and the difference.
            const double error = static_cast<double>(num_learners + 3) * half_ulp<float>(2.0);
            distances[static_cast<size_t>(j)] += difference * difference;
            slack[static_cast<size_t>(j)] += (2.0 * difference + error) * error;
        }
    }
    for (size_t j = 0; j < sums.size(); ++j) {
        ASSERT_NEAR(sums[j], distances[j], distance_tolerance(distances[j]) + slack[j]) << "learner " << j;
    }
    for (size_t k = 0; k < after.others.size(); ++k) ASSERT_TRUE(after.others[k]->same_bits(*before.others[k]));
    ASSERT_TRUE(after.weights.guards_untouched());
}

// A sum of squares that adds `numel` of them in whatever order. The square of an fp32 value is exact in double; each
// addition errs by at most 2^-53 of the sum so far.
inline void expect_exact_sum(double sum, long double exact, int64_t numel) {
    const double reference = static_cast<double>(exact);
    ASSERT_NEAR(sum, reference, reference * 0x1p-53 * static_cast<double>(numel + 1));
}

template <typename T>
std::vector<long double> exact_squares(const NormProblem<T>& problem) {
    std::vector<long double> squares;
    for (const auto& tensor : problem.data) {
        long double sum = 0.0L;
        for (int64_t i = 0; i < tensor->numel(); ++i) {
            sum += static_cast<long double>((*tensor)[i]) * static_cast<long double>((*tensor)[i]);
        }
        squares.push_back(sum);
    }
    return squares;
}

template <typename T>
void expect_exact(const NormProblem<T>& problem, const std::vector<double>& sums) {
    const std::vector<long double> exact = exact_squares(problem);
    ASSERT_EQ(sums.size(), exact.size());
    for (size_t s = 0; s < sums.size(); ++s) {
        ASSERT_NO_FATAL_FAILURE(expect_exact_sum(sums[s], exact[s], problem.data[s]->numel())) << "segment " << s;
    }
}

// Products of fp32 differences are exact in double; each addition errs by at most 2^-53 of the magnitudes so far.
// `loss`: what may be lost besides, as a share of the magnitudes.
template <typename T>
void expect_exact(const GramProblem<T>& problem, const std::vector<double>& sums, double loss = 0.0) {
    const int64_t n = problem.num_rows();
    ASSERT_EQ(sums.size(), problem.segments.size() * static_cast<size_t>(n * n));
    for (size_t s = 0; s < problem.segments.size(); ++s) {
        const GramSegment& segment = problem.segments[s];
        for (int64_t i = 0; i < n; ++i) {
            for (int64_t j = 0; j < n; ++j) {
                long double exact = 0.0L, magnitude = 0.0L;
                for (int64_t c = segment.first; c < segment.first + segment.numel; ++c) {
                    const long double product = static_cast<long double>(problem.value(i, c)) * problem.value(j, c);
                    exact += product;
                    magnitude += std::abs(product);
                }
                const double sum = sums[s * static_cast<size_t>(n * n) + static_cast<size_t>(i * n + j)];
                const double error = 0x1p-53 * static_cast<double>(segment.numel + 1) + loss;
                ASSERT_NEAR(sum, static_cast<double>(exact), static_cast<double>(magnitude) * error)
                    << "segment " << s << " rows " << i << ", " << j;
            }
        }
    }
}

}  // namespace ddpcore::test
