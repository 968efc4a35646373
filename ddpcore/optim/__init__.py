"""Fused optimizers: drop-in for ``torch.optim``, on CPU and CUDA, in anyone's loop."""

from .base import FusedOptimizer
from .groups import param_groups
from .lamb import FusedLAMB
from .lars import FusedLARS
from .mixing import MixingOptimizer
from .sgd import FusedSGD
from .trust import TrustRatio

__all__ = ["FusedLAMB", "FusedLARS", "FusedOptimizer", "FusedSGD", "MixingOptimizer", "TrustRatio", "param_groups"]
