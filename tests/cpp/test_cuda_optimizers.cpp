// Compares the CUDA kernels of the optimizers with the CPU kernels, step by step. Skipped, with the reason, if there is
// no CUDA device.
//
// Trust ratios come from sums in another order, so they are close but not equal. The CPU kernel therefore does its
// second pass with the device's ratios. Then all elements must have the same bits, in this step and in the next.
#include "device_steps.h"

namespace ddpcore::test {
namespace {

// ---- one step on both sides ----

template <typename Kind>
void launch(const DeviceSgd<Kind>& device, SgdProblem<Kind>& host) {
    ASSERT_CUDA(enqueue_step(device, host));
    take_step(host);
}

// Two sums of squares, each of which errs by 2^-53 for every addition on either side, and a handful of operations.
void expect_near(const std::vector<Trust>& device, const std::vector<Trust>& host, const std::vector<int64_t>& sizes) {
    for (size_t s = 0; s < sizes.size(); ++s) {
        const double relative = static_cast<double>(2 * sizes[s] + 16) * 0x1p-53;
        ASSERT_NEAR(device[s].ratio, host[s].ratio, host[s].ratio * relative) << "segment " << s;
        ASSERT_NEAR(device[s].weight_norm, host[s].weight_norm, host[s].weight_norm * relative) << "segment " << s;
        ASSERT_NEAR(device[s].update_norm, host[s].update_norm, host[s].update_norm * relative) << "segment " << s;
    }
}

template <typename Kind>
void launch(const DeviceSgd<Kind>& device, LarsProblem<Kind>& host) {
    ASSERT_CUDA(enqueue_step(device, host));
    const std::vector<Trust> trust = device.trust.download();
    take_step(host, 0, trust.data());
    if (skips_step(host.grad_scaling())) return;
    ASSERT_NO_FATAL_FAILURE(expect_near(trust, host.trust, host.sizes));
}

template <typename Kind>
void launch(const DeviceAdam<Kind>& device, AdamProblem<Kind>& host) {
    ASSERT_CUDA(enqueue_step(device, host));
    take_step(host);
}

template <typename Kind>
void launch(const DeviceAdam<Kind>& device, LambProblem<Kind>& host) {
    ASSERT_CUDA(enqueue_step(device, host));
    const std::vector<Trust> trust = device.trust.download();
    take_step(host, 0, trust.data());
    if (skips_step(host.grad_scaling())) return;
    ASSERT_NO_FATAL_FAILURE(expect_near(trust, host.trust, host.sizes));
}

// Steps with found_inf as given, and a learning rate in memory that falls in between.
template <typename Problem>
void expect_same_as_cpu(Problem& host, int64_t offset, const std::vector<float>& overflows = {0.0f, 0.0f}) {
    const auto device = on_device(host, offset);
    for (const float found_inf : overflows) {
        if (host.scaling.found_inf) {
            host.scaling.found_inf = found_inf;
            device.found_inf.upload(&found_inf);
        }
        ASSERT_NO_FATAL_FAILURE(launch(device, host));
        ASSERT_NO_FATAL_FAILURE(device.expect_same_bits(host));
        for (float& lr : host.lrs) lr *= 0.5f;
        device.lrs.upload(host.lrs.data());
    }
}

// ---- what all go through ----

TYPED_TEST_SUITE(CudaOptimizers, AllKinds);

TYPED_TEST(CudaOptimizers, EverySettingSizeAndAlignment) {
    for (size_t turn = 0; turn < all_settings().size(); turn += kSettingStep) {
        const int64_t offset = kOffsets[turn % kOffsets.size()];
        const float decay = turn % 5 < 3 ? 0.03f : 0.0f;
        ASSERT_NO_FATAL_FAILURE((for_each_optimizer<TypeParam>(
            {{.sizes = kDeviceSizes, .weight_decay = decay}}, {.maximize = turn % 2 != 0}, turn,
            [&](auto& problem) { expect_same_as_cpu(problem, offset); })));
    }
}

TYPED_TEST(CudaOptimizers, EveryScalingAndSkippedSteps) {
    size_t turn = 0;
    for (ScalingSetting scaling : all_scalings()) {
        scaling.found_inf = 0.0f;
        ASSERT_NO_FATAL_FAILURE(
            (for_each_optimizer<TypeParam>({{.sizes = {4097, 0, 17}}}, scaling, turn += 5, [](auto& problem) {
                expect_same_as_cpu(problem, 0, {1.0f, 0.0f, NAN, 0.0f, 1.0f});
            })));
    }
}

// Groups with ever fewer tensors, so that some of the first begin in one launch and end in another, and the last ones
// are more than one launch takes: empty ones, some that are not adapted, learning rates in memory, and groups that do
// not count.
std::vector<GroupSetting> many_groups() {
    constexpr size_t kNumGroups = 20;
    const std::vector<int64_t> sizes = many_tiny_sizes();
    const size_t num_tensors = sizes.size() / 2;
    const auto begin_of = [&](size_t g) {
        const size_t left = kNumGroups - g;
        return sizes.begin() +
               static_cast<int64_t>(num_tensors - num_tensors * left * left / (kNumGroups * kNumGroups));
    };
    std::vector<GroupSetting> groups(kNumGroups);
    for (size_t g = 0; g < kNumGroups; ++g) {
        const auto share = static_cast<float>(g) / kNumGroups;
        groups[g] = {
            .sizes = {begin_of(g), begin_of(g + 1)},
            .lr = 0.1f + share,
            .weight_decay = g % 4 == 0 ? 0.0f : share / 8,
            .adapt = g % 3 != 0,
            .lr_from_memory = g % 2 != 0,
            .steps = static_cast<float>(g % 5)};
        if (g % 6 == 5) groups[g].steps = std::nullopt;
    }
    groups.insert(groups.begin() + 7, GroupSetting{.sizes = {}});
    groups.push_back({.sizes = {}});
    return groups;
}

TYPED_TEST(CudaOptimizers, ManyTinyTensorsInManyGroups) {
    ASSERT_NO_FATAL_FAILURE((for_each_optimizer<TypeParam>(
        many_groups(), {}, 31, [](auto& problem) { expect_same_as_cpu(problem, 0, std::vector<float>(kMostSteps)); })));
}

// Lists that fill a table of kernel arguments, and lists with one tensor more.
TYPED_TEST(CudaOptimizers, TensorsOfEveryTable) {
    for (const size_t num_tensors : {32u, 33u, 128u, 129u}) {
        SCOPED_TRACE(::testing::Message() << num_tensors << " tensors");
        const std::vector<int64_t> sizes(num_tensors, 5);
        ASSERT_NO_FATAL_FAILURE((for_each_optimizer<TypeParam>(
            {{.sizes = sizes}}, {}, 31, [](auto& problem) { expect_same_as_cpu(problem, 0); })));
    }
}

TYPED_TEST(CudaOptimizers, NoSegmentsAndOnlyEmptyOnes) {
    for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{}, std::vector<int64_t>{0, 0}}) {
        ASSERT_NO_FATAL_FAILURE((for_each_optimizer<TypeParam>(
            {{.sizes = sizes}}, {}, 31, [](auto& problem) { expect_same_as_cpu(problem, 0); })));
    }
}

