// Optimizer steps on the device: what tests/cpp/steps.h has, as copies there, and the calls.
#pragma once

#include "device.h"
#include "device_problems.h"
#include "settings.h"

#ifdef DDPCORE_FEW_ELEMENTS
#include "cuda_on_cpu.h"
#endif

namespace ddpcore::test {

// A TensorList on the device; each tensor in a buffer of its own, or all in one if they are so on the host.
template <typename T>
struct DeviceList {
    DeviceList(const TensorList<T>& host, int64_t offset) {
        const bool flat = host.flat() && host.size() > 0;
        for (size_t s = 0; s < (flat ? 1 : host.size()); ++s) {
            const int64_t numel = flat ? host.total() : host.numel(s);
            buffers.push_back(std::make_unique<DeviceBuffer<T>>(host.data(s), numel, offset));
        }
        for (size_t s = 0; s < host.size(); ++s) places.push_back(buffers[flat ? 0 : s]->data() + host.start(s));
    }
    T* data(size_t s) const { return places[s]; }
    void upload(const TensorList<T>& host) const {
        for (size_t s = 0; s < buffers.size(); ++s) buffers[s]->upload(host.data(s));
    }
    void download(TensorList<T>& host) const {
        for (size_t s = 0; s < buffers.size(); ++s) std::ranges::copy(buffers[s]->download(), host.data(s));
    }
    void expect_same_bits(const TensorList<T>& host, const char* name) const {
        for (size_t s = 0; s < buffers.size(); ++s) {
            ASSERT_TRUE(buffers[s]->same_bits(host.data(s))) << name << " of segment " << s;
        }
    }

    std::vector<std::unique_ptr<DeviceBuffer<T>>> buffers;
    std::vector<T*> places;
};

// Where moments begin. With an offset of 4, weights of fp32 are aligned to 16 bytes and their moments are not.
inline int64_t offset_of_states(int64_t offset) {
    return offset == 4 ? 1 : offset;
}

template <typename T>
DeviceBuffer<T> filled(size_t numel, const T& value) {
    const std::vector<T> host(numel, value);
    return DeviceBuffer<T>(host.data(), static_cast<int64_t>(numel));
}

// What StepProblem has, on the device.
template <typename Kind>
struct DeviceStep {
    using T = typename Kind::Param;

    DeviceStep(const StepProblem<Kind>& host, int64_t num_blocks, int64_t offset)
        : params(host.params, offset),
          grads(host.grads, offset),
          masters(host.masters, offset),
          lrs(host.lrs.data(), std::ssize(host.lrs)),
          steps(host.steps.data(), std::ssize(host.steps)),
          grad_scale(filled(1, host.scaling.grad_scale.value_or(NAN))),
          found_inf(filled(1, host.scaling.found_inf.value_or(NAN))),
          norm_squared(filled(1, host.scaling.norm_squared.value_or(NAN))),
          partials(filled(static_cast<size_t>(num_blocks), NormPartials{NAN, NAN})),
          trust(filled(host.sizes.size(), Trust{NAN, NAN, NAN})),
          tickets(filled(host.sizes.size() + 2, uint64_t{0})),
          groups(host.groups) {
        for (size_t g = 0; g < groups.size(); ++g) {
            if (groups[g].device_lr != nullptr) groups[g].device_lr = lrs.data() + g;
            if (groups[g].step != nullptr) groups[g].step = steps.data() + g;
        }
        if (host.mix == nullptr) return;
        // Three peers are aligned where the params are not, and the reverse.
        mix = std::make_unique<DeviceMix<T>>(*host.mix, host.mix->peers.size() == 3 ? 1 - offset : offset);
        if (host.mix_args.source != nullptr) mix->args.source = mix->weights.data();
        mix->args.weights = params.data(0);
        mix->args.partials = mix->args.sums = nullptr;
    }

    // What SgdArgs and LambArgs have in common; their segments are filled in by the caller.
    template <typename Args>
    void place(Args& args) const {
        args.groups = groups.data();
        if (args.scaling.grad_scale != nullptr) args.scaling.grad_scale = grad_scale.data();
        if (args.scaling.found_inf != nullptr) args.scaling.found_inf = found_inf.data();
        if (args.scaling.norm_squared != nullptr) args.scaling.norm_squared = norm_squared.data();
        args.tickets = tickets.data();
        if (mix != nullptr) args.mix = &mix->args;
    }

    // What a training loop changes between steps; the norm of the gradients is for whoever forms it.
    void upload_inputs(const StepProblem<Kind>& host) const {
        grads.upload(host.grads);
        lrs.upload(host.lrs.data());
        if (host.scaling.grad_scale) grad_scale.upload(&*host.scaling.grad_scale);
        if (host.scaling.found_inf) found_inf.upload(&*host.scaling.found_inf);
    }
    void download(StepProblem<Kind>& host) const {
        params.download(host.params);
        masters.download(host.masters);
        host.steps = steps.download();
    }

    void expect_same_bits(const StepProblem<Kind>& host) const {
        ASSERT_NO_FATAL_FAILURE(params.expect_same_bits(host.params, "param"));
        ASSERT_NO_FATAL_FAILURE(grads.expect_same_bits(host.grads, "grad"));
        ASSERT_NO_FATAL_FAILURE(masters.expect_same_bits(host.masters, "master"));
        ASSERT_EQ(steps.download(), host.steps);
        for (const uint64_t ticket : tickets.download()) ASSERT_EQ(ticket, 0u);
    }

