"""Statistics of gradients, weights and curvature; they read a learner and change nothing."""

from .dynamics import Dynamics, Spread
from .estimates import NoiseScale, noise_scale
from .flatness import Flatness, flatness
from .noise import NoiseStatistics
from .record import NoiseRecord

__all__ = ["Dynamics", "Flatness", "NoiseRecord", "NoiseScale", "NoiseStatistics", "Spread", "flatness", "noise_scale"]
