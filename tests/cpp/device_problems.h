// The tensors of averages and norms on the device: what tests/cpp/problems.h has, as copies there.
#pragma once

#include "device.h"

namespace ddpcore::test {

// MixProblem's tensors on the device and the arguments that point there.
template <typename T>
struct DeviceMix {
    DeviceMix(MixProblem<T>& host, int64_t offset)
        : weights(host.weights, offset),
          partials(host.num_blocks() * static_cast<int64_t>(host.peers.size())),
          sums(static_cast<int64_t>(host.peers.size())),
          args(host.args()) {
        for (const auto& peer : host.peers) {
            peers.push_back(std::make_unique<DeviceBuffer<T>>(*peer, offset));
            pointers.push_back(peers.back()->data());
        }
        args.weights = weights.data();
        args.peers = pointers.data();
        args.partials = partials.data();
        args.sums = sums.data();
    }

    DeviceBuffer<T> weights;
    DeviceBuffer<double> partials, sums;
    std::vector<std::unique_ptr<DeviceBuffer<T>>> peers;
    std::vector<const void*> pointers;
    MixArgs args;
};

// The same of a StackedProblem.
template <typename T>
struct DeviceAverage {
    DeviceAverage(AverageProblem<T>& host, int64_t offset)
        : args(host.args()), partials(host.num_blocks() * args.num_rows), sums(args.num_rows) {
        for (const auto& row : host.rows) {
            rows.push_back(std::make_unique<DeviceBuffer<T>>(*row, offset));
            pointers.push_back(rows.back()->data());
        }
        args.rows = pointers.data();
        args.partials = partials.data();
        args.sums = sums.data();
    }

    AverageArgs args;
    std::vector<std::unique_ptr<DeviceBuffer<T>>> rows;
    std::vector<void*> pointers;
    DeviceBuffer<double> partials, sums;
};

template <typename T>
struct DeviceStacked {
    DeviceStacked(StackedProblem<T>& host, int64_t offset)
        : args(host.args()),
          weights(host.weights, offset),
          offsets(args.offsets, host.num_learners + 1),
          columns(args.columns, args.offsets[host.num_learners]),
          values(args.values, args.offsets[host.num_learners]),
          partials(host.num_blocks() * host.num_learners),
          sums(host.num_learners) {
        for (const auto& other : host.others) {
            others.push_back(
                std::make_unique<DeviceBuffer<T>>(*other, host.num_learners % 2));  // not where weights are
            pointers.push_back(others.back()->data());
        }
        args.weights = weights.data();
        args.others = pointers.data();
        args.offsets = offsets.data();
        args.columns = columns.data();
        args.values = values.data();
        args.partials = partials.data();
        args.sums = sums.data();
    }

    StackedMixArgs args;
    DeviceBuffer<T> weights;
    std::vector<std::unique_ptr<DeviceBuffer<T>>> others;
    std::vector<const void*> pointers;
    DeviceBuffer<int64_t> offsets, columns;
    DeviceBuffer<float> values;
    DeviceBuffer<double> partials, sums;
};

// NormProblem's tensors on the device and the arguments that point there, but for the sums.
template <typename T>
struct DeviceNorms {
    DeviceNorms(NormProblem<T>& host, int64_t offset)
        : partials(host.num_blocks()), segments(host.segments), args(host.args()) {
        for (size_t s = 0; s < segments.size(); ++s) {
            data.push_back(std::make_unique<DeviceBuffer<T>>(*host.data[s], offset));
            segments[s].data = data[s]->data();
        }
        args.segments = segments.data();
        args.partials = partials.data();
    }

    DeviceBuffer<double> partials;
    std::vector<std::unique_ptr<DeviceBuffer<T>>> data;
    std::vector<NormSegment> segments;
    NormArgs args;
};

// The same of a GramProblem.
template <typename T>
struct DeviceGram {
    DeviceGram(GramProblem<T>& host, int64_t offset)
        : args(host.args()),
          origin(host.origin, host.num_rows() % 3 == 0 ? 1 : 0),  // not always where rows are
          partials(static_cast<int64_t>(host.partials.size())),
          sums(static_cast<int64_t>(host.sums.size())) {
        for (const auto& row : host.rows) {
            rows.push_back(std::make_unique<DeviceBuffer<T>>(*row, offset));
            pointers.push_back(rows.back()->data());
        }
        args.rows = pointers.data();
        if (args.origin != nullptr) args.origin = origin.data();
        args.partials = partials.data();
        args.sums = sums.data();
    }

    GramArgs args;
    DeviceBuffer<T> origin;
    DeviceBuffer<double> partials, sums;
    std::vector<std::unique_ptr<DeviceBuffer<T>>> rows;
    std::vector<const void*> pointers;
};

}  // namespace ddpcore::test
