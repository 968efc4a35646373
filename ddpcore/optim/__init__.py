"""Fused optimizers: drop-in for ``torch.optim``, on CPU and CUDA, in anyone's loop."""

from .base import FusedOptimizer
from .groups import param_groups
from .lamb import FusedLAMB
from .lars import FusedLARS
from .sgd import FusedSGD
from .trust import TrustRatio

__all__ = ["FusedLAMB", "FusedLARS", "FusedOptimizer", "FusedSGD", "TrustRatio", "param_groups"]