// The second pass of one batch runs beside the first pass of the next.
TYPED_TEST(CudaOptimizers, MoreThanTheCacheHolds) {
    int l2_bytes = 0;
    ASSERT_CUDA(cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, 0));
    const int64_t large = l2_bytes / 16, small = l2_bytes / 64;
    ASSERT_NO_FATAL_FAILURE((for_each_optimizer<TypeParam>(
        {{.sizes = {small, large + 5, 1, small + 1, small, 0, large, large, 7}}}, {}, 31,
        [](auto& problem) { expect_same_as_cpu(problem, 0, {0.0f, 0.0f, 0.0f}); })));
}

// A weight that moved overrides its master on the device too.
TYPED_TEST(CudaOptimizers, StaleMasters) {
    ASSERT_NO_FATAL_FAILURE((for_each_optimizer<TypeParam>({{.sizes = {5000}}}, {}, 31, [](auto& problem) {
        for (int64_t i = 0; i < 5000; i += 3) problem.params.set(0, i, 4.0f + static_cast<float>(i % 7));
        expect_same_as_cpu(problem, 1);
    })));
}

// Zero weights, zero gradients and both.
TYPED_TEST(CudaOptimizers, ZeroNorms) {
    ASSERT_NO_FATAL_FAILURE((for_each_optimizer<TypeParam>({{.sizes = {5000, 5000, 17}}}, {}, 31, [](auto& problem) {
        for (const size_t s : {size_t{0}, size_t{2}}) {
            problem.params.fill(s, 0.0f);
            if (TypeParam::kMaster) problem.masters.fill(s, 0.0f);
        }
        for (const size_t s : {size_t{1}, size_t{2}}) problem.grads.fill(s, 0.0f);
        expect_same_as_cpu(problem, 0);
    })));
}

