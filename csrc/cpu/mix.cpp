// mix_: weights <- self_weight * weights + sum_k peer_weights[k] * peers[k] + noise; 12 bytes an element with one peer
// in fp32. mix_stacked_: the same for a stack of learners held in one process.
#include <algorithm>
#include <vector>

#include "../random.h"
#include "dispatch.h"
#include "kernels.h"

namespace ddpcore::cpu {

namespace {

inline constexpr int64_t kTile = 256;  // elements of a tile of the mix, which stays in L1

// Copies the weights from args.source to args.weights, from where the loops below read them. It copies vectors: memcpy
// of large data bypasses the cache, from which the loops then read.
template <typename T>
DDPCORE_INLINE void copy_source(const MixArgs& args, int64_t first, int64_t numel) {
    if (args.source == nullptr || args.source == args.weights) return;
    T* to = static_cast<T*>(args.weights) + first;
    const T* from = static_cast<const T*>(args.source) + first;
    int64_t i = 0;
    for (; i + kLanes <= numel; i += kLanes) {
        DDPCORE_IVDEP
        for (int lane = 0; lane < kLanes; ++lane) to[i + lane] = from[i + lane];
        asm volatile("" ::: "memory");  // else the compiler makes a memcpy of the loop
    }
    for (; i < numel; ++i) to[i] = from[i];
}

// The mix with one peer and without noise, the common case, in a single loop over all buffers, which is faster than one
// loop after the other. use_at(first, weights) returns a function of (i, mixed element first + i) that may write
// weights[i]. It must write through this pointer, so that the compiler knows that no buffers overlap.
template <typename T, typename UseAt>
DDPCORE_INLINE void mix_one_peer(const MixArgs& args, int64_t begin_block, int64_t end_block, UseAt&& use_at) {
    const float self_weight = args.self_weight, peer_weight = args.peer_weights[0];
    T* const base = static_cast<T*>(args.weights);
    const T* const peers = static_cast<const T*>(args.peers[0]);
    const int64_t step = args.source == nullptr ? kBlock : kTile;
    for (int64_t block = begin_block; block < end_block; ++block) {
        const int64_t end = std::min((block + 1) * kBlock, args.numel);
        double lanes[kLanes] = {};
        for (int64_t first = block * kBlock; first < end; first += step) {
            const int64_t numel = std::min(step, end - first);
            T* weights = base + first;
            const T* peer = peers + first;
            copy_source<T>(args, first, numel);
            const auto use = use_at(first, weights);
            add_squares(lanes, numel, [=](int64_t i) __attribute__((always_inline)) {
                const float own = load(weights[i]), theirs = load(peer[i]);
                use(i, mix_element(self_weight * own, peer_weight, theirs));
                return own - theirs;
            });
        }
        args.partials[block] = sum_lanes(lanes);
    }
}

// mixed[0:numel] = the mix of elements [first, first + numel), one peer after the other.
template <typename T>
DDPCORE_INLINE void mix_tile(const MixArgs& args, int64_t first, int64_t numel, float* mixed, double* lanes) {
    const T* weights = static_cast<const T*>(args.weights) + first;
    const float self_weight = args.self_weight;
    for (int64_t i = 0; i < numel; ++i) mixed[i] = self_weight * load(weights[i]);
    for (int64_t k = 0; k < args.num_peers; ++k) {
        const T* peer = static_cast<const T*>(args.peers[k]) + first;
        const float peer_weight = args.peer_weights[k];
        add_squares(lanes + k * kLanes, numel, [=](int64_t i) __attribute__((always_inline)) {
            const float theirs = load(peer[i]);
            mixed[i] = mix_element(mixed[i], peer_weight, theirs);
            return load(weights[i]) - theirs;
        });
    }
}

// mixed[0:numel] += the noise of elements [first, first + numel), numel <= kTile. A draw gives four numbers, so the
// first and the last draw may have numbers outside of the range.
DDPCORE_CLONES void add_noise(const Noise& noise, int64_t first, int64_t numel, float* mixed) {
    const auto index = static_cast<uint64_t>(noise.first + first), skipped = index % 4;
    const uint64_t num_fours = (skipped + static_cast<uint64_t>(numel) + 3) / 4;
    float normals[kTile + 4];
    for (uint64_t i = 0; i < num_fours; ++i) {
        const Normals four = four_normals(noise.seed, noise.step, index / 4 + i);
        for (int k = 0; k < 4; ++k) normals[4 * i + k] = four.values[k];
    }
    for (int64_t i = 0; i < numel; ++i) mixed[i] = mix_element(mixed[i], noise.std, (normals + skipped)[i]);
}

// The mix with any number of peers, and with noise. It calls use(first, numel, mixed) for each tile.
template <typename T, typename Use>
DDPCORE_INLINE void mix_tiles(const MixArgs& args, int64_t begin_block, int64_t end_block, Use&& use) {
    std::vector<double> lanes(static_cast<size_t>(args.num_peers * kLanes));
    float mixed[kTile];
    for (int64_t block = begin_block; block < end_block; ++block) {
        const int64_t end = std::min((block + 1) * kBlock, args.numel);
        std::fill(lanes.begin(), lanes.end(), 0.0);
        for (int64_t first = block * kBlock; first < end; first += kTile) {
            const int64_t numel = std::min(kTile, end - first);
            copy_source<T>(args, first, numel);
            mix_tile<T>(args, first, numel, mixed, lanes.data());
            if (args.noise.std != 0.0f) add_noise(args.noise, first, numel, mixed);
            use(first, numel, mixed);
        }
        for (int64_t k = 0; k < args.num_peers; ++k) {
            args.partials[block * args.num_peers + k] = sum_lanes(lanes.data() + k * kLanes);
        }
    }
}

}  // namespace

DDPCORE_CLONES void mix_(const MixArgs& args, int64_t begin_block, int64_t end_block) {
    with_storage(args.dtype, [&](auto* tag) __attribute__((always_inline)) {
        using T = std::remove_pointer_t<decltype(tag)>;
        T* weights = static_cast<T*>(args.weights);
        if (args.num_peers == 1 && args.noise.std == 0.0f) {
            mix_one_peer<T>(args, begin_block, end_block, [=](int64_t, T* out) __attribute__((always_inline)) {
                return [=](int64_t i, float mixed) __attribute__((always_inline)) { out[i] = store<T>(mixed); };
            });
            return;
        }
        mix_tiles<T>(
            args, begin_block, end_block,
            [=](int64_t first, int64_t numel, const float* mixed) __attribute__((always_inline)) {
                for (int64_t i = 0; i < numel; ++i) weights[first + i] = store<T>(mixed[i]);
            });
    });
}

DDPCORE_CLONES void mix_elements(const MixArgs& args, int64_t first, int64_t last) {
    with_storage(args.dtype, [&](auto* tag) __attribute__((always_inline)) {
        using T = std::remove_pointer_t<decltype(tag)>;
        T* weights = static_cast<T*>(args.weights);
        const T* source = args.source == nullptr ? weights : static_cast<const T*>(args.source);
        if (args.num_peers == 1 && args.noise.std == 0.0f) {  // all rows in one loop
            const T* peer = static_cast<const T*>(args.peers[0]);
            const float self_weight = args.self_weight, peer_weight = args.peer_weights[0];
            DDPCORE_IVDEP
            for (int64_t i = first; i < last; ++i) {
                weights[i] = store<T>(mix_element(self_weight * load(source[i]), peer_weight, load(peer[i])));
            }
            return;
        }
        float mixed[kTile];
        for (; first < last; first += kTile) {
            const int64_t numel = std::min(kTile, last - first);
            for (int64_t i = 0; i < numel; ++i) mixed[i] = args.self_weight * load(source[first + i]);
            for (int64_t k = 0; k < args.num_peers; ++k) {
                const T* peer = static_cast<const T*>(args.peers[k]) + first;
                const float peer_weight = args.peer_weights[k];
                for (int64_t i = 0; i < numel; ++i) mixed[i] = mix_element(mixed[i], peer_weight, load(peer[i]));
            }
            if (args.noise.std != 0.0f) add_noise(args.noise, first, numel, mixed);
            for (int64_t i = 0; i < numel; ++i) weights[first + i] = store<T>(mixed[i]);
        }
    });
}

namespace {

inline constexpr int64_t kStackTile = 32768;  // elements of a tile of columns: 128 KiB, which a core's L2 holds

// The columns of a tile: a power of two that divides the block, and at least a cache line of a row. So a tile of 4096
// learners has 256 KiB, or 512 KiB if elements have 16 bits. Without distances it fits in L1, because the loops over it
// are then as fast as L1; a row has at least 128 columns of it, because a processor prefetches shorter ones badly.
template <typename T>
int64_t tile_columns(int64_t num_learners, bool distances) {
    constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
    static_assert(kLine % kLanes == 0);
    int64_t columns = kBlock;
    while (columns > kLine && columns * num_learners > kStackTile) columns /= 2;
    while (!distances && columns > 128 && columns * num_learners > kBlock / 2) columns /= 2;
    return columns;
}

// row += value * source, or row = value * source for the first entry of a row.
template <typename T>
DDPCORE_INLINE void add_entry(float* __restrict row, bool is_first, float value, const T* source, int64_t numel) {
    if (is_first) {
        for (int64_t i = 0; i < numel; ++i) row[i] = value * load(source[i]);
    } else {
        for (int64_t i = 0; i < numel; ++i) row[i] = mix_element(row[i], value, load(source[i]));
    }
}

// Adds each row's squared distance to the mean of a tile to `sums`.
DDPCORE_INLINE void add_distances(
    int64_t n, int64_t numel, const float* __restrict tile, float* __restrict row, double* __restrict sums) {
    for (int64_t i = 0; i < numel; ++i) row[i] = 0.0f;
    for (int64_t j = 0; j < n; ++j) {
        for (int64_t i = 0; i < numel; ++i) row[i] = row[i] + tile[j * numel + i];
    }
    const float share = 1.0f / static_cast<float>(n);
    for (int64_t i = 0; i < numel; ++i) row[i] = share * row[i];
    for (int64_t j = 0; j < n; ++j) {
        const float* own = tile + j * numel;
        double lanes[kLanes] = {};
        add_squares(lanes, numel, [=](int64_t i) __attribute__((always_inline)) { return own[i] - row[i]; });
        sums[j] += sum_lanes(lanes);
    }
}

// Mixes one tile of columns. `tile` holds the old rows, so that no new row overwrites an old one that is still needed.
// The cost is proportional to the number of entries. Without `sums` it computes no distances, which take longer.
template <typename T>
DDPCORE_INLINE void mix_stacked_tile(
    const StackedMixArgs& args, int64_t first, int64_t numel, float* __restrict tile, float* __restrict row,
    double* __restrict sums) {
    const int64_t n = args.num_learners;
    T* weights = static_cast<T*>(args.weights) + first;
    for (int64_t j = 0; j < n; ++j) {
        for (int64_t i = 0; i < numel; ++i) tile[j * numel + i] = load(weights[j * args.numel + i]);
    }
    if (sums != nullptr) add_distances(n, numel, tile, row, sums);
    for (int64_t j = 0; j < n; ++j) {
        const int64_t begin = args.offsets[j], end = args.offsets[j + 1];
        if (begin == end) std::fill_n(row, numel, 0.0f);
        for (int64_t entry = begin; entry < end; ++entry) {
            const int64_t column = args.columns[entry];
            if (column < n) {
                add_entry(row, entry == begin, args.values[entry], tile + column * numel, numel);
            } else {
                const T* other = static_cast<const T*>(args.others[column - n]) + first;
                add_entry(row, entry == begin, args.values[entry], other, numel);
            }
        }
        for (int64_t i = 0; i < numel; ++i) weights[j * args.numel + i] = store<T>(row[i]);
    }
}

}  // namespace

DDPCORE_CLONES void mix_stacked_(const StackedMixArgs& args, int64_t begin_block, int64_t end_block) {
    with_storage(args.dtype, [&](auto* tag) __attribute__((always_inline)) {
        using T = std::remove_pointer_t<decltype(tag)>;
        const int64_t n = args.num_learners, width = tile_columns<T>(n, args.partials != nullptr);
        std::vector<float> tile(static_cast<size_t>(n * width)), row(static_cast<size_t>(width));
        for (int64_t block = begin_block; block < end_block; ++block) {
            double* sums = args.partials == nullptr ? nullptr : args.partials + block * n;
            if (sums != nullptr) std::fill_n(sums, n, 0.0);
            const int64_t end = std::min((block + 1) * kBlock, args.numel);
            for (int64_t first = block * kBlock; first < end; first += width) {
                mix_stacked_tile<T>(args, first, std::min(width, end - first), tile.data(), row.data(), sums);
            }
        }
    });
}

}  // namespace ddpcore::cpu
