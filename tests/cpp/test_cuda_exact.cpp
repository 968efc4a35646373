// The CUDA kernels against their equations in real numbers, with no CPU kernel in between. Skipped, with the reason,
// where there is no CUDA device.
#include <numeric>

#include "device_problems.h"
#include "device_steps.h"
#include "exact_averages.h"
#include "exact_steps.h"

namespace ddpcore::test {
namespace {

// ---- optimizers ----

// Steps of one problem on the device. After each, the problem holds what the device does.
template <typename Problem>
class DeviceRun {
  public:
    explicit DeviceRun(Problem& problem, int64_t offset = 0) : problem_(problem), device_(on_device(problem, offset)) {}

    // One step, held against the equations; `before` tells how many there were, as expect_exact takes it.
    template <typename Before>
    void expect_exact_step(const Before& before) {
        device_.upload_inputs(problem_);
        ASSERT_NO_FATAL_FAILURE(expect_exact(problem_, before, [&] {
            ASSERT_CUDA(enqueue_step(device_, problem_));
            device_.download(problem_);
        }));
        for (const uint64_t ticket : device_.tickets.download()) ASSERT_EQ(ticket, 0u);
    }

  private:
    Problem& problem_;
    decltype(on_device(std::declval<const Problem&>(), int64_t{})) device_;
};

template <typename Kind>
class CudaExactSteps : public CudaOptimizers<Kind> {};
TYPED_TEST_SUITE(CudaExactSteps, Kinds);

// The first step, which starts the momentum, and one after it.
template <typename Problem>
void expect_exact_sgd_steps(Problem& problem, int64_t offset, int num_steps = 2) {
    DeviceRun run(problem, offset);
    for (int step = 0; step < num_steps; ++step) {
        if (step > 1) problem.grads.randomize(static_cast<uint32_t>(step), step % 2 == 0 ? 2.0f : 0.125f);
        ASSERT_NO_FATAL_FAILURE(run.expect_exact_step(step == 0)) << "step " << step;
    }
    ASSERT_EQ(problem.steps[0], static_cast<float>(num_steps));
}

template <typename Problem>
void expect_exact_adam_steps(Problem& problem, int64_t offset, int num_steps = 2) {
    DeviceRun run(problem, offset);
    for (int step = 1; step <= num_steps; ++step) {
        if (step > 2) problem.grads.randomize(static_cast<uint32_t>(step));
        ASSERT_NO_FATAL_FAILURE(run.expect_exact_step(std::vector<int>{step})) << "step " << step;
    }
    ASSERT_EQ(problem.steps[0], static_cast<float>(num_steps));
}

TYPED_TEST(CudaExactSteps, SgdOfEverySettingSizeAndAlignment) {
    const std::vector<SgdSetting> settings = all_settings();
    for (size_t turn = 0; turn < settings.size(); turn += kSettingStep) {
        const SgdSetting& setting = settings[turn];
        SCOPED_TRACE(setting.name());
        SgdProblem<TypeParam> problem(
            {{.sizes = kDeviceSizes, .weight_decay = setting.weight_decay}}, setting.rule,
            {.maximize = setting.maximize});
        ASSERT_NO_FATAL_FAILURE(expect_exact_sgd_steps(problem, kOffsets[turn % kOffsets.size()]));
    }
}

TYPED_TEST(CudaExactSteps, LarsOfEveryVariantSettingSizeAndAlignment) {
    const std::vector<SgdSetting> settings = all_settings();
    for (size_t turn = 0; turn < 3 * settings.size(); turn += kSettingStep) {
        const SgdSetting& setting = settings[turn / 3];
        SCOPED_TRACE(::testing::Message() << "variant " << turn % 3 << " " << setting.name());
        LarsProblem<TypeParam> problem(
            {{.sizes = kDeviceSizes, .weight_decay = setting.weight_decay}}, setting.rule,
            {kVariants[turn % 3], 0.02f, 1e-8f}, {.maximize = setting.maximize});
        ASSERT_NO_FATAL_FAILURE(expect_exact_sgd_steps(problem, kOffsets[turn / 2 % kOffsets.size()]));
    }
}

TYPED_TEST(CudaExactSteps, AdamwOfEverySettingSizeAndAlignment) {
    size_t turn = 0;
    for (const AdamSetting& setting : all_adam_settings()) {
        for (const bool maximize : {false, true}) {
            AdamProblem<TypeParam> problem(
                {{.sizes = kDeviceSizes, .weight_decay = setting.weight_decay}}, setting.rule, {.maximize = maximize});
            ASSERT_NO_FATAL_FAILURE(expect_exact_adam_steps(problem, kOffsets[turn++ % kOffsets.size()]));
        }
    }
}

TYPED_TEST(CudaExactSteps, LambOfEverySettingSizeAndAlignment) {
    const std::vector<LambSetting> settings = all_lamb_settings();
    for (size_t turn = 0; turn < settings.size(); ++turn) {
        const LambSetting& setting = settings[turn];
        SCOPED_TRACE(name_of(setting));
        LambProblem<TypeParam> problem(
            {{.sizes = kDeviceSizes, .weight_decay = setting.weight_decay, .adapt = setting.adapt}}, setting.rule);
        ASSERT_NO_FATAL_FAILURE(expect_exact_adam_steps(problem, kOffsets[turn % kOffsets.size()]));
    }
}

// Small tensors, under each scaling another part of the settings.
TYPED_TEST(CudaExactSteps, TwentyStepsUnderEveryScaling) {
    const std::vector<int64_t> sizes = {65, 17};
    const std::vector<SgdSetting> settings = all_settings();
    const std::vector<LambSetting> lamb_settings = all_lamb_settings();
    size_t turn = 0;
    for (ScalingSetting scaling : all_scalings()) {
        for (int repeat = 0; repeat < 4; ++repeat, ++turn) {
            const SgdSetting& setting = settings[turn * 7 % settings.size()];
            const LambSetting& lamb_setting = lamb_settings[turn % lamb_settings.size()];
            SCOPED_TRACE(
                ::testing::Message() << "turn " << turn << ": " << setting.name() << ", " << name_of(lamb_setting));
            scaling.maximize = setting.maximize;
            const std::vector<GroupSetting> groups = {{.sizes = sizes, .weight_decay = setting.weight_decay}};
            SgdProblem<TypeParam> sgd(groups, setting.rule, scaling);
            ASSERT_NO_FATAL_FAILURE(expect_exact_sgd_steps(sgd, 0, 20)) << "SGD";
            LarsProblem<TypeParam> lars(groups, setting.rule, {kVariants[turn % 3], 0.5f, 0.25f}, scaling);
            ASSERT_NO_FATAL_FAILURE(expect_exact_sgd_steps(lars, 0, 20)) << "LARS";
            AdamProblem<TypeParam> adamw(groups, rule_of(kDecays[1 + turn % 2], true), scaling);
            ASSERT_NO_FATAL_FAILURE(expect_exact_adam_steps(adamw, 0, 20)) << "AdamW";
            LambProblem<TypeParam> lamb(
                {{.sizes = sizes, .weight_decay = lamb_setting.weight_decay, .adapt = lamb_setting.adapt}},
                lamb_setting.rule, scaling);
            ASSERT_NO_FATAL_FAILURE(expect_exact_adam_steps(lamb, 0, 20)) << "LAMB";
        }
    }
}

// Zero weights, zero gradients, both, and neither: the ratio is 1 where a norm is zero, and decay goes on.
template <typename Problem>
void make_zeros(Problem& problem) {
    for (const size_t s : {size_t{0}, size_t{2}}) {
        problem.params.fill(s, 0.0f);
        if (problem.masters.size() > 0) problem.masters.fill(s, 0.0f);
    }
    for (const size_t s : {size_t{1}, size_t{2}}) problem.grads.fill(s, 0.0f);
}

TYPED_TEST(CudaExactSteps, ZeroWeightsAndZeroGradients) {
    for (const float decay : {0.0f, 0.25f}) {
        for (size_t turn = 0; turn < 6; ++turn) {
            SCOPED_TRACE(::testing::Message() << "decay " << decay << " turn " << turn);
            const std::vector<GroupSetting> groups = {{.sizes = {4100, 4100, 4100, 4100}, .weight_decay = decay}};
            LarsProblem<TypeParam> lars(groups, {0.9f, 1.0f, false, turn % 2 != 0}, {kVariants[turn % 3], 0.02f, 0.0f});
            make_zeros(lars);
            ASSERT_NO_FATAL_FAILURE(expect_exact_sgd_steps(lars, 0));
            LambRule rule = rule_of(kDecays[turn % 3], turn % 2 != 0);
            rule.min_ratio = 2.0f, rule.max_ratio = 4.0f, rule.min_weight_norm = 3.0f;
            LambProblem<TypeParam> lamb(groups, rule);
            make_zeros(lamb);
            ASSERT_NO_FATAL_FAILURE(DeviceRun(lamb).expect_exact_step(std::vector<int>{1}));
            ASSERT_EQ(lamb.trust[0].ratio, 1.0);
            ASSERT_EQ(lamb.trust[2].ratio, 1.0);
            ASSERT_NE(lamb.trust[3].ratio, 1.0);
        }
    }
}

// A tensor of so many blocks that the threads that add its partial sums take several of them, in two turns of four. No
// two neighbours have equal sums, so that none can stand for another.
using CudaExactFloats = CudaOptimizers<Kind<float, false>>;
TEST_F(CudaExactFloats, TrustOfATensorOfManyBlocks) {
    LarsProblem<Kind<float, false>> problem(
        {{.sizes = {7, 1100 * kBlock + 3, 5000}}}, {0.0f, 1.0f, false, false}, {kVariants[1], 0.02f, 0.0f});
    for (int64_t i = 0; i < problem.sizes[1]; ++i) {
        problem.grads.data(1)[i] *= static_cast<float>(1 + i / kBlock % 89);
    }
    const ExactTrust exact[] = {
        exact_lars_trust(problem, 0), exact_lars_trust(problem, 1), exact_lars_trust(problem, 2)};
    const auto device = on_device(problem, 0);
    ASSERT_CUDA(enqueue_step(device, problem));
    const std::vector<Trust> trust = device.trust.download();
    for (size_t s = 0; s < trust.size(); ++s) ASSERT_NO_FATAL_FAILURE(expect_trust(trust[s], exact[s], s));
}

// ---- averages ----

template <typename T>
class CudaExactAverages : public CudaTest<T> {};
TYPED_TEST_SUITE(CudaExactAverages, Storages);

TYPED_TEST(CudaExactAverages, MixOfEverySizeAlignmentAndNumberOfPeers) {
    for (const int64_t numel : kDeviceSizes) {
        for (const int64_t num_peers : {0, 1, 2, 8, 9}) {
            const int64_t offset = kOffsets[static_cast<size_t>(numel + num_peers) % kOffsets.size()];
            SCOPED_TRACE(::testing::Message() << "numel " << numel << "+" << offset << " peers " << num_peers);
            MixProblem<TypeParam> problem(numel, num_peers, 0);
            const DeviceMix<TypeParam> device(problem, offset);
            ASSERT_NO_FATAL_FAILURE(expect_exact(problem, [&] {
                EXPECT_CUDA(cuda::mix_(device.args, nullptr));
                std::ranges::copy(device.weights.download(), problem.weights.data());
                return device.sums.download();
            }));
        }
    }
}

TYPED_TEST(CudaExactAverages, StacksOfEverySizeAndNumberOfLearners) {
    for (const int64_t numel : kDeviceSizes) {
        for (const int64_t num_learners : {1, 2, 5, 16}) {
            if (num_learners * numel > kMostStacked) continue;
            SCOPED_TRACE(::testing::Message() << num_learners << " learners, numel " << numel);
            StackedProblem<TypeParam> problem(num_learners, numel, 0);
            problem.randomize_matrix();
            const DeviceStacked<TypeParam> device(problem, numel % 2);
            ASSERT_NO_FATAL_FAILURE(expect_exact(problem, [&] {
                EXPECT_CUDA(cuda::mix_stacked_(device.args, nullptr));
                std::ranges::copy(device.weights.download(), problem.weights.data());
                return device.sums.download();
            }));
        }
    }
}

template <typename T>
void expect_exact_norms(const std::vector<int64_t>& sizes, int64_t offset, float scale = 2.0f) {
    NormProblem<T> problem(sizes, 0, scale);
    DeviceNorms<T> device(problem, offset);
    const DeviceBuffer<double> sums(std::ssize(sizes)), total(1);
    device.args.sums = sums.data();
    ASSERT_CUDA(cuda::segment_norms(device.args, nullptr));
    ASSERT_NO_FATAL_FAILURE(expect_exact(problem, sums.download()));
    device.args.sums = total.data();
    ASSERT_CUDA(cuda::total_norm_(device.args, nullptr));
    long double exact = 0.0L;
    for (const long double square : exact_squares(problem)) exact += square;
    const int64_t numel = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    ASSERT_NO_FATAL_FAILURE(expect_exact_sum(total.download()[0], exact, numel)) << "of all";
}

// Also squares that leave the range of fp32 on either side, where the type has such values.
TYPED_TEST(CudaExactAverages, NormsOfEverySizeAlignmentAndMagnitude) {
    const bool narrow = std::is_same_v<TypeParam, Float16>;
    for (const float scale : {2.0f, narrow ? 60000.0f : 1e30f, narrow ? 1e-7f : 1e-30f}) {
        SCOPED_TRACE(::testing::Message() << "up to " << scale);
        for (const int64_t offset : kOffsets) {
            for (const int64_t numel : kDeviceSizes) {
                ASSERT_NO_FATAL_FAILURE(expect_exact_norms<TypeParam>({numel}, offset, scale)) << "numel " << numel;
            }
            ASSERT_NO_FATAL_FAILURE(expect_exact_norms<TypeParam>(kManySizes, offset, scale));
            ASSERT_NO_FATAL_FAILURE(expect_exact_norms<TypeParam>({}, offset, scale));
        }
    }
    ASSERT_NO_FATAL_FAILURE(expect_exact_norms<TypeParam>(many_tiny_sizes(), 0));
}

// ---- noise_sums ----

template <typename T>
void expect_exact_noise(
    int64_t num_rows, const std::vector<int64_t>& sizes, int64_t offset, bool with_origin, std::vector<double>& sums,
    float third_scale = 2.0f) {
    GramProblem<T> problem(num_rows, sizes, 0, with_origin, third_scale);
    const DeviceGram<T> device(problem, offset);
    ASSERT_CUDA(cuda::noise_sums(device.args, nullptr));
    sums = device.sums.download();
    ASSERT_NO_FATAL_FAILURE(expect_exact(problem, sums, pair_tolerance()));
}

// Segments that begin at any place: the second one is never aligned.
TYPED_TEST(CudaExactAverages, NoiseOfEverySizeAlignmentAndNumberOfRows) {
    for (const int64_t numel : {0, 1, 4096, 4097, 8193}) {
        for (const int64_t num_rows : {1, 3, 9}) {
            for (const bool with_origin : {false, true}) {
                SCOPED_TRACE(::testing::Message() << "numel " << numel << " rows " << num_rows);
                std::vector<double> aligned, misaligned;
                ASSERT_NO_FATAL_FAILURE(
                    expect_exact_noise<TypeParam>(num_rows, {numel, 0, 4100}, 0, with_origin, aligned));
                ASSERT_NO_FATAL_FAILURE(
                    expect_exact_noise<TypeParam>(num_rows, {numel, 0, 4100}, 3, with_origin, misaligned));
                ASSERT_EQ(aligned, misaligned);
            }
        }
    }
}

// Small and large rows beside others: products that leave the range of fp32 on either side, and those at the limits of
// PairSum.
TYPED_TEST(CudaExactAverages, NoiseOfEveryMagnitude) {
    std::vector<float> scales = {3e38f, 0x1p63f, 0x1p59f, 0x1p-47f, 0x1p-58f, 1e-38f};
    if (std::is_same_v<TypeParam, Float16>) scales = {60000.0f, 1e-7f};
    std::vector<double> sums;
    for (const float scale : scales) {
        for (const bool with_origin : {false, true}) {
            SCOPED_TRACE(::testing::Message() << "up to " << scale);
            ASSERT_NO_FATAL_FAILURE(expect_exact_noise<TypeParam>(7, {4097}, 0, with_origin, sums, scale));
        }
    }
}

// The squares of row 3 depend on no other row, also where row 2 of the same tile has values of another magnitude.
TYPED_TEST(CudaExactAverages, NoiseOfARowHasTheBitsThatItHasAlone) {
    for (const float scale : {2.0f, std::is_same_v<TypeParam, Float16> ? 1e-7f : 1e-38f}) {
        GramProblem<TypeParam> problem(4, {4097}, 0, false, scale);
        const DeviceGram<TypeParam> device(problem, 0);
        ASSERT_CUDA(cuda::noise_sums(device.args, nullptr));
        const double among_others = device.sums.download()[15];
        GramArgs alone = device.args;
        alone.rows += 3;
        alone.num_rows = 1;
        ASSERT_CUDA(cuda::noise_sums(alone, nullptr));
        ASSERT_EQ(device.sums.download()[0], among_others) << "row 2 up to " << scale;
    }
}

TYPED_TEST(CudaExactAverages, NoiseOfInfinityAndNan) {
    GramProblem<TypeParam> problem(3, {4100}, 0);
    problem.rows[0]->set(17, -INFINITY);
    problem.rows[1]->set(1000, NAN);
    const DeviceGram<TypeParam> device(problem, 0);
    ASSERT_CUDA(cuda::noise_sums(device.args, nullptr));
    const std::vector<double> sums = device.sums.download();
    ASSERT_EQ(sums[0], INFINITY);
    ASSERT_TRUE(std::isinf(sums[2]));  // with a finite row
    for (const size_t entry : {1, 3, 4, 5, 7}) ASSERT_TRUE(std::isnan(sums[entry])) << entry;
    ASSERT_TRUE(std::isfinite(sums[8]));
}

TYPED_TEST(CudaExactAverages, NoiseOfManySegments) {
    std::vector<double> sums;
    ASSERT_NO_FATAL_FAILURE(expect_exact_noise<TypeParam>(2, many_tiny_sizes(), 0, false, sums));
    ASSERT_NO_FATAL_FAILURE(expect_exact_noise<TypeParam>(9, kManySizes, 0, true, sums));
    ASSERT_NO_FATAL_FAILURE(expect_exact_noise<TypeParam>(33, {5, 70}, 0, true, sums));  // rows of the large table
    ASSERT_NO_FATAL_FAILURE(expect_exact_noise<TypeParam>(2, {}, 0, false, sums));
    GramArgs args{};
    args.num_rows = cuda::kMaxRows + 1;
    ASSERT_EQ(cuda::noise_sums(args, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace ddpcore::test
