"""Whether a topology is sound."""

import pickle
from collections.abc import Iterable
from contextlib import suppress
from functools import reduce

import numpy as np

from ddpcore import Topology

RANDOM_STEPS = 32  # of a topology without a period


def check_topology(topology: Topology, *, num_learners: Iterable[int] = range(1, 17), push_sum: bool = False) -> None:
    """Check the rounds of a topology for several numbers of learners.

    The rounds of a step agree with each other (j reads from i exactly if i sends to j), weights are not negative, rows
    and columns of the mixing matrix W sum to one, and the edges of a period connect all learners. A round is a pure
    function of step, rank and number of learners. ``period`` and ``spectral_gap`` say what the matrices say.

    Args:
        num_learners: numbers to try. Those for which ``round`` raises ValueError are left out.
        push_sum: only columns must sum to one, for :class:`ddpcore.PushSum`.

    AssertionError: something is wrong; one line says what, and for how many learners.
    """
    name = type(topology).__name__
    if pickle.loads(pickle.dumps(topology)) != topology or hash(topology) != hash(pickle.loads(pickle.dumps(topology))):
        raise AssertionError(f"{name}: a copy is not equal to it: make it a frozen dataclass")
    supported = []
    for count in num_learners:
        with suppress(ValueError):
            topology.round(0, 0, count)
            supported.append(count)
    if not supported:
        raise AssertionError(f"{name}: it supports none of the numbers of learners that were tried")
    for count in supported:
        where = f"{name} of {count} learners"
        try:
            topology.validate(count, push_sum=push_sum)
        except ValueError as error:
            raise AssertionError(f"{where}: {error}") from error
        steps = range(topology.period(count) or RANDOM_STEPS)
        rounds = [topology.rounds(step, count) for step in steps]
        for step in reversed(steps):
            if pickle.loads(pickle.dumps(topology)).rounds(step, count) != rounds[step]:
                raise AssertionError(f"{where}: two calls of round({step}, ...) differ: draw by (seed, step)")
        if topology.period(count) is None:
            continue
        for step in steps:
            later = step + len(steps)
            if topology.rounds(later, count) != rounds[step]:
                raise AssertionError(f"{where}: period is {len(steps)} and the rounds of step {later} are others")
        if not push_sum:
            _check_gap(topology, count, where)


def _check_gap(topology: Topology, count: int, where: str) -> None:
    """The gap against the singular values of the product of one period's matrices."""
    period = topology.period(count) or 0
    product = reduce(np.matmul, [topology.matrix(step, count) for step in reversed(range(period))])
    second = np.linalg.svd(product - 1 / count, compute_uv=False)[0]
    expected = 1.0 if second < 1e-12 * count else max(0.0, 1.0 - float(second) ** (1 / period))
    gap = topology.spectral_gap(count)
    if abs(gap - expected) > 1e-6:
        raise AssertionError(f"{where}: spectral_gap is {gap:.6g}, the matrices have {expected:.6g}: see translations")
