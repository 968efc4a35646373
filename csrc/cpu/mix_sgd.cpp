// mix_sgd_step_: mix_, then sgd_step_, in one pass: 24 bytes a parameter in fp32 with momentum and one peer.
#include <algorithm>

#include "kernels.h"
#include "mix.h"
#include "sgd.h"

namespace ddpcore::cpu {

namespace {

// The arguments of the step for the elements from `first` on.
template <typename T>
struct Place {
    T* param;
    const T* grad;
    T* momentum;
    SgdScales scales;

    DDPCORE_INLINE Place(const MixSgdArgs& args, const SgdScales& scales, int64_t first, T* param)
        : param(param),
          grad(static_cast<const T*>(args.grad) + first),
          momentum(args.momentum ? static_cast<T*>(args.momentum) + first : nullptr),
          scales(scales) {}

    // The mix is rounded to the storage type first, so that one pass has the bits of two.
    template <int flags>
    DDPCORE_INLINE void step(int64_t i, float mixed) const {
        param[i] = store<T>(sgd_at<flags>(load(store<T>(mixed)), load(grad[i]), momentum, i, scales));
    }
};

}  // namespace

DDPCORE_CLONES void mix_sgd_step_(const MixSgdArgs& args, int64_t begin_block, int64_t end_block) {
    const SgdScales scales = sgd_scales(args.rule, args.group, args.maximize ? -1.0f : 1.0f);
    const int flags = sgd_flags(args.rule, args.group);
    with_storage(args.mix.dtype, [&](auto* tag) __attribute__((always_inline)) {
        using T = std::remove_pointer_t<decltype(tag)>;
        if (args.mix.num_peers == 1 && args.mix.noise.std == 0.0f) {
            with_sgd_flags(flags, [&]<int constant>() __attribute__((always_inline)) {
                mix_one_peer<T>(
                    args.mix, begin_block, end_block, [&](int64_t first, T* weights) __attribute__((always_inline)) {
                        const Place<T> place(args, scales, first, weights);
                        return [=](int64_t i, float mixed)
                                   __attribute__((always_inline)) { place.template step<constant>(i, mixed); };
                    });
            });
            return;
        }
        mix_tiles<T>(
            args.mix, begin_block, end_block,
            [&](int64_t first, int64_t numel, const float* mixed) __attribute__((always_inline)) {
                const Place<T> place(args, scales, first, static_cast<T*>(args.mix.weights) + first);
                with_sgd_flags(flags, [&]<int constant>() __attribute__((always_inline)) {
                    DDPCORE_IVDEP
                    for (int64_t i = 0; i < numel; ++i) place.template step<constant>(i, mixed[i]);
                });
            });
    });
}

}  // namespace ddpcore::cpu
