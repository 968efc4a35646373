"""Exact diffusion and D2: gossip that reaches the minimum of the whole loss where learners have different data."""

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from ddpcore.options.typed import typed
from ddpcore.strategies.base import Strategy, Traits, check_mixable, topology_of
from ddpcore.strategies.learner import Learner
from ddpcore.topology.base import Topology
from ddpcore.topology.regular import Ring
from ddpcore.topology.rounds import TOLERANCE, is_symmetric
from ddpcore.topology.wrapped import Damped


class ExactDiffusion(Strategy):
    r"""Exact diffusion (Yuan et al. 2019), and D2 (Tang et al. 2018): gossip without the bias of uneven data.

    ``psi_j(t) = w_j(t) - a g_j(w_j(t))``, the weights after the optimizer's step;
    ``w_j(t+1) = sum_k V_jk (psi_k(t) + w_k(t) - psi_k(t-1))``, with ``psi(-1) = w(0)``.

    V is ``(I + W) / 2``, or with ``lazy=False`` W itself, which is D2:
    ``w(t+1) = W (2 w(t) - w(t-1) - a g(t) + a g(t-1))``.

    It is computed by the correction ``c(t) = w(t) - psi(t-1)``, which is zero at first:
    ``x = psi + c``;  ``d_j = sum_k V_jk (x_k - x_j)``;  ``c <- c + d``;  ``w <- x + d``. The corrections
    of all learners sum to zero. In float32 the equation above would add up rounding errors of the size of the weights.

    The only fixed point is the minimum of the mean loss, with equal weights on all learners, as long as the optimizer's
    step is linear in past gradients: SGD, with or without momentum. With another rule, such as Adam's, the fixed point
    is where the learners' *steps* add up to zero, which is another point. Take :class:`GradientTracking` there.

    A disagreement that W multiplies by l follows the roots of ``z^2 - 2 v z + v``, with v the eigenvalue of V. They
    are inside the unit circle if v > -1/3. This needs a symmetric W that is the same at every step.

    The equations are those in the source of BlueFog's example ``pytorch_optimization.py``. The papers were not read.
    D2's equation is as others cite it, and a test shows that it is exact diffusion with V = W.

    Args:
        topology: W, with period 1; None is ``Ring()``.
        lazy: whether V is ``(I + W) / 2``, which is stable for every symmetric W.

    ValueError: an option has another type.
    """

    name: ClassVar[str] = "exact_diffusion"
    traits: ClassVar[Traits] = Traits(
        no_deaths="the corrections of a learner that dies are missing in the sum over learners, so the others would "
        "rest elsewhere: take on_failure='raise', or dpsgd"
    )
    topology: Topology
    _mixing: Topology

    def __init__(self, topology: Topology | None = None, *, lazy: bool = True) -> None:
        self.topology = topology_of(self.name, topology, Ring)
        self.lazy = typed("exact_diffusion: lazy", lazy, bool)
        self._mixing = Damped(self.topology, 0.5) if self.lazy else self.topology  # V
        self._correction_LP: Tensor | None = None  # c

    def __repr__(self) -> str:
        return f"ExactDiffusion({self.topology!r}, lazy={self.lazy})"

    @override
    def setup(self, num_learners: int, dtype: torch.dtype) -> None:
        check_mixable(self.name, dtype, "differences of weights are")
        self.topology.validate(num_learners)
        if self.topology.period(num_learners) != 1:
            what = f"exact_diffusion: {self.topology!r} changes from step to step, which may diverge"
            raise ValueError(f"{what}: take a fixed topology (ring), or gradient_tracking")
        mixing = self._mixing.mixing_matrix(0, num_learners)
        if not is_symmetric(mixing):
            what = f"exact_diffusion: {self.topology!r} of {num_learners} learners is not symmetric, which may diverge"
            raise ValueError(f"{what}: take ring, or gradient_tracking")
        least = float(np.linalg.eigvalsh(mixing.dense())[0])
        if least <= -1 / 3 + TOLERANCE:
            what = f"the least eigenvalue of {self.topology!r} with {num_learners} learners is {least:.3g}"
            why = "and lazy=False (D2) diverges unless it is above -1/3"
            raise ValueError(f"exact_diffusion: {what}, {why}: take lazy=True")

    @override
    def after_step(self, learner: Learner) -> None:
        """Correct psi, and average."""
        weights_LP = learner.flat.param_LP
        if self._correction_LP is None:
            self._correction_LP = torch.zeros_like(weights_LP)
        weights_LP += self._correction_LP
        learner.check_sent()
        differences_LP = learner.comm.exchange(weights_LP, self._mixing, learner.step - 1).differences(weights_LP)
        self._correction_LP += differences_LP
        weights_LP += differences_LP

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"correction": self._correction_LP}

    @override
    def load_state_dict(self, learner: Learner, state: dict[str, Any]) -> None:
        self._correction_LP = state["correction"]
