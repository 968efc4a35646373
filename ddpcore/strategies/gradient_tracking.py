"""Gradient tracking: gossip of weights and of an estimate of the mean gradient."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from ddpcore.comm.base import Exchange
from ddpcore.strategies.base import Strategy, Traits, check_mixable, topology_of
from ddpcore.strategies.learner import Learner
from ddpcore.topology.base import Topology
from ddpcore.topology.describe import MOST_CHECKED
from ddpcore.topology.pairs import RandomPair


class GradientTracking(Strategy):
    r"""Gradient tracking, DIGing (Nedic, Olshevsky and Shi 2017): each learner follows the mean gradient of all.

    ``q_j(t) = sum_k W_jk(t) q_k(t-1) + g_j(t) - g_j(t-1)``, with q and g zero before the first step;
    ``w_j(t+1) = sum_k W_jk(t) w_k(t) - a q_j(t)``.

    The mean of q over learners is the mean gradient at every step. q replaces the gradient before the optimizer's step,
    so ``.grad`` holds q after it, and every optimizer steps along the mean gradient. Where the weights rest they are
    equal on all learners, and the mean gradient is zero: the minimum of the mean loss, also if the learners' minima
    differ, at a constant rate, with any optimizer, and with topologies that change from step to step.

    Weights and q travel in one message, twice as long as DPSGD's, while the gradient is computed. A small
    rate is needed: the step must be small compared with the spectral gap.

    Around Muon it tracks first and then orthogonalizes, as SUDA-Muon (2604.23980, abstract) and DeMuon (2510.01377)
    propose: orthogonalized steps do not commute with averages, so DPSGD around Muon rests elsewhere if the losses
    differ. DeMuon averages later: it has the same points of rest, and its steps are others.

    A gradient that is clipped before the step is tracked as it was clipped. Gradient scaling is refused, because an
    overflow or a new scale would stay in q.

    The equations are those in the source of BlueFog's example ``pytorch_optimization.py``. The paper was not read.

    Args:
        topology: W(t); None is ``RandomPair()``.
    """

    name: ClassVar[str] = "gradient_tracking"
    traits: ClassVar[Traits] = Traits(
        takes_closure=False,  # the gradient must be there before the step
        overlaps=True,
        no_deaths="the tracked gradients of a learner that dies are missing in the sum over learners, so "
        "the others would rest elsewhere: take on_failure='raise', or dpsgd",
    )
    topology: Topology

    def __init__(self, topology: Topology | None = None) -> None:
        self.topology = topology_of(self.name, topology, RandomPair)
        self._message_LX: Tensor | None = None  # w(t) and q, [L, 2 P]
        self._gradient_LP: Tensor | None = None  # g(t-1)
        self._exchange: Exchange | None = None

    def __repr__(self) -> str:
        return f"GradientTracking({self.topology!r})"

    @override
    def setup(self, num_learners: int, dtype: torch.dtype) -> None:
        check_mixable(self.name, dtype, "sums of gradients are")
        self.topology.validate(num_learners)
        period = self.topology.period(num_learners)
        if period is not None and num_learners <= MOST_CHECKED and self.topology.spectral_gap(num_learners) <= 1e-9:
            what = f"averages over {self.topology!r} never bring {num_learners} learners together (spectral gap 0)"
            raise ValueError(f"gradient_tracking: {what}: give each learner a part of its own weights")

    @override
    def before_forward(self, learner: Learner) -> None:
        """Start the exchange of w(t) and q(t-1), in the first forward pass of a step."""
        if self._exchange is not None:
            return
        weights_LP = learner.flat.param_LP
        if self._message_LX is None:
            self._gradient_LP = torch.zeros_like(weights_LP)
            self._message_LX = torch.cat([weights_LP, self._gradient_LP], dim=1)
        learner.check_sent()
        self._message_LX[:, : learner.flat.numel] = weights_LP
        self._exchange = learner.comm.exchange(self._message_LX, self.topology, learner.step)

    @override
    def before_step(self, learner: Learner) -> None:
        """Take the averages: ``w <- W w``, and ``W q + g - g_before`` for the gradient."""
        optimizer = learner.optimizer
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            why = "a gradient scaler is in use, and a scale or an overflow would stay in the tracked gradients"
            raise RuntimeError(f"gradient_tracking: {why}: train in bfloat16 or float32 without one")
        self.before_forward(learner)  # does nothing, unless the gradients were set without a forward pass
        assert self._exchange is not None and self._message_LX is not None and self._gradient_LP is not None
        flat, exchange, self._exchange = learner.flat, self._exchange, None
        exchange.mixture().apply_(self._message_LX)
        learner.check_unchanged()
        weights_LP, tracked_LP = self._message_LX.split(flat.numel, dim=1)
        if not flat.gather_grads():  # a learner without a gradient still follows the others' gradients
            for parameter, view in zip(flat.parameters, flat.grad_views, strict=True):
                parameter.grad = view
        tracked_LP += flat.grad_LP - self._gradient_LP
        self._gradient_LP.copy_(flat.grad_LP)
        flat.grad_LP.copy_(tracked_LP)
        flat.param_LP.copy_(weights_LP)

    @override
    def state_dict(self) -> dict[str, Any]:
        """The tracked and the last gradients, between two steps."""
        if self._message_LX is None or self._gradient_LP is None:
            return {"tracked": None, "gradient": None}
        return {"tracked": self._message_LX[:, self._gradient_LP.shape[1] :], "gradient": self._gradient_LP}

    @override
    def load_state_dict(self, learner: Learner, state: dict[str, Any]) -> None:
        if self._exchange is not None:
            self._exchange.abandon()
        self._exchange = self._message_LX = None
        self._gradient_LP = state["gradient"]
        if state["tracked"] is not None:
            self._message_LX = torch.cat([learner.flat.param_LP, state["tracked"]], dim=1)
