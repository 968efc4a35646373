// mix_sgd_step_: mix_ and then sgd_step_ in one pass; 24 bytes a parameter in fp32 with momentum and one peer.
#include <algorithm>

#include "kernels.h"
#include "mix.h"
#include "sgd.h"

namespace ddpcore::cpu {

DDPCORE_CLONES void mix_sgd_step_(const MixSgdArgs& args, int64_t begin_block, int64_t end_block) {
    with_storage(args.mix.dtype, [&](auto* tag) __attribute__((always_inline)) {
        using T = std::remove_pointer_t<decltype(tag)>;
        mix_blocks<T>(
            args.mix, begin_block, end_block,
            [&](int64_t first, int64_t numel, float* mixed) __attribute__((always_inline)) {
                // The mix is rounded to the storage type first, so that the two steps in one equal the two steps apart.
                if constexpr (!std::is_same_v<T, float>) {
                    for (int64_t i = 0; i < numel; ++i) mixed[i] = load(store<T>(mixed[i]));
                }
                T* param = static_cast<T*>(args.mix.weights) + first;
                T* momentum = args.momentum ? static_cast<T*>(args.momentum) + first : nullptr;
                const T* grad = static_cast<const T*>(args.grad) + first;
                with_sgd_flags(args.rule, [&]<int flags>() __attribute__((always_inline)) {
                    sgd_run<flags>(param, mixed, grad, momentum, numel, args.rule);
                });
            });
    });
}

}  // namespace ddpcore::cpu