// Past the end of a tensor the update is 0 / 0, which is no part of its norm.
TYPED_TEST(CudaOptimizers, LambWithoutEps) {
    LambProblem<TypeParam> host(
        {{.sizes = {4097, 17}, .steps = 0.0f}},
        {0.9, 0.999, 0.0f, true, AdamDecay::kInUpdate, 0.0f, INFINITY, 0.0f, INFINITY}, {});
    ASSERT_NO_FATAL_FAILURE(expect_same_as_cpu(host, 0));
}

// Many threads of one CUDA block still read the scales of a group while the next one's are formed.
TYPED_TEST(CudaOptimizers, GroupsOfWholeBlocks) {
    std::vector<GroupSetting> groups;
    for (int g = 0; g < 12; ++g) groups.push_back({.sizes = {4097}, .lr = 0.1f + static_cast<float>(g)});
    ASSERT_NO_FATAL_FAILURE(
        (for_each_optimizer<TypeParam>(groups, {}, 31, [](auto& problem) { expect_same_as_cpu(problem, 0); })));
}

// A mix in front of the step: aligned and not, in place and elsewhere, with noise; blocks that are whole and others.
TYPED_TEST(CudaOptimizers, MixAndStep) {
    if constexpr (!TypeParam::kMaster && !TypeParam::kRounded) {
        size_t turn = 0;
        for (const int64_t num_peers : {0, 1, 3, 8}) {
            for (const int64_t offset : {0, 1}) {
                for (const bool elsewhere : {false, true}) {
                    SCOPED_TRACE(::testing::Message() << num_peers << " peers at " << offset << " turn " << turn);
                    const Noise noise = turn % 3 == 1 ? some_noise(static_cast<int64_t>(turn)) : Noise{};
                    for_each_optimizer<TypeParam>(
                        {{.sizes = {8192, 0, 16, 4096 * 3 + 5, 7}}, {.sizes = {4096}, .lr = 0.5f}}, {}, turn++,
                        [&](auto& problem) {
                            problem.mix_with(num_peers, noise, elsewhere);
                            expect_same_as_cpu(problem, offset, {0.0f});
                        },
                        {.flat = true});
                }
            }
        }
    }
}

TYPED_TEST(CudaOptimizers, MixWithMastersOrRoundedStatesOrTooManyPeersIsAnError) {
    SgdProblem<TypeParam> host({{.sizes = {17}}}, {0.9f, 1.0f, false, false}, {}, {.flat = true});
    host.mix_with(TypeParam::kMaster || TypeParam::kRounded ? 1 : cuda::kMaxStepPeers + 1);
    ASSERT_EQ(enqueue_step(on_device(host, 0), host), cudaErrorInvalidValue);
}

#ifdef DDPCORE_FEW_ELEMENTS
// The two passes as two launches, which no real device of today needs.
TYPED_TEST(CudaOptimizers, WithoutCooperativeLaunch) {
    cuda_on_cpu::device().cooperative = false;
    for_each_optimizer<TypeParam>(
        {{.sizes = {4097, 0, 17, 40000}}}, {}, 31, [](auto& problem) { expect_same_as_cpu(problem, 0); });
    cuda_on_cpu::device().cooperative = true;
}
#endif

// ---- one pass a call, for shards ----

template <typename Kind>
cudaError_t enqueue_pass(const DeviceSgd<Kind>& device, LarsProblem<Kind>& host, Passes passes, NormPartials* squares) {
    return cuda::lars_step_(
        {device.args(host), host.lars, device.partials.data(), device.trust.data(), passes, squares}, nullptr);
}

template <typename Kind>
cudaError_t enqueue_pass(
    const DeviceAdam<Kind>& device, LambProblem<Kind>& host, Passes passes, NormPartials* squares) {
    LambArgs args = device.args(host);
    args.passes = passes;
    args.squares = squares;
    return cuda::lamb_step_(args, nullptr);
}

template <typename Kind>
Trust expected_trust(const LarsProblem<Kind>& host, size_t s, const NormPartials& squares) {
    return lars_trust(host.lars, host.rule, host.groups[host.group_of[s]], grad_factor(host.grad_scaling()), squares);
}

