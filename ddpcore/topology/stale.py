"""A check that averages which arrive one step late still converge."""

from __future__ import annotations

import numpy as np

from ddpcore.topology.base import Topology
from ddpcore.topology.spectrum import is_symmetric

MOST_CHECKED = 256  # learners: the check computes eigenvalues of a dense matrix with twice as many rows


def check_stale(topology: Topology, num_learners: int) -> None:
    """ValueError if ``w(t+1) = w(t) + 1/2 (W(t-1) - I) w(t-1)`` does not reduce deviations from the mean.

    A symmetric W always does: for an eigenvalue l, deviations follow the roots of ``z^2 - z + (1-l)/2``, which are
    inside the unit circle for l in (-1, 1). This function checks any other W over its period, for up to 256 learners.
    """
    period = topology.period(num_learners)
    if period is None or num_learners > MOST_CHECKED:
        return
    matrices = [topology.mixing_matrix(step, num_learners) for step in range(period)]
    if all(map(is_symmetric, matrices)):
        return
    identity, none = np.eye(num_learners), np.zeros((num_learners, num_learners))
    differences = np.kron(np.eye(2), identity - 1 / num_learners)
    product = differences
    for mixing in matrices:
        late = (mixing.dense() - identity) / 2
        product = np.block([[identity, late], [identity, none]]) @ product
    radius = float(abs(np.linalg.eigvals(differences @ product)).max())
    if radius >= 1:
        raise ValueError(
            f"{topology!r} of {num_learners} learners with staleness 1 drives them apart (spectral radius "
            f"{radius:.3g} over {period} steps): take staleness 0, or a symmetric topology"
        )
