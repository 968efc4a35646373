"""Topologies by name."""

from collections.abc import Mapping
from typing import Any

from ddpcore.options.registry import Registry
from ddpcore.topology.base import Topology
from ddpcore.topology.pairs import RandomPair
from ddpcore.topology.regular import Complete, Hypercube, OnePeerExponential, Ring, Star, StaticExponential, Torus2D
from ddpcore.topology.schedule import Milestones
from ddpcore.topology.wrapped import Hierarchical, Scheduled


def _hierarchical(local_size: int = 2) -> Hierarchical:
    """``OnePeerExponential`` between hosts of ``local_size`` learners."""
    return Hierarchical(local_size)


def _scheduled(stages: Any = ((0, "ring"),), seed: int = 0) -> Scheduled:
    """A topology from each step on, by name or by a table of name and options: ``[[0, "ring"], [600, "complete"]]``."""
    return Scheduled([(step, topology_named(one, seed)) for step, one in Milestones(stages, "topology").stages])


def topology_named(wanted: Any, seed: int = 0) -> Topology:
    """The topology of a name, or of a table of a name and options. ValueError: there is none."""
    table = dict(wanted) if isinstance(wanted, Mapping) else {"name": wanted}
    return TOPOLOGIES.build(str(table.pop("name", "")), **{"seed": seed, **table})


# Those that are made from a list, a matrix or a graph have no name.
TOPOLOGIES: Registry[Topology] = Registry("topology", "ddpcore.topologies", Topology, {
    "complete": Complete, "ring": Ring, "star": Star, "torus_2d": Torus2D, "hypercube": Hypercube,
    "static_exponential": StaticExponential, "random_pair": RandomPair,
    "one_peer_exponential": OnePeerExponential, "hierarchical": _hierarchical, "scheduled": _scheduled,
}, reserved=("seed",))  # fmt: skip
