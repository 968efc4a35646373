"""Hosts of several learners: complete inside a host, sparse between hosts."""

from __future__ import annotations

from dataclasses import dataclass

from ddpcore.topology.base import Topology, check
from ddpcore.topology.pairs import RandomPair
from ddpcore.topology.regular import OnePeerExponential
from ddpcore.topology.rounds import Round


@dataclass(frozen=True)
class Hierarchical(Topology):
    """Complete inside each host of `local_size` learners; between hosts another topology, by learners of one place.

    With V the matrix of `between` over the hosts and l the local size, learner i of host g takes V[g, g] of the mean of
    its host, and V[g, h] of learner i of each host h that g reads from:

        W = diag(V) (x) J / l + (V - diag(V)) (x) I          (x): Kronecker product, J [l, l] all ones

    Doubly stochastic because V is: a row of W sums to V[g, g] + sum over h of V[g, h], a column likewise. A message
    between hosts for each learner and edge of V, l - 1 inside. W acts on means of hosts as V, and on what differs from
    them inside a host as V - diag(V), so the gap is the smaller one of the two.

    Learners of host g are those from g * l on, as torchrun numbers them. ValueError unless the number of learners is a
    multiple of `local_size`, or where `between` has one.
    """

    local_size: int
    between: Topology = OnePeerExponential()

    def __post_init__(self) -> None:
        if self.local_size < 1:
            raise ValueError(f"Hierarchical: local_size is {self.local_size}, it must be at least 1")

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """Everyone of the host, and the learners of the same place on other hosts."""
        check(step, rank, num_learners)
        num_hosts, size = self._num_hosts(num_learners), self.local_size
        host, place = divmod(rank, size)
        turn = self.between.round(step, host, num_hosts)
        share = turn.self_weight / size
        mates = set(range(host * size, host * size + size)) - {rank} if share > 0 else set()
        weights = dict.fromkeys(mates, share)
        weights |= {other * size + place: weight for other, weight in zip(turn.sources, turn.weights, strict=True)}
        sources = tuple(sorted(weights))
        destinations = mates | {other * size + place for other in turn.destinations}
        return Round(share, sources, tuple(weights[source] for source in sources), tuple(sorted(destinations)))

    def period(self, num_learners: int) -> int | None:
        """That of the hosts."""
        return self.between.period(self._num_hosts(num_learners))

    def translations(self, num_learners: int) -> tuple[int, ...] | None:
        """Those of the hosts, and a cycle of places."""
        shape = self.between.translations(self._num_hosts(num_learners))
        return None if shape is None else (*shape, self.local_size)

    def spectral_gap(self, num_learners: int) -> float:
        """With `RandomPair` between the hosts, in closed form: inside a host a pair leaves a quarter of the square."""
        check(0, 0, num_learners)
        num_hosts = self._num_hosts(num_learners)
        if not isinstance(self.between, RandomPair):
            return super().spectral_gap(num_learners)
        inside = 0.25 * (num_hosts - num_hosts % 2) / num_hosts if self.local_size > 1 else 0.0
        return min(self.between.spectral_gap(num_hosts), 1.0 - inside)

    def _num_hosts(self, num_learners: int) -> int:
        num_hosts, rest = divmod(num_learners, self.local_size)
        if rest:
            raise ValueError(
                f"Hierarchical: {num_learners} learners are no multiple of local_size {self.local_size}: take hosts of "
                "equal size"
            )
        return num_hosts
