"""Statistics of gradients, weights and curvature; they read a learner and change nothing."""

from ddpcore.records.surface import Surface

from .dynamics import Dynamics, Spread
from .flatness import Flatness, flatness
from .hessian import Hessian
from .hessian_statistics import HessianRecord, HessianStatistics
from .landscape import Plane, eigenvector_plane, landscape, plane_through, random_plane
from .noise import NoiseStatistics
from .record import NoiseRecord, NoiseScale, noise_scale
from .spectra import Eigenvalues, Estimate, SpectralDensity
from .weights import DataLoss

__all__ = [
    "DataLoss", "Dynamics", "Eigenvalues", "Estimate", "Flatness", "Hessian", "HessianRecord", "HessianStatistics",
    "NoiseRecord", "NoiseScale", "NoiseStatistics", "Plane", "SpectralDensity", "Spread", "Surface",
    "eigenvector_plane", "flatness", "landscape", "noise_scale", "plane_through", "random_plane",
]  # fmt: skip
