"""The kernels as Python functions, without derivatives. torch's dispatcher chooses the backend by the tensors' device.

``reference`` holds a pure-torch reference implementation of each kernel. Tests and benchmarks compare kernels with it.
"""

from .library import WHY_NOT_COMPILED
from .mix import MAX_STEP_PEERS, Mixture, Noise, RowMixtures, StackedMixture, WeightAverage, mix_, mix_stacked_
from .steps import Rule, adamw_step_, lamb_step_, lars_step_, new_scratch, new_trust, num_blocks, sgd_step_
from .sums import average_, noise_sums, segment_norms, total_norm_

__all__ = [
    "WHY_NOT_COMPILED", "MAX_STEP_PEERS", "Mixture", "Noise", "RowMixtures", "Rule", "StackedMixture",
    "WeightAverage", "adamw_step_", "average_", "lamb_step_", "lars_step_", "mix_", "mix_stacked_", "new_scratch",
    "new_trust", "noise_sums", "num_blocks", "segment_norms", "sgd_step_", "total_norm_",
]  # fmt: skip