    DeviceList<T> params, grads;
    DeviceList<float> masters;
    DeviceBuffer<float> lrs, steps, grad_scale, found_inf;
    DeviceBuffer<double> norm_squared;
    DeviceBuffer<NormPartials> partials;
    DeviceBuffer<Trust> trust;
    DeviceBuffer<uint64_t> tickets;
    std::vector<StepGroup> groups;
    std::unique_ptr<DeviceMix<T>> mix;
};

template <typename Kind>
struct DeviceSgd : DeviceStep<Kind> {
    DeviceSgd(const SgdProblem<Kind>& host, int64_t offset)
        : DeviceStep<Kind>(host, host.num_blocks, offset),
          momenta(host.momenta, offset_of_states(offset)),
          segments(host.segments) {
        for (size_t s = 0; s < segments.size(); ++s) {
            segments[s].param = this->params.data(s);
            segments[s].grad = this->grads.data(s);
            segments[s].momentum = segments[s].momentum ? momenta.data(s) : nullptr;
            if (Kind::kMaster) segments[s].master = this->masters.data(s);
        }
    }

    SgdArgs args(const SgdProblem<Kind>& host) const {
        SgdArgs result = host.args();
        result.segments = segments.data();
        this->place(result);
        return result;
    }

    void download(SgdProblem<Kind>& host) const {
        DeviceStep<Kind>::download(host);
        momenta.download(host.momenta);
    }
    void download(LarsProblem<Kind>& host) const {
        download(static_cast<SgdProblem<Kind>&>(host));
        host.trust = this->trust.download();
    }

    void expect_same_bits(const SgdProblem<Kind>& host) const {
        ASSERT_NO_FATAL_FAILURE(DeviceStep<Kind>::expect_same_bits(host));
        ASSERT_NO_FATAL_FAILURE(momenta.expect_same_bits(host.momenta, "momentum"));
    }

    DeviceList<typename Kind::Momentum> momenta;
    std::vector<SgdSegment> segments;
};

template <typename Kind>
struct DeviceAdam : DeviceStep<Kind> {
    DeviceAdam(const AdamProblem<Kind>& host, int64_t offset)
        : DeviceStep<Kind>(host, host.num_blocks, offset),
          exp_avgs(host.exp_avgs, offset_of_states(offset)),
          exp_avg_sqs(host.exp_avg_sqs, offset_of_states(offset)),
          segments(host.segments) {
        for (size_t s = 0; s < segments.size(); ++s) {
            segments[s].param = this->params.data(s);
            segments[s].grad = this->grads.data(s);
            segments[s].exp_avg = exp_avgs.data(s);
            segments[s].exp_avg_sq = exp_avg_sqs.data(s);
            if (Kind::kMaster) segments[s].master = this->masters.data(s);
        }
    }

    AdamArgs args(const AdamProblem<Kind>& host) const {
        AdamArgs result = host.args();
        result.segments = segments.data();
        this->place(result);
        return result;
    }
    LambArgs args(LambProblem<Kind>& host) const {
        const StepArgs<AdamSegment>& step = args(static_cast<const AdamProblem<Kind>&>(host));
        return {step, host.lamb, this->partials.data(), this->trust.data(), nullptr, 0};
    }

    void download(AdamProblem<Kind>& host) const {
        DeviceStep<Kind>::download(host);
        exp_avgs.download(host.exp_avgs);
        exp_avg_sqs.download(host.exp_avg_sqs);
    }
    void download(LambProblem<Kind>& host) const {
        download(static_cast<AdamProblem<Kind>&>(host));
        host.trust = this->trust.download();
    }

    void expect_same_bits(const AdamProblem<Kind>& host) const {
        ASSERT_NO_FATAL_FAILURE(DeviceStep<Kind>::expect_same_bits(host));
        ASSERT_NO_FATAL_FAILURE(exp_avgs.expect_same_bits(host.exp_avgs, "exp_avg"));
        ASSERT_NO_FATAL_FAILURE(exp_avg_sqs.expect_same_bits(host.exp_avg_sqs, "exp_avg_sq"));
    }

    DeviceList<typename Kind::Moment> exp_avgs, exp_avg_sqs;
    std::vector<AdamSegment> segments;
};

template <typename Kind>
DeviceSgd<Kind> on_device(const SgdProblem<Kind>& host, int64_t offset) {
    return DeviceSgd<Kind>(host, offset);
}

template <typename Kind>
DeviceAdam<Kind> on_device(const AdamProblem<Kind>& host, int64_t offset) {
    return DeviceAdam<Kind>(host, offset);
}

template <typename Kind>
cudaError_t enqueue_step(const DeviceSgd<Kind>& device, SgdProblem<Kind>& host, cudaStream_t stream = nullptr) {
    return cuda::sgd_step_(device.args(host), stream);
}

template <typename Kind>
cudaError_t enqueue_step(const DeviceSgd<Kind>& device, LarsProblem<Kind>& host, cudaStream_t stream = nullptr) {
    return cuda::lars_step_({device.args(host), host.lars, device.partials.data(), device.trust.data()}, stream);
}

template <typename Kind>
cudaError_t enqueue_step(const DeviceAdam<Kind>& device, AdamProblem<Kind>& host, cudaStream_t stream = nullptr) {
    return cuda::adamw_step_(device.args(host), stream);
}

template <typename Kind>
cudaError_t enqueue_step(const DeviceAdam<Kind>& device, LambProblem<Kind>& host, cudaStream_t stream = nullptr) {
    return cuda::lamb_step_(device.args(host), stream);
}

template <typename Kind>
class CudaOptimizers : public CudaTest<Kind> {
  protected:
    void SetUp() override {
        CudaTest<Kind>::SetUp();
#ifdef DDPCORE_FEW_ELEMENTS
        cuda_on_cpu::device().l2_bytes = 1 << 17;  // batches of one or two blocks
#endif
    }
};
}  // namespace ddpcore::test
