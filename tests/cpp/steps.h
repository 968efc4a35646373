// The tensors and arguments of optimizer steps, with random contents, and the driver that calls the CPU kernels.
#pragma once

#include <optional>

#include "problems.h"
#include "rounding.h"

namespace ddpcore::test {

// How the params of a step are stored. Beside a master the momentum is fp32, else it is stored like the param. Rounded
// states are bf16.
template <typename Param_, bool kMaster_, bool kRounded_ = false>
struct Kind {
    using Param = Param_;
    using Momentum = std::conditional_t<kRounded_, BFloat16, std::conditional_t<kMaster_, float, Param_>>;
    using Moment = std::conditional_t<kRounded_, BFloat16, float>;
    static constexpr bool kMaster = kMaster_, kRounded = kRounded_;
};
using Kinds = ::testing::Types<
    Kind<float, false>, Kind<BFloat16, false>, Kind<Float16, false>, Kind<BFloat16, true>, Kind<Float16, true>>;
using AllKinds = ::testing::Types<
    Kind<float, false>, Kind<BFloat16, false>, Kind<Float16, false>, Kind<BFloat16, true>, Kind<Float16, true>,
    Kind<float, false, true>, Kind<BFloat16, false, true>, Kind<Float16, false, true>>;
inline constexpr uint64_t kStateSeed = 0x1234567890abcdef;

struct GroupSetting {
    std::vector<int64_t> sizes;
    float lr = 0.135f;
    float weight_decay = 0.03f;
    bool adapt = true;
    bool lr_from_memory = false;
    std::optional<float> steps = 0.0f;  // taken before; absent: the group does not count
};

struct ScalingSetting {
    std::optional<float> grad_scale{}, found_inf{};
    std::optional<double> norm_squared{};
    float max_norm = 0.0f;
    bool maximize = false;
};

// Where tensors stand: each in a buffer of its own, or one after the other in one flat buffer.
struct Placement {
    int64_t offset = 0;
    bool flat = false;
};

template <typename T>
class TensorList {
  public:
    TensorList(const std::vector<int64_t>& sizes, const Placement& placement) : sizes_(sizes) {
        int64_t total = 0;
        for (const int64_t numel : sizes) {
            starts_.push_back(placement.flat ? total : 0);
            total += numel;
            if (!placement.flat) buffers_.push_back(std::make_unique<Buffer<T>>(numel, placement.offset));
        }
        if (placement.flat) buffers_.push_back(std::make_unique<Buffer<T>>(total, placement.offset));
        flat_ = placement.flat;
    }

    size_t size() const { return sizes_.size(); }
    int64_t numel(size_t s) const { return sizes_[s]; }
    T* data(size_t s) const { return buffers_[flat_ ? 0 : s]->data() + starts_[s]; }
    bool flat() const { return flat_; }
    int64_t start(size_t s) const { return starts_[s]; }
    int64_t total() const { return std::accumulate(sizes_.begin(), sizes_.end(), int64_t{0}); }
    float at(size_t s, int64_t i) const { return cpu::load(data(s)[i]); }
    void set(size_t s, int64_t i, float value) { data(s)[i] = cpu::store<T>(value); }

    void randomize(uint32_t seed, float scale = 2.0f) {
        for (size_t s = 0; s < size(); ++s) {
            Buffer<T> values(numel(s));
            values.randomize(seed++, scale);
            std::copy_n(values.data(), numel(s), data(s));
        }
    }
    void fill(size_t s, float value) { std::fill_n(data(s), numel(s), cpu::store<T>(value)); }
    std::vector<std::vector<T>> copy() const {
        std::vector<std::vector<T>> result;
        for (size_t s = 0; s < size(); ++s) result.emplace_back(data(s), data(s) + numel(s));
        return result;
    }

