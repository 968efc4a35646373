"""Numbers about training, beside it: they read a learner and change nothing."""

from .dynamics import Dynamics, Spread
from .estimates import NoiseScale, noise_scale
from .noise import NoiseStatistics
from .record import NoiseRecord

__all__ = ["Dynamics", "NoiseRecord", "NoiseScale", "NoiseStatistics", "Spread", "noise_scale"]
