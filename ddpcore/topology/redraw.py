"""A topology over the learners that are left when some have died, or over more of them."""

from __future__ import annotations

from ddpcore.topology.base import Topology
from ddpcore.topology.regular import Ring
from ddpcore.topology.rounds import Round


def redrawn(topology: Topology, num_learners: int, *, push_sum: bool = False) -> Topology:
    """The topology for another number of learners: itself if it is valid for so many, otherwise ``Ring()``.

    A topology is a function of the number of learners, so most of them fit any number. ``Hypercube``, ``Torus2D``,
    ``Hierarchical`` and given graphs and matrices do not. The ring fits every number, is doubly stochastic, and never
    changes.

    Args:
        topology: as it was chosen for the run.
        num_learners: how many learners are left. They are numbered from 0, in the order of their ids.
        push_sum: whether only the columns of W must sum to one.
    """
    try:
        topology.validate(num_learners, push_sum=push_sum)
    except ValueError:
        return Ring()
    return topology


def of_members(round_: Round, members: tuple[int, ...]) -> Round:
    """The round of positions as a round of ids: position i is ``members[i]``, and ids ascend."""
    sources = tuple(members[source] for source in round_.sources)
    return Round(round_.self_weight, sources, round_.weights, tuple(members[reader] for reader in round_.destinations))
