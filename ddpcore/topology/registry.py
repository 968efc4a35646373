"""Topologies by name."""

from __future__ import annotations

from ddpcore.options.registry import Registry
from ddpcore.topology.base import Topology
from ddpcore.topology.pairs import RandomPair
from ddpcore.topology.regular import Complete, Hypercube, OnePeerExponential, Ring, Star, StaticExponential, Torus2D
from ddpcore.topology.wrapped import Hierarchical


def _hierarchical(local_size: int = 2) -> Hierarchical:
    """``OnePeerExponential`` between hosts of ``local_size`` learners."""
    return Hierarchical(local_size)


# Those that are made from a list, a matrix or a graph have no name.
TOPOLOGIES: Registry[Topology] = Registry(
    "topology",
    "ddpcore.topologies",
    Topology,
    {
        "complete": Complete,
        "ring": Ring,
        "star": Star,
        "torus_2d": Torus2D,
        "hypercube": Hypercube,
        "static_exponential": StaticExponential,
        "random_pair": RandomPair,
        "one_peer_exponential": OnePeerExponential,
        "hierarchical": _hierarchical,
    },
    reserved=("seed",),
)
