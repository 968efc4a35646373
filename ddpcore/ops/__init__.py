"""The kernels as Python functions. The backend is chosen by torch's dispatcher from the device of the tensors.

``reference`` holds a pure-torch twin of each, the standard against which tests and benchmarks hold them.
"""

from .mix import Mixture, mix_, mix_stacked_
from .mix_sgd import mix_sgd_step_
from .norms import segment_norms
from .sgd import sgd_step_

__all__ = ["Mixture", "mix_", "mix_sgd_step_", "mix_stacked_", "segment_norms", "sgd_step_"]
