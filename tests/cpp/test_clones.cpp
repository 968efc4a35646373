// The kernels compiled for one instruction set each must leave the same bits as the library's, for which the
// loader has picked one. CMakeLists.txt compiles them in namespaces of their own.
#include "settings.h"

#define DDPCORE_DECLARE_KERNELS(name)                      \
    namespace ddpcore::name {                              \
    void sgd_step_(const SgdArgs&, int64_t, int64_t);      \
    void adamw_step_(const AdamArgs&, int64_t, int64_t);   \
    void lars_norms(const LarsArgs&, int64_t, int64_t);    \
    void lars_step_(const LarsArgs&, int64_t, int64_t);    \
    void lamb_moments_(const LambArgs&, int64_t, int64_t); \
    void lamb_step_(const LambArgs&, int64_t, int64_t);    \
    void mix_(const MixArgs&, int64_t, int64_t);           \
    void mix_elements(const MixArgs&, int64_t, int64_t);   \
    }
DDPCORE_DECLARE_KERNELS(x86_64)
DDPCORE_DECLARE_KERNELS(x86_64_v3)
DDPCORE_DECLARE_KERNELS(x86_64_v4)

namespace ddpcore::test {
namespace {

struct Clone {
    const char* name;
    bool runs_here;
    void (*sgd_step)(const SgdArgs&, int64_t, int64_t);
    void (*adamw_step)(const AdamArgs&, int64_t, int64_t);
    void (*lars_norms)(const LarsArgs&, int64_t, int64_t);
    void (*lars_step)(const LarsArgs&, int64_t, int64_t);
    void (*lamb_moments)(const LambArgs&, int64_t, int64_t);
    void (*lamb_step)(const LambArgs&, int64_t, int64_t);
    void (*mix)(const MixArgs&, int64_t, int64_t);
    void (*mix_elements)(const MixArgs&, int64_t, int64_t);
};

#define DDPCORE_CLONE(name, runs_here)                                                                               \
    Clone {                                                                                                          \
        #name, static_cast<bool>(runs_here), name::sgd_step_, name::adamw_step_, name::lars_norms, name::lars_step_, \
            name::lamb_moments_, name::lamb_step_, name::mix_, name::mix_elements                                    \
    }

std::vector<Clone> clones() {
    return {
        DDPCORE_CLONE(x86_64, true), DDPCORE_CLONE(x86_64_v3, __builtin_cpu_supports("avx2")),
        DDPCORE_CLONE(x86_64_v4, __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))};
}

template <typename Kind>
class CloneTest : public ::testing::Test {};
TYPED_TEST_SUITE(CloneTest, AllKinds);

TYPED_TEST(CloneTest, EveryInstructionSetHasTheSameBits) {
    for (const Clone& clone : clones()) {
        if (!clone.runs_here) continue;
        SCOPED_TRACE(clone.name);
        size_t turn = 0;
        for (const SgdSetting& setting : all_settings()) {
            const std::vector<GroupSetting> groups = {{.sizes = kManySizes, .weight_decay = setting.weight_decay}};
            SgdProblem<TypeParam> sgd(groups, setting.rule), own_sgd(groups, setting.rule);
            take_step(sgd);
            clone.sgd_step(own_sgd.args(), 0, own_sgd.num_blocks);
            own_sgd.count_step();
            ASSERT_TRUE(own_sgd.same_bits(sgd));

            const LarsRule rule{static_cast<LarsVariant>(turn % 3), 0.02f, 1e-8f};
            LarsProblem<TypeParam> lars(groups, setting.rule, rule), own_lars(groups, setting.rule, rule);
            take_step(lars);
            clone.lars_norms(own_lars.args(), 0, own_lars.num_blocks);
            cpu::lars_trust(own_lars.args(), 0, std::ssize(own_lars.segments));
            clone.lars_step(own_lars.args(), 0, own_lars.num_blocks);
            own_lars.count_step();
            ASSERT_TRUE(own_lars.same_bits(lars));

            const auto decay = static_cast<AdamDecay>(turn++ % 3);
            AdamProblem<TypeParam> adamw(groups, rule_of(decay, true)), own_adamw(groups, rule_of(decay, true));
            take_step(adamw);
            clone.adamw_step(own_adamw.args(), 0, own_adamw.num_blocks);
            own_adamw.count_step();
            ASSERT_TRUE(own_adamw.same_bits(adamw));

            const LambRule lamb_rule{0.9, 0.999, 1e-6f, true, decay, 0.0f, INFINITY, 0.0f, INFINITY};
            LambProblem<TypeParam> lamb(groups, lamb_rule), own_lamb(groups, lamb_rule);
            take_step(lamb);
            clone.lamb_moments(own_lamb.args(), 0, own_lamb.num_blocks);
            cpu::lamb_trust(own_lamb.args(), 0, std::ssize(own_lamb.segments));
            clone.lamb_step(own_lamb.args(), 0, own_lamb.num_blocks);
            own_lamb.count_step();
            ASSERT_TRUE(own_lamb.same_bits(lamb));
        }
    }
}

template <typename T>
class MixCloneTest : public ::testing::Test {};
TYPED_TEST_SUITE(MixCloneTest, Storages);

TYPED_TEST(MixCloneTest, EveryInstructionSetHasTheSameBitsAndNoise) {
    for (const Clone& clone : clones()) {
        if (!clone.runs_here) continue;
        for (const int64_t num_peers : {0, 1, 3}) {
            for (const Noise& noise : {Noise{}, some_noise(0), some_noise(3)}) {
                SCOPED_TRACE(::testing::Message() << clone.name << " peers " << num_peers << " std " << noise.std);
                MixProblem<TypeParam> mix(100003, num_peers, 0), own_mix(100003, num_peers, 0);
                mix.noise = own_mix.noise = noise;
                cpu::mix_(mix.args(), 0, mix.num_blocks());
                clone.mix(own_mix.args(), 0, own_mix.num_blocks());
                ASSERT_TRUE(own_mix.weights.same_bits(mix.weights));
                ASSERT_EQ(own_mix.partials, mix.partials);

                MixProblem<TypeParam> parts(9001, num_peers, 1), own_parts(9001, num_peers, 1);
                parts.noise = own_parts.noise = noise;
                cpu::mix_elements(parts.args(), 3, 9001);
                clone.mix_elements(own_parts.args(), 3, 9001);
                ASSERT_TRUE(own_parts.weights.same_bits(parts.weights));
            }
        }
    }
}

}  // namespace
}  // namespace ddpcore::test
