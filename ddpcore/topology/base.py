"""The interface of a topology, and what follows from its rounds."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import is_dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ddpcore.topology import rounds as of_step
from ddpcore.topology.rounds import MixingMatrix, Round, Vector

Matrix = npt.NDArray[np.float64]
"""A mixing matrix W, float64 [n, n]: W[j, k] is the weight that learner j gives to learner k."""

RANDOM_STEPS = 32
"""Steps of a random topology that are checked and described. The union of so many random matchings is connected: with
four learners, the worst case, this fails for one seed in 3^31."""


class Topology(ABC):
    """An immutable value, compared by its fields, that is valid for several numbers of learners n."""

    @abstractmethod
    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """The round of learner `rank` at `step`, both counted from 0; the cost is linear in the degree.

        A pure function: any process can compute the round of any learner at any step. ValueError if there is no such
        rank or step, or the topology does not support this number of learners.
        """

    @abstractmethod
    def period(self, num_learners: int) -> int | None:
        """The number of steps after which the rounds repeat; None for a random topology."""

    def translations(self, num_learners: int) -> tuple[int, ...] | None:
        """The shape of a periodic grid on which W is a convolution (all learners do the same), or None.

        Learners are numbered row by row. The eigenvalues of W are then the Fourier transform of its first row.
        """
        return None

    def kept_weights(self, num_learners: int) -> Vector | None:
        """How much each learner counts in the mean that averages keep, float64 [n] with mean 1; None: all alike."""
        return None

    def stage(self, step: float) -> "Topology":
        """The topology of a step without schedules: with their stages in it, otherwise itself."""
        stages = {name: one.stage(step) for name, one in vars(self).items() if isinstance(one, Topology)}
        if stages.items() <= vars(self).items():
            return self
        if is_dataclass(self):
            return replace(cast(Any, self), **stages)
        vars(one := copy(self)).update(stages)
        return one

    def measured(self, num_learners: int) -> "Topology":
        """The topology whose gap and period measure this one: the last stage of a schedule, otherwise itself."""
        return self.stage(math.inf)

    def check_run(self, num_steps: int) -> None:
        """Raise ValueError if the topology has a schedule that goes past the end of a run of so many steps."""
        for one in vars(self).values():
            if isinstance(one, Topology):
                one.check_run(num_steps)

    def rounds(self, step: int, num_learners: int) -> list[Round]:
        """The rounds of all learners at a step."""
        check(step, 0, num_learners)
        return [self.round(step, rank, num_learners) for rank in range(num_learners)]

    def mixing_matrix(self, step: int, num_learners: int) -> MixingMatrix:
        """The mixing matrix W of a step in compressed rows, [n, n]; the cost is linear in the edges."""
        return of_step.mixing_matrix(self.rounds(step, num_learners))

    def matrix(self, step: int, num_learners: int) -> Matrix:
        """The mixing matrix W of a step as an array, float64 [n, n]."""
        return self.mixing_matrix(step, num_learners).dense()

    def spectral_gap(self, num_learners: int) -> float:
        """How fast learners agree, in [0, 1]: 0 is never, 1 is after one period. 1.0 for one learner.

        - Period T, W doubly stochastic: 1 - sigma_2(W_{T-1} ... W_0)^(1/T), with the second singular value sigma_2. A
          step multiplies the distance from the mean by 1 - gap, on average over a period.
        - Period T, only columns sum to one: the same with the modulus of the second eigenvalue, which is the asymptotic
          rate of push-sum.
        - Random: 1 - lambda_2(E[W^T W]). A step multiplies the expected *squared* distance by 1 - gap (Boyd et al.
          2006, "Randomized gossip algorithms"). E is the mean of the first 256 steps where no formula is known.
        - With weights of learners: the same with weighted distances.

        Computed by a Fourier transform if there are `translations`, else with dense matrices: the cost is cubic in n.
        """
        check(0, 0, num_learners)
        if (measured := self.measured(num_learners)) is not self:
            return measured.spectral_gap(num_learners)
        if num_learners == 1:
            return 1.0
        period, kept = self.period(num_learners), self.kept_weights(num_learners)
        if period is None or kept is not None:
            steps = range(8 * RANDOM_STEPS if period is None else period)
            weights = np.ones(num_learners) if kept is None else kept
            matrices = [self.matrix(step, num_learners) for step in steps]
            return of_step.weighted_gap(matrices, weights, is_random=period is None)
        if (shape := self.translations(num_learners)) is not None:
            firsts = [self.round(step, 0, num_learners) for step in range(period)]
            eigenvalues = of_step.grid_eigenvalues([of_step.first_row(turn, shape) for turn in firsts])
            shrunk = float(abs(eigenvalues[1:]).max())  # convolutions commute and are normal matrices
        else:
            shrunk = of_step.contraction([self.mixing_matrix(step, num_learners) for step in range(period)])
        rounding = num_learners * float(np.finfo(np.float64).eps)  # its T-th root would not be small
        return 1.0 if shrunk <= rounding else max(0.0, 1.0 - shrunk ** (1 / period))

    def validate(self, num_learners: int, *, push_sum: bool = False) -> None:
        """Check all rounds of a period (of a random topology, of the first 32 steps).

        Weights are non-negative, rows and columns of W sum to one, j reads from i exactly if i sends to j, and the
        union of the edges leads from every learner to every other. ValueError otherwise. With weights of learners p,
        columns hold ``sum_j p_j W[j, k] = p_k`` instead.

        Args:
            push_sum: only columns need to sum to one. Averages over such a W converge to a weighted mean of the
                learners; push-sum divides by these weights.
        """
        check(0, 0, num_learners)
        period, kept = self.period(num_learners), self.kept_weights(num_learners)
        name, matrices = type(self).__name__, []
        for step in range(RANDOM_STEPS if period is None else period):
            rounds = self.rounds(step, num_learners)
            of_step.check_exchange(name, step, rounds)
            mixing = of_step.mixing_matrix(rounds)
            of_step.check_weights(name, mixing, push_sum=push_sum, kept=kept)
            matrices.append(mixing)
        of_step.check_connected(name, matrices)


def checked_weights(name: str, given: object, *, zeros: bool = False) -> tuple[float, ...]:
    """Weights of learners as numbers. ValueError: one is not above 0; with ``zeros``, one is below 0, or all are 0."""
    try:
        weights = tuple(map(float, given))  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise ValueError(f"{name}: weights are {given!r}: give a number for each learner") from None
    if not all(0 < weight < math.inf or (zeros and weight == 0) for weight in weights) or not any(weights):
        what = "at least one must be above 0, and none below" if zeros else "each must be above 0"
        raise ValueError(f"{name}: weights are {list(weights)}: {what}")
    return weights


def relative(name: str, weights: Sequence[float], num_learners: int) -> Vector | None:
    """The weights of n learners divided by their mean, float64 [n]; None if all are equal.

    ValueError: there are not n.
    """
    if len(weights) != num_learners:
        raise ValueError(f"{name}: there are {len(weights)} weights and {num_learners} learners: give one to each")
    return np.array(weights) / (math.fsum(weights) / num_learners) if len(set(weights)) > 1 else None


def check(step: int, rank: int, num_learners: int) -> None:
    """ValueError unless there are such a step, rank and number of learners."""
    if num_learners < 1:
        raise ValueError(f"num_learners is {num_learners}, it must be at least 1")
    if not 0 <= rank < num_learners:
        raise ValueError(f"rank is {rank}, it must be from 0 to {num_learners - 1} with {num_learners} learners")
    if step < 0:
        raise ValueError(f"step is {step}, it must be at least 0")
