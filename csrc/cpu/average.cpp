// average_: each block of rows <- its mean; 8 bytes an element and row in fp32. A tile of the rows is read, and written
// while it is in the cache.
#include <algorithm>

#include "dispatch.h"
#include "kernels.h"

namespace ddpcore::cpu {

namespace {

inline constexpr int64_t kMeanTile = 1024;  // elements of a mean, which stays in L1; it divides the block

// mean[0:numel] = the sum of `count` rows in ascending order, or += it. Adds each row's own sum, formed in fp32, to
// sums.
template <bool kFirst, int count, typename T>
DDPCORE_INLINE void add_rows(float* __restrict mean, void* const* rows, int64_t first, int64_t numel, double* sums) {
    const T* row[count];
    for (int k = 0; k < count; ++k) row[k] = static_cast<const T*>(rows[k]) + first;
    float lanes[count][kLanes] = {};
    const auto add = [&](int64_t i, int lane) __attribute__((always_inline)) {
        float total = load(row[0][i]);
        lanes[0][lane] += total;
        if constexpr (!kFirst) total = mean[i] + total;
        for (int k = 1; k < count; ++k) {
            const float value = load(row[k][i]);
            lanes[k][lane] += value;
            total = total + value;
        }
        mean[i] = total;
    };
    int64_t i = 0;
    for (; i + kLanes <= numel; i += kLanes) {
        DDPCORE_IVDEP
        for (int lane = 0; lane < kLanes; ++lane) add(i + lane, lane);
    }
    for (int lane = 0; i < numel; ++i, ++lane) add(i, lane);
    for (int k = 0; k < count; ++k) {
        for (const float lane : lanes[k]) sums[k] += lane;
    }
}

}  // namespace

DDPCORE_CLONES void average_(const AverageArgs& args, int64_t begin_block, int64_t end_block) {
    with_storage(args.dtype, [&](auto* tag) __attribute__((always_inline)) {
        using T = std::remove_pointer_t<decltype(tag)>;
        const auto size = static_cast<float>(args.size);
        float mean[kMeanTile];
        for (int64_t block = begin_block; block < end_block; ++block) {
            double* sums = args.partials + block * args.num_rows;
            std::fill_n(sums, args.num_rows, 0.0);
            const int64_t end = std::min((block + 1) * kBlock, args.numel);
            for (int64_t first = block * kBlock; first < end; first += kMeanTile) {
                const int64_t numel = std::min(kMeanTile, end - first);
                for (int64_t own = 0; own < args.num_rows; own += args.size) {
                    void* const* rows = args.rows + own;
                    int64_t k = args.size < 4 ? 1 : 4;
                    if (k == 1) {
                        add_rows<true, 1, T>(mean, rows, first, numel, sums + own);
                    } else {
                        add_rows<true, 4, T>(mean, rows, first, numel, sums + own);
                    }
                    for (; k + 4 <= args.size; k += 4) {
                        add_rows<false, 4, T>(mean, rows + k, first, numel, sums + own + k);
                    }
                    for (; k < args.size; ++k) add_rows<false, 1, T>(mean, rows + k, first, numel, sums + own + k);
                    for (int64_t i = 0; i < numel; ++i) mean[i] = mean[i] / size;
                    for (k = 0; k < args.size; ++k) {
                        T* row = static_cast<T*>(rows[k]) + first;
                        for (int64_t i = 0; i < numel; ++i) row[i] = store<T>(mean[i]);
                    }
                }
            }
        }
    });
}

}  // namespace ddpcore::cpu
