"""Fused optimizers: drop-in for ``torch.optim``, on CPU and CUDA, in anyone's loop."""

from .adamw import FusedAdamW
from .base import FusedOptimizer, TrustRatio
from .groups import describe, param_groups
from .lamb import FusedLAMB
from .lars import FusedLARS
from .muon import Muon
from .registry import OPTIMIZERS, build_optimizer
from .sgd import FusedSGD

__all__ = [
    "FusedAdamW", "FusedLAMB", "FusedLARS", "FusedOptimizer", "FusedSGD", "Muon", "OPTIMIZERS", "TrustRatio",
    "build_optimizer", "describe", "param_groups",
]  # fmt: skip