template <typename Kind>
Trust expected_trust(const LambProblem<Kind>& host, size_t s, const NormPartials& squares) {
    return lamb_trust(host.lamb, host.groups[host.group_of[s]], squares);
}

// The first pass counts no step and writes the squares of this rank. The second one uses those of all ranks.
template <typename Problem>
void expect_passes(Problem& host) {
    const auto device = on_device(host, 1);
    const DeviceBuffer<NormPartials> squares(filled(host.sizes.size(), NormPartials{NAN, NAN}));
    ASSERT_CUDA(enqueue_pass(device, host, Passes::kFirst, squares.data()));
    ASSERT_EQ(device.steps.download(), host.steps);
    const std::vector<NormPartials> local = squares.download();
    std::vector<NormPartials> sums = local;
    for (NormPartials& sum : sums) sum = {4.0 * sum.weight + 1.0, 9.0 * sum.update + 1.0};
    squares.upload(sums.data());
    std::vector<Trust> expected;
    for (size_t s = 0; s < sums.size(); ++s) expected.push_back(expected_trust(host, s, sums[s]));
    ASSERT_CUDA(enqueue_pass(device, host, Passes::kSecond, squares.data()));
    const std::vector<Trust> trust = device.trust.download();
    take_step(host, 0, trust.data());
    ASSERT_NO_FATAL_FAILURE(device.expect_same_bits(host));
    for (size_t s = 0; s < sums.size(); ++s) {
        ASSERT_EQ(trust[s].ratio, expected[s].ratio) << "segment " << s;
        ASSERT_EQ(trust[s].weight_norm, expected[s].weight_norm) << "segment " << s;
        ASSERT_EQ(trust[s].update_norm, expected[s].update_norm) << "segment " << s;
        const double relative = static_cast<double>(2 * host.sizes[s] + 16) * 0x1p-53, norm = host.trust[s].weight_norm;
        ASSERT_NEAR(sqrt(local[s].weight), norm, norm * relative) << "segment " << s;
    }
}

TYPED_TEST(CudaOptimizers, OnePassACall) {
    const std::vector<GroupSetting> groups = {
        {.sizes = {4097, 0, 17}, .weight_decay = 0.03f}, {.sizes = {40000, 5}, .adapt = false}, {.sizes = {8192}}};
    for (size_t turn = 0; turn < 6; ++turn) {
        const std::vector<SgdSetting> settings = all_settings();
        const SgdRule& rule = settings[turn * 5 % settings.size()].rule;
        LarsProblem<TypeParam> lars(groups, rule, {kVariants[turn % 3], 0.02f, 1e-8f}, {.maximize = turn % 2 != 0});
        ASSERT_NO_FATAL_FAILURE(expect_passes(lars)) << "LARS";
        std::vector<GroupSetting> counted = groups;
        for (GroupSetting& group : counted) group.steps = group.steps.value_or(0.0f);
        LambProblem<TypeParam> lamb(
            counted, {{0.9, 0.999, 1e-6f, turn % 2 == 0, kDecays[turn % 3]}, 0.0f, INFINITY, 0.0f, INFINITY}, {});
        ASSERT_NO_FATAL_FAILURE(expect_passes(lamb)) << "LAMB";
    }
}

TYPED_TEST(CudaOptimizers, OnePassACallOfManyTensors) {
    LambProblem<TypeParam> lamb(
        {{.sizes = many_tiny_sizes(), .steps = 2.0f}},
        {{0.9, 0.999, 1e-6f, true, AdamDecay::kInUpdate}, 0.0f, INFINITY, 0.0f, INFINITY}, {});
    ASSERT_NO_FATAL_FAILURE(expect_passes(lamb));
}

// Without a group that counts there is nothing to count with.
TYPED_TEST(CudaOptimizers, SgdWithoutTickets) {
    SgdProblem<TypeParam> host({{.sizes = kManySizes, .steps = std::nullopt}}, {0.9f, 0.7f, false, false});
    const DeviceSgd<TypeParam> device(host, 0);
    SgdArgs args = device.args(host);
    args.tickets = nullptr;
    ASSERT_CUDA(cuda::sgd_step_(args, nullptr));
    take_step(host);
    ASSERT_NO_FATAL_FAILURE(device.expect_same_bits(host));
}

}  // namespace
}  // namespace ddpcore::test
