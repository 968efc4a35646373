"""The moves of live weights: a meeting of two learners, and what A2CiD2 adds to it.

A2CiD2 (Nabli, Belilovsky and Oyallon 2023, arXiv:2306.08289) gives the weights x_i of a learner a double y_i, which
begins as a copy. A meeting moves the weights and the double. Between meetings the two move towards each other:

- between events, during time t, ``x_i, y_i <- x_i + d (y_i - x_i), y_i + d (x_i - y_i)``, ``d = (1 - e^(-2 eta t))/2``;
- learners i and j meet: ``y_i <- y_i + alpha (x_j - x_i)``, ``x_i <- (x_i + x_j) / 2``, and the same for j;
- a step of the optimizer is added to both.

The sum of all x_i and y_i moves by the steps alone. With ``R_ij`` meetings of i and j in a unit of time and the
Laplacian ``L = diag(sum_j R_ij) - R``, of second-smallest eigenvalue lambda_2 and pseudo-inverse L+,

    ``chi_1 = 1 / lambda_2``, ``chi_2 = max over edges of (e_i - e_j)^T L+ (e_i - e_j) / 2``,
    ``eta = 1 / (2 sqrt(chi_1 chi_2))``, ``alpha = sqrt(chi_1 / chi_2) / 2``.

Shapes: P elements of a learner's weights. A row is ``[1, P]``, x alone, or ``[2, P]``, x and y.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ddpcore.comm.reductions import average_pair_, chunk_of


class Acceleration(NamedTuple):
    """The two numbers of A2CiD2.

    Attributes:
        eta: how fast weights and double approach each other, per unit of time.
        alpha: a meeting moves the double 2 alpha times as far as the weights. With 1/2 nothing is accelerated.
    """

    eta: float
    alpha: float


def acceleration_of(rates_NN: npt.NDArray[np.float64]) -> Acceleration:
    """Eta and alpha of A2CiD2, for a connected graph. One learner meets nobody, so both are 0.

    Args:
        rates_NN: symmetric; ``[i, j]`` is how often i and j meet in a unit of time, on average. Zeros on the diagonal.
    """
    num_learners = len(rates_NN)
    if num_learners == 1:
        return Acceleration(0.0, 0.0)
    laplacian_NN = np.diag(rates_NN.sum(axis=1)) - rates_NN
    chi_1 = 1 / float(np.linalg.eigvalsh(laplacian_NN)[1])
    # Adding J / n inverts the constants too, and differences of rows and columns do not see them.
    inverse_NN = np.linalg.inv(laplacian_NN + 1 / num_learners)
    own_N = np.diag(inverse_NN)
    resistances_NN = own_N[:, None] + own_N - 2 * inverse_NN
    chi_2 = float(resistances_NN[rates_NN > 0].max()) / 2
    return Acceleration(1 / (2 * math.sqrt(chi_1 * chi_2)), math.sqrt(chi_1 / chi_2) / 2)


@torch.no_grad()
def flow_(row: Tensor, eta: float, time: float) -> None:
    """Let x and y of a row ``[2, P]`` approach each other during ``time``."""
    share = -math.expm1(-2 * eta * time) / 2
    for weights, double in row.split(chunk_of(row[0]), dim=1):
        gap = double - weights
        weights.add_(gap, alpha=share)
        double.sub_(gap, alpha=share)


class Job(NamedTuple):
    """What a learner has done since it read its weights.

    Attributes:
        read: the weights that it read, ``[P]``.
        model: those of its model, ``[P]``: ``read`` plus the step of the optimizer.
    """

    read: Tensor
    model: Tensor

    def begin_next_(self, weights: Tensor) -> None:
        """Overwrite this job with the next one, which reads these weights."""
        self.model.copy_(weights)
        self.read.copy_(weights)


@torch.no_grad()
def meet_(own: Tensor, peer: Tensor | None, job: Job, alpha: float | None) -> None:
    """The meeting of two learners whose rows are here; then add the step of the job to the own row, and begin the next.

    Args:
        own: this learner's row.
        peer: that of another; None: no mean.
        job: of this learner.
        alpha: None for rows without a double.
    """
    size = chunk_of(job.model)
    for begin in range(0, len(job.model), size):
        end = begin + size
        piece, mine = Job(job.read[begin:end], job.model[begin:end]), own[:, begin:end]
        step = piece.model - piece.read
        if peer is None:
            mine.add_(step)
        else:
            theirs = peer[:, begin:end]
            if alpha is not None:
                gap = theirs[0] - mine[0]
                theirs[1].sub_(gap, alpha=alpha)
                mine[1].add_(gap, alpha=alpha).add_(step)
            average_pair_(theirs[0], mine[0])
            torch.add(theirs[0], step, out=mine[0])
        piece.begin_next_(mine[0])


@torch.no_grad()
def take_mean_(own: Tensor, mean: Tensor, alpha: float | None) -> None:
    """One side of a meeting, from the mean ``[P]`` of both x: ``x_j - x_i = 2 (mean - x_i)``."""
    if alpha is not None:
        own[1].add_(mean - own[0], alpha=2 * alpha)
    own[0].copy_(mean)
