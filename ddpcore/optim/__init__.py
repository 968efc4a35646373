"""Fused optimizers: drop-in for ``torch.optim``, on CPU and CUDA, in anyone's loop."""

from .base import MixingOptimizer
from .sgd import FusedSGD

__all__ = ["FusedSGD", "MixingOptimizer"]
