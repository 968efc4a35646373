"""The kernels as Python functions. torch's dispatcher chooses the backend from the device of the tensors.

``reference`` holds a pure-torch reference implementation of each kernel. Tests and benchmarks compare kernels with it.
"""

from .adamw import adamw_step_, mix_adamw_step_
from .lamb import lamb_step_, mix_lamb_step_
from .lars import lars_step_, mix_lars_step_
from .library import WHY_NOT_COMPILED
from .mix import MAX_STEP_PEERS, Mixture, Noise, RowMixtures, StackedMixture, WeightAverage, mix_, mix_stacked_
from .noise import noise_sums
from .norms import segment_norms, total_norm_
from .scratch import new_scratch, new_trust, num_blocks
from .sgd import mix_sgd_step_, sgd_step_

__all__ = [
    "WHY_NOT_COMPILED",
    "MAX_STEP_PEERS",
    "Mixture",
    "Noise",
    "RowMixtures",
    "StackedMixture",
    "WeightAverage",
    "adamw_step_",
    "lamb_step_",
    "lars_step_",
    "mix_",
    "mix_adamw_step_",
    "mix_lamb_step_",
    "mix_lars_step_",
    "mix_sgd_step_",
    "mix_stacked_",
    "new_scratch",
    "new_trust",
    "noise_sums",
    "num_blocks",
    "segment_norms",
    "sgd_step_",
    "total_norm_",
]
