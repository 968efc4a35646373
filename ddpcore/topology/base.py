"""What a topology is: rounds, and what follows from them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

from ddpcore.topology import rounds as of_step
from ddpcore.topology import spectrum
from ddpcore.topology.rounds import Round

Matrix = npt.NDArray[np.float64]
"""A mixing matrix W, float64 [n, n]: W[j, k] is the weight that learner j gives to learner k."""

RANDOM_STEPS = 32
"""Steps of a random topology that stand for all. The union of so many random matchings is connected: that of four
learners, the worst case, fails to be for one seed in 3^31."""


class Topology(ABC):
    """An immutable value, compared by its fields, that fits many numbers of learners (one made from a graph: one)."""

    @abstractmethod
    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """What learner `rank` does at `step`, both counted from 0; the cost is linear in the degree.

        Any rank can ask for any step of any rank, in any order. ValueError if the rank or the number is impossible.
        """

    @abstractmethod
    def period(self, num_learners: int) -> int | None:
        """Steps after which the rounds repeat; None for a random topology."""

    def translations(self, num_learners: int) -> tuple[int, ...] | None:
        """The shape of a grid, wrapped around, on which every learner does the same as learner 0; None: there is none.

        Learners are numbered row by row. W is then a convolution, and its Fourier transform its eigenvalues.
        """
        return None

    def expected_square(self, num_learners: int) -> Matrix:
        """E[W^T W] of a random topology in closed form, float64 [num_learners, num_learners]."""
        raise NotImplementedError(f"{type(self).__name__} has no closed form of E[W^T W]")

    def rounds(self, step: int, num_learners: int) -> list[Round]:
        """The round of every learner."""
        check(step, 0, num_learners)
        return [self.round(step, rank, num_learners) for rank in range(num_learners)]

    def sparse_matrix(self, step: int, num_learners: int) -> csr_array:
        """The mixing matrix W of a step, compressed rows; W[j, k] = weight that j gives to k. Linear in the edges."""
        return of_step.mixing_matrix(self.rounds(step, num_learners))

    def matrix(self, step: int, num_learners: int) -> Matrix:
        """The same as an array, float64 [num_learners, num_learners]."""
        return np.asarray(self.sparse_matrix(step, num_learners).toarray())

    def spectral_gap(self, num_learners: int) -> float:
        """How fast learners agree, in [0, 1]: 0 never (some difference survives), 1 at once. 1.0 for one learner.

        With a period T and doubly stochastic W: 1 - sigma_2(W_{T-1} ... W_0)^(1/T), sigma_2 the second singular value:
        each step shrinks the distance from the mean by 1 - gap, on average over a period. If only columns sum to one:
        the same with the modulus of the second eigenvalue, the rate of push-sum in the long run. Random: 1 -
        lambda_2(E[W^T W]): each step shrinks the expected *squared* distance by 1 - gap (Boyd et al. 2006, "Randomized
        gossip algorithms").

        By Fourier transform where there are `translations`, else densely up to 512 learners and by Lanczos iteration
        above. RuntimeError where that does not converge: a product of rounds that mixes too slowly to tell.
        """
        check(0, 0, num_learners)
        if num_learners == 1:
            return 1.0
        period = self.period(num_learners)
        if period is None:
            deviation = self.expected_square(num_learners) - 1 / num_learners
            return min(1.0, 1.0 - float(np.linalg.eigvalsh(deviation)[-1]))
        shape = self.translations(num_learners)
        if shape is not None:
            firsts = [self.round(step, 0, num_learners) for step in range(period)]
            shrunk = spectrum.contraction_on_grid([of_step.first_row(turn, shape) for turn in firsts])
        else:
            shrunk = spectrum.contraction([self.sparse_matrix(step, num_learners) for step in range(period)])
        rounding = num_learners * float(np.finfo(np.float64).eps)  # whose T-th root would not be small
        return 1.0 if shrunk <= rounding else max(0.0, 1.0 - shrunk ** (1 / period))

    def validate(self, num_learners: int, *, push_sum: bool = False) -> None:
        """ValueError unless every step is a sound exchange and every learner hears of every other in time.

        Checked over a period: weights are non-negative, rows and columns of W sum to one, j reads from i exactly if i
        sends to j, and the union of the edges connects all learners, each to each. Of a random topology the first 32
        steps are checked.

        Args:
            num_learners: n.
            push_sum: only columns need to sum to one. Plain averages over such a W drift to a mean that counts some
                learners more than others; push-sum divides by what it counts them.
        """
        check(0, 0, num_learners)
        period = self.period(num_learners)
        name, union = type(self).__name__, csr_array((num_learners, num_learners))
        for step in range(RANDOM_STEPS if period is None else period):
            rounds = self.rounds(step, num_learners)
            of_step.check_exchange(name, step, rounds)
            mixing = of_step.mixing_matrix(rounds)
            of_step.check_weights(name, mixing, push_sum=push_sum)
            union = union + mixing
        of_step.check_connected(name, union)


def check(step: int, rank: int, num_learners: int) -> None:
    """ValueError unless there are such a step, rank and number."""
    if num_learners < 1:
        raise ValueError(f"num_learners is {num_learners}, it must be at least 1")
    if not 0 <= rank < num_learners:
        raise ValueError(f"rank is {rank}, it must be from 0 to {num_learners - 1} with {num_learners} learners")
    if step < 0:
        raise ValueError(f"step is {step}, it must be at least 0")
