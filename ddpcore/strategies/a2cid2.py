"""A2CiD2: averages of pairs with momentum (Nabli, Belilovsky and Oyallon 2023, arXiv:2306.08289).

:class:`ddpcore.ADPSGD` has the equations: w_i are the weights x_i of a learner, and y_i their double. With ``R_ij``
meetings of i and j in a unit of time and the Laplacian ``L = diag(sum_j R_ij) - R``, of second-smallest eigenvalue
lambda_2 and pseudo-inverse L+,

    ``chi_1 = 1 / lambda_2``, ``chi_2 = max over edges of (e_i - e_j)^T L+ (e_i - e_j) / 2``,
    ``eta = 1 / (2 sqrt(chi_1 chi_2))``, ``alpha = sqrt(chi_1 / chi_2) / 2``.

Shapes: P elements of a learner's weights. A row is ``[2, P]``, x and y.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from ddpcore.comm.base import PairMean
from ddpcore.comm.reductions import chunk_of


class Acceleration(NamedTuple):
    """The two numbers of A2CiD2."""

    eta: float  #: how fast weights and double approach each other, per unit of time
    alpha: float  #: a meeting moves the double 2 alpha times as far as the weights. With 1/2 nothing is accelerated.


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
    chi_2 = float((own_N[:, None] + own_N - 2 * inverse_NN)[rates_NN > 0].max()) / 2
    return Acceleration(1 / (2 * math.sqrt(chi_1 * chi_2)), math.sqrt(chi_1 / chi_2) / 2)


class A2CiD2(PairMean):
    """What a meeting and the time between two meetings do to rows of weights and doubles."""

    num_copies = 2

    def __init__(self, acceleration: Acceleration) -> None:
        self.eta, self.alpha = acceleration

    @override
    @torch.no_grad()
    def drift_(self, row: Tensor, time: float) -> None:
        """Let x and y of a row ``[2, P]`` approach each other during ``time``."""
        share = -math.expm1(-2 * self.eta * time) / 2
        for weights, double in row.split(chunk_of(row[0]), dim=1):
            gap = double - weights
            weights.add_(gap, alpha=share)
            double.sub_(gap, alpha=share)

    @override
    def move_doubles_(self, own: Tensor, peer: Tensor, step: Tensor) -> None:
        gap = peer[0] - own[0]
        peer[1].sub_(gap, alpha=self.alpha)
        own[1].add_(gap, alpha=self.alpha).add_(step)

    @override
    @torch.no_grad()
    def apply_mean_(self, own: Tensor, mean: Tensor) -> None:
        """``x_j - x_i = 2 (mean - x_i)``."""
        own[1].add_(mean - own[0], alpha=2 * self.alpha)
        own[0].copy_(mean)
