"""What a topology costs and how fast it averages, in numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ddpcore.topology import spectrum
from ddpcore.topology.base import RANDOM_STEPS, Topology, check
from ddpcore.topology.rounds import TOLERANCE, first_row, mixing_matrix


@dataclass(frozen=True, kw_only=True)
class Description:
    """A topology over n learners. Of a random one, edges, degrees and messages are those of its first 32 steps.

    Attributes:
        num_learners: n.
        period: steps after which the rounds repeat; None: random.
        num_edges: directed edges (k, j), k sends to j, of all steps together.
        degree_min, degree_mean, degree_max: learners that one sends to at a step.
        messages_per_step: of all learners together, each of the size of the model: n * degree_mean.
        models_sent_per_step: bytes that a learner sends at a step, on average, over the bytes of the model. A
            bandwidth-optimal all-reduce sends 2 (n - 1) / n.
        doubly_stochastic: rows and columns of W sum to one; else columns alone do, and only push-sum averages.
        spectral_gap: see `Topology.spectral_gap`.
        epsilon: what `mixing_time` shrinks the distance to.
        mixing_time: whole periods, in steps, until the distance of any start from its mean is at most epsilon of what
            it was; random: until that holds of the root of the expected square; only columns sum to one: in the long
            run, at the rate of the second eigenvalue. Infinite where the gap is zero.
        smallest_eigenvalue: of W where it is symmetric and the same at every step, else None. On a loss of curvature h,
            average-while-computing at a learning rate lr stays bounded only while lr * h < 1 + smallest_eigenvalue.
    """

    num_learners: int
    period: int | None
    num_edges: int
    degree_min: int
    degree_mean: float
    degree_max: int
    messages_per_step: float
    models_sent_per_step: float
    doubly_stochastic: bool
    spectral_gap: float
    epsilon: float
    mixing_time: float
    smallest_eigenvalue: float | None


def describe(topology: Topology, num_learners: int, *, epsilon: float = 1 / math.e) -> Description:
    """Measure a topology; linear in its edges, or in those of learner 0 where all learners are alike.

    Args:
        topology: any.
        num_learners: n.
        epsilon: between 0 and 1.

    Raises:
        ValueError: epsilon is not, or the topology does not fit so many learners.
        RuntimeError: see `Topology.spectral_gap`.
    """
    check(0, 0, num_learners)
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon is {epsilon}, it must be between 0 and 1")
    period = topology.period(num_learners)
    shape = topology.translations(num_learners)
    edges: set[tuple[int, int]] = set()
    degrees: list[int] = []
    doubly_stochastic = True
    for step in range(RANDOM_STEPS if period is None else period):
        rounds = topology.rounds(step, num_learners) if shape is None else [topology.round(step, 0, num_learners)]
        edges.update((rank, reader) for rank, turn in enumerate(rounds) for reader in turn.destinations)
        degrees += [len(turn.destinations) for turn in rounds]
        # Where all learners are alike, a column has the entries of a row.
        doubly_stochastic &= shape is not None or spectrum.is_doubly_stochastic(mixing_matrix(rounds))
    mean = math.fsum(degrees) / len(degrees)
    gap = topology.spectral_gap(num_learners)
    return Description(
        num_learners=num_learners,
        period=period,
        num_edges=len(edges) * (1 if shape is None else num_learners),
        degree_min=min(degrees),
        degree_mean=mean,
        degree_max=max(degrees),
        messages_per_step=mean * num_learners,
        models_sent_per_step=mean,
        doubly_stochastic=doubly_stochastic,
        spectral_gap=gap,
        epsilon=epsilon,
        mixing_time=_mixing_time(gap, period, epsilon) if num_learners > 1 else 0,
        smallest_eigenvalue=_smallest_eigenvalue(topology, num_learners) if period == 1 else None,
    )


def _mixing_time(gap: float, period: int | None, epsilon: float) -> float:
    """The least multiple t of the period with (1 - gap)^t <= epsilon; of a random topology, <= epsilon^2."""
    if gap <= 0:
        return math.inf
    steps = 1 if period is None else period
    if gap >= 1:
        return steps
    target = math.log(epsilon) * (2 if period is None else 1)
    whole = target / (steps * math.log1p(-gap))
    return steps * math.ceil(whole * (1 - 1e-12))  # that rounding adds no period where a whole number is met


def _smallest_eigenvalue(topology: Topology, num_learners: int) -> float | None:
    """Of the one matrix of a static topology; None where it is not symmetric."""
    shape = topology.translations(num_learners)
    if shape is not None:
        eigenvalues = spectrum.grid_eigenvalues(first_row(topology.round(0, 0, num_learners), shape))
        return float(eigenvalues.real.min()) if abs(eigenvalues.imag).max() <= TOLERANCE else None
    mixing = topology.sparse_matrix(0, num_learners)
    return spectrum.extreme_eigenvalue(mixing, "SA") if spectrum.is_symmetric(mixing) else None