    bool same_bits(size_t s, const TensorList& other) const {
        return numel(s) == other.numel(s) && test::same_bits(data(s), other.data(s), numel(s));
    }
    bool same_bits(const TensorList& other) const {
        bool same = size() == other.size();
        for (size_t s = 0; same && s < size(); ++s) same = same_bits(s, other);
        return same;
    }
    bool same_bits(const std::vector<std::vector<T>>& other) const {
        bool same = size() == other.size();
        for (size_t s = 0; same && s < size(); ++s) same = test::same_bits(data(s), other[s].data(), numel(s));
        return same;
    }
    bool guards_untouched() const {
        return std::all_of(
            buffers_.begin(), buffers_.end(), [](const auto& buffer) { return buffer->guards_untouched(); });
    }

  private:
    std::vector<int64_t> sizes_, starts_;
    std::vector<std::unique_ptr<Buffer<T>>> buffers_;
    bool flat_;
};

inline std::vector<int64_t> all_sizes(const std::vector<GroupSetting>& settings) {
    std::vector<int64_t> sizes;
    for (const GroupSetting& setting : settings) sizes.insert(sizes.end(), setting.sizes.begin(), setting.sizes.end());
    return sizes;
}

// What the steps of all optimizers have in common. Not to be copied: the groups point into it.
template <typename Kind>
struct StepProblem {
    using T = typename Kind::Param;

    StepProblem(const std::vector<GroupSetting>& settings_, const ScalingSetting& scaling_, const Placement& placement)
        : settings(settings_),
          scaling(scaling_),
          sizes(all_sizes(settings_)),
          params(sizes, placement),
          grads(sizes, placement),
          masters(Kind::kMaster ? sizes : std::vector<int64_t>(), placement) {
        params.randomize(1000);
        grads.randomize(2000);
        masters.randomize(1000);  // the params are these, rounded
        for (const GroupSetting& setting : settings) {
            lrs.push_back(setting.lr);
            steps.push_back(setting.steps.value_or(-1.0f));
            group_of.insert(group_of.end(), setting.sizes.size(), lrs.size() - 1);
        }
        for (size_t g = 0; g < settings.size(); ++g) {
            const GroupSetting& setting = settings[g];
            groups.push_back(
                {setting.lr_from_memory ? NAN : setting.lr, setting.weight_decay,
                 setting.lr_from_memory ? &lrs[g] : nullptr, setting.steps ? &steps[g] : nullptr, setting.adapt});
        }
    }
    StepProblem(const StepProblem&) = delete;

    GradScaling grad_scaling() const {
        return {
            scaling.grad_scale ? &*scaling.grad_scale : nullptr, scaling.found_inf ? &*scaling.found_inf : nullptr,
            scaling.norm_squared ? &*scaling.norm_squared : nullptr, scaling.max_norm, scaling.maximize};
    }

    // Indices far apart, beyond 32 bits.
    template <typename Segment>
    void number_states(std::vector<Segment>& segments) const {
        for (size_t s = 0; Kind::kRounded && s < segments.size(); ++s) {
            segments[s].first_index = static_cast<int64_t>(s + 3) << 33;
        }
    }

    template <typename Segment>
    StepArgs<Segment> step_args(const std::vector<Segment>& segments, int64_t num_blocks) const {
        return {
            segments.data(),
            static_cast<int64_t>(segments.size()),
            num_blocks,
            groups.data(),
            static_cast<int64_t>(groups.size()),
            dtype_of<T>(),
            Kind::kMaster,
            grad_scaling(),
            nullptr,
            mix == nullptr ? nullptr : &mix_args,
            Kind::kRounded,
            kStateSeed};
    }

    // From now on a step begins with a mix of the params, which are one row (Placement::flat), with rows of others.
    // `elsewhere`: the weights are read from another row than the params.
    void mix_with(int64_t num_peers, const Noise& noise = {}, bool elsewhere = false) {
        mix = std::make_unique<MixProblem<T>>(params.total(), num_peers, 0);
        mix->noise = noise;
        mix_args = mix->args();
        mix_args.partials = nullptr;
        std::copy_n(params.data(0), params.total(), mix->weights.data());
        if (elsewhere) {
            mix_args.source = mix->weights.data();
            std::fill_n(params.data(0), params.total(), cpu::store<T>(7.0f));
        }
        mix_args.weights = params.data(0);
    }

