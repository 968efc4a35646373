"""Topologies made of others: damped, slowed, by a schedule, between hosts, or over other numbers of learners."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from ddpcore.options.typed import check_range
from ddpcore.topology.base import Topology, check, checked_weights, relative
from ddpcore.topology.pairs import RandomPair
from ddpcore.topology.regular import OnePeerExponential, Ring, Static
from ddpcore.topology.rounds import Round, Vector, uniform
from ddpcore.topology.schedule import Milestones


@dataclass(frozen=True)
class _Wrapped(Topology):
    """With the period and the grid of another topology."""

    topology: Topology

    @override
    def period(self, num_learners: int) -> int | None:
        return self.topology.period(num_learners)

    @override
    def translations(self, num_learners: int) -> tuple[int, ...] | None:
        return self.topology.translations(num_learners)

    @override
    def kept_weights(self, num_learners: int) -> Vector | None:
        return self.topology.kept_weights(num_learners)


@dataclass(frozen=True)
class Weighted(_Wrapped):
    """Averages that keep the weighted mean ``sum_j p_j w_j / sum_j p_j``, with Metropolis-Hastings weights.

        W[j, k] = min(V[j, k], V[k, j] p_k / p_j)    for j != k, and the rest of the row for j itself

    V is the matrix of another topology. Then ``p_j W[j, k] = p_k W[k, j]``: W is self-adjoint for p, rows sum to one,
    and the minimum that learners find together is the minimum of the loss ``sum_j p_j f_j`` (2511.19513 compares this
    with weighted losses). If p is the number of samples of a learner's batch, the loss is the mean over all samples.
    An edge in one direction only is left out. ValueError: a weight is not above 0; with n learners: there are not n.
    """

    weights: tuple[float, ...]  #: p, a number above 0 for each learner. If all are equal, W is V, of ``topology``.

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", checked_weights("Weighted", self.weights))

    @override
    def round(self, step: int, rank: int, num_learners: int) -> Round:
        whole = self.topology.round(step, rank, num_learners)
        if self.kept_weights(num_learners) is None:
            return whole
        kept = {}
        for source, weight in zip(whole.sources, whole.weights, strict=True):
            theirs = self.topology.round(step, source, num_learners)
            if rank in theirs.sources:
                back = theirs.weights[theirs.sources.index(rank)] * (self.weights[source] / self.weights[rank])
                kept[source] = min(weight, back)
        lost = [weight - kept.get(source, 0.0) for source, weight in zip(whole.sources, whole.weights, strict=True)]
        return Round(whole.self_weight + math.fsum(lost), tuple(kept), tuple(kept.values()), tuple(kept))

    @override
    def translations(self, num_learners: int) -> None:
        return None  # learners differ

    @override
    def measured(self, num_learners: int) -> Topology:
        weighted = self.kept_weights(num_learners) is not None
        return super().measured(num_learners) if weighted else self.topology.measured(num_learners)

    @override
    def kept_weights(self, num_learners: int) -> Vector | None:
        return relative("Weighted", self.weights, num_learners)


@dataclass(frozen=True)
class Damped(_Wrapped):
    """``(1 - c) I + c W``: a learner keeps the share 1 - c of its weights, and averages the rest.

    With c = 1/2 every eigenvalue of a symmetric W moves from [-1, 1] to [0, 1].
    """

    share: float  # c, from 0 to 1

    def __post_init__(self) -> None:
        check_range("Damped: share", self.share, least=0, most=1)

    @override
    def round(self, step: int, rank: int, num_learners: int) -> Round:
        whole = self.topology.round(step, rank, num_learners)
        weights = tuple(self.share * weight for weight in whole.weights)
        return Round(1 - self.share + self.share * whole.self_weight, whole.sources, weights, whole.destinations)


@dataclass(frozen=True)
class Slowed(_Wrapped):
    """Of learners that average once a round, whose number ``rounds_of`` gives for a step. Milestones stay steps."""

    rounds_of: Callable[[int], int]

    @override
    def round(self, step: int, rank: int, num_learners: int) -> Round:
        return self.topology.stage(step).round(self.rounds_of(step), rank, num_learners)

    @override
    def period(self, num_learners: int) -> int | None:
        """1 if the other topology has period 1, else unknown."""
        return 1 if self.topology.period(num_learners) == 1 else None

    @override
    def validate(self, num_learners: int, *, push_sum: bool = False) -> None:
        self.topology.validate(num_learners, push_sum=push_sum)


@dataclass(frozen=True)
class Scheduled(Topology):
    """A topology from each milestone on: ``Scheduled([(0, Ring()), (600, Complete())])``.

    ``stages`` are pairs of the first step and the topology, or :class:`~ddpcore.Milestones`. ValueError: they are not.
    """

    stages: Any

    def __post_init__(self) -> None:
        if not isinstance(self.stages, Milestones):
            object.__setattr__(self, "stages", Milestones(self.stages, "stages"))
        for _, topology in self.stages.stages:
            if not isinstance(topology, Topology):
                raise ValueError(f"Scheduled: a stage has {topology!r}: pass an instance, such as ddpcore.Ring()")

    @override
    def round(self, step: int, rank: int, num_learners: int) -> Round:
        return self.stages(step).round(step, rank, num_learners)

    @override
    def period(self, num_learners: int) -> int | None:
        return None  # the first stages do not come again

    @override
    def validate(self, num_learners: int, *, push_sum: bool = False) -> None:
        for _, topology in self.stages.stages:
            topology.validate(num_learners, push_sum=push_sum)
            if topology.kept_weights(num_learners) is not None:
                raise ValueError("Scheduled: a stage has weights of learners: take Weighted(Scheduled(...), weights)")

    @override
    def stage(self, step: float) -> Topology:
        return self.stages(step).stage(step)

    @override
    def check_run(self, num_steps: int) -> None:
        self.stages.check_run("strategy.topology", num_steps)


@dataclass(frozen=True)
class WithinGroups(Static):
    """Each learner averages with all of its group of ``size`` consecutive learners. It joins no groups."""

    size: int

    @override
    def round(self, step: int, rank: int, num_learners: int) -> Round:
        first = rank - rank % self.size
        return uniform(*[[other for other in range(first, first + self.size) if other != rank]] * 2)


@dataclass(frozen=True)
class BetweenGroups(Topology):
    """Groups of ``size`` consecutive learners average as the learners of another topology do.

    ``W = V (x) I``: the learner at place i of a group averages with the learners at this place of other groups, with
    the weights V of the other topology. Members of a group hold the same rows, so V gives the measurements.
    """

    size: int
    between: Topology

    def num_groups(self, num_learners: int) -> int:
        """n / k. ValueError: k is no divisor of n."""
        if num_learners % self.size:
            raise ValueError(f"group is {self.size} of {num_learners} learners: take a divisor of {num_learners}")
        return num_learners // self.size

    @override
    def round(self, step: int, rank: int, num_learners: int) -> Round:
        check(step, rank, num_learners)
        group, place = divmod(rank, self.size)
        turn = self.between.round(step, group, self.num_groups(num_learners))
        both = (turn.sources, turn.destinations)
        sources, readers = (tuple(other * self.size + place for other in others) for others in both)
        return Round(turn.self_weight, sources, turn.weights, readers)

    @override
    def period(self, num_learners: int) -> int | None:
        return self.between.period(self.num_groups(num_learners))

    @override
    def kept_weights(self, num_learners: int) -> Vector | None:
        kept = self.between.kept_weights(self.num_groups(num_learners))
        return None if kept is None else kept.repeat(self.size)

    @override
    def validate(self, num_learners: int, *, push_sum: bool = False) -> None:
        self.between.validate(self.num_groups(num_learners), push_sum=push_sum)

    @override
    def spectral_gap(self, num_learners: int) -> float:
        return self.between.spectral_gap(self.num_groups(num_learners))


@dataclass(frozen=True)
class Hierarchical(Topology):
    """Complete inside each host of `local_size` learners; learners of equal local rank follow `between` across hosts.

    With V the matrix of `between` over the hosts and l the local size, learner i of host g takes the mean of its host
    with weight V[g, g], and learner i of each host h that g reads from with weight V[g, h]:

        W = diag(V) (x) J / l + (V - diag(V)) (x) I          (x): Kronecker product, J [l, l] all ones

    W is doubly stochastic because V is: a row of W sums to V[g, g] + sum over h of V[g, h], and so does a column. Each
    learner sends a message between hosts for each edge of V, and l - 1 messages inside its host. W acts on the means of
    hosts as V, and on deviations from them as V - diag(V), so the gap is the smaller of the two gaps.

    Host g has the l learners from g * l on, as torchrun numbers them. ValueError unless the number of learners is a
    multiple of `local_size` and `between` supports the number of hosts.
    """

    local_size: int
    between: Topology = OnePeerExponential()

    def __post_init__(self) -> None:
        check_range("Hierarchical: local_size", self.local_size, least=1)

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """All learners of the host, and the learners of the same local rank on other hosts."""
        check(step, rank, num_learners)
        num_hosts, size = self._num_hosts(num_learners), self.local_size
        host, local_rank = divmod(rank, size)
        turn = self.between.round(step, host, num_hosts)
        share = turn.self_weight / size
        same_host = set(range(host * size, host * size + size)) - {rank} if share > 0 else set()
        weights = dict.fromkeys(same_host, share)
        weights |= {other * size + local_rank: weight for other, weight in zip(turn.sources, turn.weights, strict=True)}
        sources = tuple(sorted(weights))
        destinations = same_host | {other * size + local_rank for other in turn.destinations}
        return Round(share, sources, tuple(weights[source] for source in sources), tuple(sorted(destinations)))

    def period(self, num_learners: int) -> int | None:
        """The period of `between`."""
        return self.between.period(self._num_hosts(num_learners))

    def translations(self, num_learners: int) -> tuple[int, ...] | None:
        """The grid of the hosts, with a cycle of local ranks as the last dimension."""
        shape = self.between.translations(self._num_hosts(num_learners))
        return None if shape is None else (*shape, self.local_size)

    def spectral_gap(self, num_learners: int) -> float:
        """In closed form for `RandomPair`: inside a host, a pair multiplies the squared deviation by a quarter.

        With k partners, each there with probability p, by at most (k p + k (k - 1) p^2) / (k + 1)^2.
        """
        check(0, 0, num_learners)
        num_hosts = self._num_hosts(num_learners)
        if not isinstance(self.between, RandomPair):
            return super().spectral_gap(num_learners)
        k, p = self.between.num_partners, (num_hosts - num_hosts % 2) / num_hosts
        inside = (k * p + k * (k - 1) * p**2) / (k + 1) ** 2 if self.local_size > 1 else 0.0
        return min(self.between.spectral_gap(num_hosts), 1.0 - inside)

    def _num_hosts(self, num_learners: int) -> int:
        num_hosts, rest = divmod(num_learners, self.local_size)
        if rest:
            text = f"Hierarchical: {num_learners} learners are no multiple of local_size {self.local_size}"
            raise ValueError(f"{text}: take hosts of equal size")
        return num_hosts


def redrawn(topology: Topology, num_learners: int, *, push_sum: bool = False) -> Topology:
    """The topology for another number of learners: itself if it is valid for so many, otherwise ``Ring()``.

    Most topologies fit any number. ``Hypercube``, ``Torus2D``, ``Hierarchical`` and given graphs and matrices do not.
    The ring fits every number and is doubly stochastic. Learners are numbered from 0, in the order of their ids.
    """
    try:
        topology.validate(num_learners, push_sum=push_sum)
    except ValueError:
        return Ring()
    return topology
