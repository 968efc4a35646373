"""Push-sum gossip for directed graphs."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ddpcore.ops.dtypes import is_narrow
from ddpcore.strategies.base import Strategy, check_mixable, check_topology
from ddpcore.strategies.learner import Learner
from ddpcore.topology.base import Topology


class PushSum(Strategy):
    r"""Stochastic gradient push (Assran et al. 2019, algorithm 1): gossip where W need not be doubly stochastic.

    ``x_j(t+1) = sum_k P_jk(t) (x_k(t) - a g_k(z_k(t)))``, ``p_j(t+1) = sum_k P_jk(t) p_k(t)``, ``z_j = x_j / p_j``.

    Columns of P sum to one, so the sum of x is preserved; rows need not, so x alone drifts towards learners that hear
    more, and the push weight p says by how much. The model holds z at all times but inside the optimizer's step. The
    average of all learners is that of x, ``sum_j x_j / n = sum_j p_j z_j / sum_j p_j``: gradients alone move it.

    Args:
        topology: P(t); directed graphs are welcome.
    """

    name: ClassVar[str] = "push_sum"
    takes_closure: bool = False  # the gradient must be the one at the de-biased weights
    topology: Topology

    def __init__(self, topology: Topology) -> None:
        check_topology(self.name, topology)
        self.topology = topology
        self._push_weights: Tensor | None = None  # p of all learners, float64 [n]: it depends on P alone
        self._is_biased = False  # the flat buffer holds x

    def __repr__(self) -> str:
        return f"PushSum({self.topology!r})"

    def setup(self, num_learners: int, dtype: torch.dtype) -> None:
        """Check P against the number of learners, and the dtype."""
        check_mixable(self.name, dtype)
        self.topology.validate(num_learners, push_sum=True)
        if is_narrow(dtype):
            raise ValueError("push_sum: quotients lose too much in 16 bits: keep parameters in float32, use autocast")
        self._push_weights = torch.ones(num_learners, dtype=torch.float64)

    def before_step(self, learner: Learner) -> None:
        """From z back to x."""
        if not self._is_biased:
            learner.flat.param_LP.mul_(self._held(learner))
            self._is_biased = True

    def restore_weights(self, learner: Learner) -> None:
        """Back to z, where a step was given up."""
        if self._is_biased:
            learner.flat.param_LP.div_(self._held(learner))
            self._is_biased = False

    def after_step(self, learner: Learner) -> None:
        """Exchange x and p, and go on from z."""
        step = learner.step - 1
        learner.comm.mix_(learner.flat.param_LP, self.topology, step)
        self._push_weights = learner.shares = self._pushed(step)
        self.restore_weights(learner)

    def averages_weights_at(self, step: int) -> bool:
        """At every step."""
        return True

    def _held(self, learner: Learner) -> Tensor:
        """p of the learners held here, ``[L, 1]``, like the weights."""
        assert self._push_weights is not None
        held = self._push_weights[list(learner.comm.learners)]
        return held[:, None].to(learner.flat.param_LP)

    def _pushed(self, step: int) -> Tensor:
        """P p; every rank computes all of it, since P is known to all."""
        assert self._push_weights is not None
        matrix = self.topology.sparse_matrix(step, len(self._push_weights))
        return torch.from_numpy(matrix @ self._push_weights.numpy())

    def state_dict(self) -> dict[str, Any]:
        """The push weights."""
        return {"push_weights": self._push_weights}

    def load_state_dict(self, learner: Learner, state: dict[str, Any]) -> None:
        """See :class:`Strategy`."""
        self._push_weights = learner.shares = state["push_weights"].clone()
        self._is_biased = False