    // The mix alone, by the kernel that tests compare with the equations. The next step has none.
    void mix_now() {
        std::vector<double> partials(static_cast<size_t>(num_blocks_of(params.total()) * mix_args.num_peers));
        MixArgs args = mix_args;
        args.partials = partials.data();
        cpu::mix_(args, 0, num_blocks_of(args.numel));
        mix.reset();
    }

    // The weight that a step starts from: a master counts as long as it rounds to the param.
    double weight(size_t s, int64_t i) const {
        if constexpr (Kind::kMaster) {
            const T as_param = cpu::store<T>(masters.at(s, i));
            if (same_bits(&as_param, params.data(s) + i, 1)) return masters.at(s, i);
        }
        return params.at(s, i);
    }

    bool weights_same_bits(const StepProblem& other) const {
        return params.same_bits(other.params) && masters.same_bits(other.masters);
    }

    // The weight after a step against the exact one. A param beside a master is the master, rounded.
    void expect_weight(size_t s, int64_t i, const Real& exact) const {
        if constexpr (Kind::kMaster) {
            const T as_param = cpu::store<T>(masters.at(s, i));
            if (!same_bits(&as_param, params.data(s) + i, 1)) {
                FAIL() << "param " << i << " of segment " << s << " is not its master, rounded";
            }
        }
        const float stored = Kind::kMaster ? masters.at(s, i) : params.at(s, i);
        if (!agrees<std::conditional_t<Kind::kMaster, float, T>>(stored, exact)) {
            FAIL() << "weight " << i << " of segment " << s << " is " << stored << ", not " << exact.value << " +- "
                   << exact.error;
        }
    }

    void count_step() {
        for (const StepGroup& group : groups) {
            if (group.step != nullptr) *group.step = next_count(*group.step, Kind::kRounded);
        }
    }

    std::vector<GroupSetting> settings;
    ScalingSetting scaling;
    std::vector<int64_t> sizes;
    TensorList<T> params, grads;
    TensorList<float> masters;
    std::vector<size_t> group_of;  // a segment
    std::unique_ptr<MixProblem<T>> mix;
    MixArgs mix_args{};
    std::vector<float> lrs, steps;
    std::vector<StepGroup> groups;
};

template <typename Kind>
struct SgdProblem : StepProblem<Kind> {
    using Base = StepProblem<Kind>;

    SgdProblem(
        const std::vector<GroupSetting>& settings, const SgdRule& rule_, const ScalingSetting& scaling = {},
        const Placement& placement = {})
        : Base(settings, scaling, placement), rule(rule_), momenta(Base::sizes, placement) {
        momenta.randomize(3000);
        for (size_t s = 0; s < Base::sizes.size(); ++s) {
            segments.push_back(
                {Base::params.data(s), Base::grads.data(s), rule.momentum != 0.0f ? momenta.data(s) : nullptr,
                 Kind::kMaster ? Base::masters.data(s) : nullptr, Base::sizes[s], 0,
                 static_cast<int64_t>(Base::group_of[s])});
        }
        Base::number_states(segments);
        num_blocks = number_blocks(segments);
    }

    SgdArgs args() const {
        SgdArgs result{Base::step_args(segments, num_blocks), rule};
        result.rounded_states = Kind::kRounded && rule.momentum != 0.0f;
        return result;
    }

    bool same_bits(const SgdProblem& other) const {
        return Base::weights_same_bits(other) && momenta.same_bits(other.momenta) && Base::steps == other.steps;
    }
    bool guards_untouched() const {
        return Base::params.guards_untouched() && Base::grads.guards_untouched() && Base::masters.guards_untouched() &&
               momenta.guards_untouched();
    }

