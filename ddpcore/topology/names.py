"""Topologies by name, as command lines call them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ddpcore.options.suggest import suggest
from ddpcore.topology.base import Topology
from ddpcore.topology.hierarchical import Hierarchical
from ddpcore.topology.pairs import RandomPair
from ddpcore.topology.regular import Complete, Hypercube, OnePeerExponential, Ring, Star, StaticExponential, Torus2D

_BUILDERS: dict[str, Callable[[int, int, int], Topology]] = {
    "complete": lambda seed, local_size, sides: Complete(),
    "ring": lambda seed, local_size, sides: Ring(sides),
    "star": lambda seed, local_size, sides: Star(),
    "torus_2d": lambda seed, local_size, sides: Torus2D(),
    "hypercube": lambda seed, local_size, sides: Hypercube(),
    "static_exponential": lambda seed, local_size, sides: StaticExponential(),
    "random_pair": lambda seed, local_size, sides: RandomPair(seed),
    "one_peer_exponential": lambda seed, local_size, sides: OnePeerExponential(),
    "hierarchical": lambda seed, local_size, sides: Hierarchical(local_size),
}

_OPTIONS: dict[str, dict[str, type]] = {"ring": {"neighbors_each_side": int}, "hierarchical": {"local_size": int}}


def names() -> tuple[str, ...]:
    """The names `build` knows: all but those that are made from a list, a matrix or a graph."""
    return tuple(_BUILDERS)


def options(name: str) -> Mapping[str, type]:
    """Those of `build` that the topology of a name takes, and what they are."""
    return _OPTIONS.get(name, {})


def build(name: str, seed: int = 0, local_size: int = 2, neighbors_each_side: int = 1) -> Topology:
    """The topology of a name.

    Args:
        name: one of `names()`.
        seed: of random ones.
        local_size: learners a host, of `hierarchical`, which has `OnePeerExponential` between the hosts.
        neighbors_each_side: of `ring`.

    Raises:
        ValueError: there is no such name, or no such topology; the message has the nearest one, or all.
    """
    if name not in _BUILDERS:
        raise ValueError(f"unknown topology {name!r}: {suggest(name, names())}")
    return _BUILDERS[name](seed, local_size, neighbors_each_side)
