// ddpcore._C: host-side plans that are no tensors. Where buckets begin and end, and which are complete during backward;
// and, from flags.cpp, the counters by which processes that share memory wait for each other.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

namespace {

using Range = std::pair<int64_t, int64_t>;  // [begin, end) in elements of the flat buffer

// Cuts [0, numel) into buckets of at most `first_size` (the first one) and `size` elements, at multiples of
// `alignment`. Tensors are cut anywhere, so no bucket overshoots.
std::vector<Range> plan_buckets(int64_t numel, int64_t size, int64_t first_size, int64_t alignment) {
    if (numel < 0 || alignment < 1) throw std::invalid_argument("numel must be >= 0 and alignment >= 1");
    if (size < alignment || first_size < alignment) {
        throw std::invalid_argument(
            "a bucket must hold at least one aligned piece of " + std::to_string(alignment) + " elements");
    }
    std::vector<Range> buckets;
    for (int64_t begin = 0; begin < numel;) {
        const int64_t room = (buckets.empty() ? first_size : size) / alignment * alignment;
        buckets.emplace_back(begin, std::min(numel, begin + room));
        begin = buckets.back().second;
    }
    return buckets;
}

// Counts down the tensors that each bucket still waits for, and hands out complete buckets strictly in order: every
// rank then starts the same collectives in the same order, whatever the order in which its gradients come.
class BucketTracker {
  public:
    BucketTracker(std::vector<Range> segments, std::vector<Range> buckets) : buckets_of_segment_(segments.size()) {
        waits_.assign(buckets.size(), 0);
        for (size_t s = 0; s < segments.size(); ++s) {
            for (size_t b = 0; b < buckets.size(); ++b) {
                const bool overlap = segments[s].first < buckets[b].second && buckets[b].first < segments[s].second;
                if (!overlap) continue;
                buckets_of_segment_[s].push_back(b);
                ++waits_[b];
            }
        }
        reset();
    }

    void reset() {
        left_ = waits_;
        seen_.assign(buckets_of_segment_.size(), false);
        next_ = 0;
    }

    // Marks one segment as written; returns the buckets [first, last) that became complete in order. A second mark of a
    // segment within one backward is ignored.
    std::pair<int64_t, int64_t> mark(int64_t segment) {
        if (segment < 0 || segment >= static_cast<int64_t>(seen_.size())) throw std::out_of_range("no such segment");
        const auto s = static_cast<size_t>(segment);
        const auto first = static_cast<int64_t>(next_);
        if (!seen_[s]) {
            seen_[s] = true;
            for (size_t b : buckets_of_segment_[s]) --left_[b];
            while (next_ < left_.size() && left_[next_] == 0) ++next_;
        }
        return {first, static_cast<int64_t>(next_)};
    }

    // The buckets [first, last) that are still to be handed out: tensors without a gradient keep them waiting.
    std::pair<int64_t, int64_t> finish() {
        const auto first = static_cast<int64_t>(next_);
        next_ = left_.size();
        return {first, static_cast<int64_t>(next_)};
    }

    std::vector<bool> seen() const { return seen_; }

  private:
    std::vector<std::vector<size_t>> buckets_of_segment_;
    std::vector<int64_t> waits_, left_;
    std::vector<bool> seen_;
    size_t next_ = 0;
};

}  // namespace

void bind_flags(pybind11::module_& module);  // flags.cpp

PYBIND11_MODULE(_C, module) {
    namespace py = pybind11;
    module.doc() = "Host-side plans: bucket boundaries and bucket readiness; flags in shared memory.";
    bind_flags(module);
    module.def(
        "plan_buckets", &plan_buckets, py::arg("numel"), py::arg("size"), py::arg("first_size"),
        py::arg("alignment") = 1,
        "Cut [0, numel) into (begin, end) ranges of at most first_size (the first) and size elements.");
    py::class_<BucketTracker>(module, "BucketTracker", "Which buckets are complete during one backward pass.")
        .def(py::init<std::vector<Range>, std::vector<Range>>(), py::arg("segments"), py::arg("buckets"))
        .def("reset", &BucketTracker::reset, "Forget all marks: a new backward pass begins.")
        .def(
            "mark", &BucketTracker::mark, py::arg("segment"),
            "Mark a segment; returns the newly complete buckets [first, last).")
        .def("finish", &BucketTracker::finish, "Returns the buckets [first, last) not handed out yet.")
        .def("seen", &BucketTracker::seen, "Which segments were marked.");
}