    SgdRule rule;
    TensorList<typename Kind::Momentum> momenta;
    std::vector<SgdSegment> segments;
    int64_t num_blocks = 0;
};

template <typename Kind>
struct LarsProblem : SgdProblem<Kind> {
    LarsProblem(
        const std::vector<GroupSetting>& settings, const SgdRule& sgd, const LarsRule& lars_,
        const ScalingSetting& scaling = {}, const Placement& placement = {})
        : SgdProblem<Kind>(settings, sgd, scaling, placement),
          lars(lars_),
          partials(static_cast<size_t>(this->num_blocks), {NAN, NAN}),
          trust(this->segments.size(), {NAN, NAN, NAN}) {}

    LarsArgs args() { return {SgdProblem<Kind>::args(), lars, partials.data(), trust.data()}; }

    LarsRule lars;
    std::vector<NormPartials> partials;
    std::vector<Trust> trust;
};

template <typename Kind>
struct AdamProblem : StepProblem<Kind> {
    using Base = StepProblem<Kind>;

    AdamProblem(
        const std::vector<GroupSetting>& settings, const AdamRule& rule_, const ScalingSetting& scaling = {},
        const Placement& placement = {})
        : Base(settings, scaling, placement),
          rule(rule_),
          exp_avgs(Base::sizes, placement),
          exp_avg_sqs(Base::sizes, placement) {
        for (size_t s = 0; s < Base::sizes.size(); ++s) {
            segments.push_back(
                {Base::params.data(s), Base::grads.data(s), exp_avgs.data(s), exp_avg_sqs.data(s),
                 Kind::kMaster ? Base::masters.data(s) : nullptr, Base::sizes[s], 0,
                 static_cast<int64_t>(Base::group_of[s])});
        }
        Base::number_states(segments);
        num_blocks = number_blocks(segments);
    }

    AdamArgs args() const { return {Base::step_args(segments, num_blocks), rule}; }

    // Moments as earlier steps leave them.
    void randomize_moments() {
        exp_avgs.randomize(4000, 0.5f);
        exp_avg_sqs.randomize(5000);
        for (size_t s = 0; s < Base::sizes.size(); ++s) {
            for (int64_t i = 0; i < Base::sizes[s]; ++i) exp_avg_sqs.set(s, i, std::abs(exp_avg_sqs.at(s, i)));
        }
    }

    bool same_bits(const AdamProblem& other) const {
        return Base::weights_same_bits(other) && exp_avgs.same_bits(other.exp_avgs) &&
               exp_avg_sqs.same_bits(other.exp_avg_sqs) && Base::steps == other.steps;
    }
    bool guards_untouched() const {
        return Base::params.guards_untouched() && Base::grads.guards_untouched() && Base::masters.guards_untouched() &&
               exp_avgs.guards_untouched() && exp_avg_sqs.guards_untouched();
    }

    AdamRule rule;
    TensorList<typename Kind::Moment> exp_avgs, exp_avg_sqs;
    std::vector<AdamSegment> segments;
    int64_t num_blocks = 0;
};

template <typename Kind>
struct LambProblem : AdamProblem<Kind> {
    using Base = AdamProblem<Kind>;

    LambProblem(
        const std::vector<GroupSetting>& settings, const LambRule& lamb_, const ScalingSetting& scaling = {},
        const Placement& placement = {})
        : Base(settings, lamb_, scaling, placement),
          lamb(lamb_),
          partials(static_cast<size_t>(this->num_blocks), {NAN, NAN}),
          trust(this->segments.size(), {NAN, NAN, NAN}) {}

    LambArgs args() {
        return {Base::step_args(Base::segments, Base::num_blocks), lamb, partials.data(), trust.data(), nullptr, 0};
    }

    LambRule lamb;
    std::vector<NormPartials> partials;
    std::vector<Trust> trust;
};

}  // namespace ddpcore::test
