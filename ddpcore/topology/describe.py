"""Measurements of a topology: its cost, how fast it averages, and whether late averages converge."""

import math
from dataclasses import dataclass

import numpy as np

from ddpcore.options.typed import check_range
from ddpcore.topology import rounds as of_step
from ddpcore.topology.base import RANDOM_STEPS, Topology, check
from ddpcore.topology.rounds import TOLERANCE, first_row, mixing_matrix

MOST_DRAWN = 64  # learners; a drawing of more shows nothing
MOST_CHECKED = 256  # learners: check_stale computes eigenvalues of a dense matrix with twice as many rows


@dataclass(frozen=True, kw_only=True)
class Description:
    """Numbers of a topology with n learners; edges, degrees and messages of a random one are of its first 32 steps."""

    num_learners: int  #: n
    period: int | None  #: steps after which the rounds repeat; None: random
    num_edges: int  #: directed edges (k, j), k sends to j, of all steps together
    degree_min: int  #: number of learners that a learner sends to at a step
    degree_mean: float
    degree_max: int
    messages_per_step: float  #: messages of all learners, each of the size of the model: n * degree_mean
    #: bytes that a learner sends at a step, on average, divided by the bytes of the model. A bandwidth-optimal
    #: all-reduce sends 2 (n - 1) / n.
    models_sent_per_step: float
    #: rows and columns of W sum to one; otherwise only columns do, and only push-sum averages, or averages keep a
    #: weighted mean of the learners
    doubly_stochastic: bool
    spectral_gap: float  #: see `Topology.spectral_gap`
    epsilon: float  #: the factor of `mixing_time`
    #: steps, in whole periods, until the distance from the mean is at most epsilon times the initial one, for any
    #: start. Random: the root of the expected squared distance. Only columns sum to one: asymptotically, at the rate of
    #: the second eigenvalue. Infinite if the gap is zero.
    mixing_time: float
    #: of W if it is symmetric and the same at every step, else None. On a loss of curvature h, average-while-computing
    #: at a learning rate lr stays bounded only while lr * h < 1 + smallest_eigenvalue.
    smallest_eigenvalue: float | None


def describe(topology: Topology, num_learners: int, *, epsilon: float = 1 / math.e) -> Description:
    """Measure a topology with n learners, at the cost of its edges and of `Topology.spectral_gap`.

    ValueError: epsilon is not between 0 and 1, or the topology does not support so many learners.
    """
    check(0, 0, num_learners)
    check_range("epsilon", epsilon, above=0, below=1)
    period = topology.period(num_learners)
    shape = topology.translations(num_learners)
    edges: set[tuple[int, int]] = set()
    degrees: list[int] = []
    doubly_stochastic = True
    for step in range(RANDOM_STEPS if period is None else period):
        rounds = topology.rounds(step, num_learners) if shape is None else [topology.round(step, 0, num_learners)]
        edges.update((rank, reader) for rank, turn in enumerate(rounds) for reader in turn.destinations)
        degrees += [len(turn.destinations) for turn in rounds]
        # On a grid a column of W has the same entries as a row.
        doubly_stochastic &= shape is not None or of_step.is_doubly_stochastic(mixing_matrix(rounds))
    mean = math.fsum(degrees) / len(degrees)
    gap, of_gap = topology.spectral_gap(num_learners), topology.measured(num_learners).period(num_learners)
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
        mixing_time=_mixing_time(gap, of_gap, epsilon) if num_learners > 1 else 0,
        smallest_eigenvalue=_smallest_eigenvalue(topology, num_learners) if period == 1 else None,
    )


def edges_of(topology: Topology, num_learners: int) -> list[tuple[int, int]]:
    """The directed edges (k, j), k sends to j, of all steps of a period, or of the first steps of a random topology."""
    period = topology.period(num_learners)
    return sorted({
        (rank, reader)
        for step in range(RANDOM_STEPS if period is None else period)
        for rank, turn in enumerate(topology.rounds(step, num_learners))
        for reader in turn.destinations
    })  # fmt: skip


def _mixing_time(gap: float, period: int | None, epsilon: float) -> float:
    """The least multiple t of the period with (1 - gap)^t <= epsilon; of a random topology, <= epsilon^2."""
    if gap <= 0:
        return math.inf
    steps = 1 if period is None else period
    if gap >= 1:
        return steps
    whole = math.log(epsilon) * (2 if period is None else 1) / (steps * math.log1p(-gap))
    return steps * math.ceil(whole * (1 - 1e-12))  # so that rounding does not add a period to a whole number


def _smallest_eigenvalue(topology: Topology, num_learners: int) -> float | None:
    """The smallest eigenvalue of the matrix of a static topology; None if it is not symmetric."""
    if (shape := topology.translations(num_learners)) is not None:
        eigenvalues = of_step.grid_eigenvalues([first_row(topology.round(0, 0, num_learners), shape)])
        return float(eigenvalues.real.min()) if abs(eigenvalues.imag).max() <= TOLERANCE else None
    mixing = topology.mixing_matrix(0, num_learners)
    return float(np.linalg.eigvalsh(mixing.dense())[0]) if of_step.is_symmetric(mixing) else None


def check_stale(topology: Topology, num_learners: int) -> None:
    """ValueError if ``w(t+1) = w(t) + 1/2 (W(t-1) - I) w(t-1)`` does not reduce deviations from the mean.

    A symmetric W always does: for an eigenvalue l, deviations follow the roots of ``z^2 - z + (1-l)/2``, which are
    inside the unit circle for l in (-1, 1). This function checks any other W over its period, for up to 256 learners.
    """
    period = topology.period(num_learners)
    if period is None or num_learners > MOST_CHECKED:
        return
    matrices = [topology.mixing_matrix(step, num_learners) for step in range(period)]
    if all(map(of_step.is_symmetric, matrices)):
        return
    identity, none = np.eye(num_learners), np.zeros((num_learners, num_learners))
    differences = np.kron(np.eye(2), identity - 1 / num_learners)
    product = differences
    for mixing in matrices:
        product = np.block([[identity, (mixing.dense() - identity) / 2], [identity, none]]) @ product
    radius = float(abs(np.linalg.eigvals(differences @ product)).max())
    if radius >= 1:
        what = f"{topology!r} of {num_learners} learners with staleness 1 drives them apart"
        speed = f"spectral radius {radius:.3g} over {period} steps"
        raise ValueError(f"{what} ({speed}): take staleness 0, or a symmetric topology")
