"""Push-sum gossip for directed graphs."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from ddpcore.strategies.base import Strategy, Traits, check_mixable, topology_of
from ddpcore.strategies.learner import Learner
from ddpcore.topology.base import Topology


class PushSum(Strategy):
    r"""Stochastic gradient push (Assran et al. 2019, algorithm 1): gossip where W need not be doubly stochastic.

    ``x_j(t+1) = sum_k P_jk(t) (x_k(t) - a g_k(z_k(t)))``, ``p_j(t+1) = sum_k P_jk(t) p_k(t)``, ``z_j = x_j / p_j``.

    The columns of P sum to one, so the sum of x is preserved. The rows need not sum to one, so x alone drifts towards
    learners that receive more; the push weight p measures that drift. The model holds z, except inside the optimizer's
    step. The average of all learners is that of x, ``sum_j x_j / n = sum_j p_j z_j / sum_j p_j``, which mixing keeps.

    Args:
        topology: P(t). The graph may be directed.
    """

    name: ClassVar[str] = "push_sum"
    # The gradient must be the one at the de-biased weights.
    traits: ClassVar[Traits] = Traits(takes_closure=False, no_mean="push_sum does not train the mean of its weights")
    topology: Topology

    def __init__(self, topology: Topology) -> None:
        self.topology = topology_of(self.name, topology)
        self._push_weights = torch.ones(0, dtype=torch.float64, device="cpu")  # p of all learners, [n]
        self._share_mean = 1.0  # of p: mixing keeps it, and a death changes it
        self._is_biased = False  # whether the flat buffer holds x

    def __repr__(self) -> str:
        return f"PushSum({self.topology!r})"

    @override
    def setup(self, num_learners: int, dtype: torch.dtype) -> None:
        check_mixable(self.name, dtype, "quotients are")
        self.topology.validate(num_learners, push_sum=True)
        self._push_weights = torch.ones(num_learners, dtype=torch.float64, device="cpu")

    @override
    def before_step(self, learner: Learner) -> None:
        """Change the weights from z to x."""
        if not self._is_biased:
            learner.flat.param_LP.mul_(self._held(learner))
            self._is_biased = True

    @override
    def restore_weights(self, learner: Learner) -> None:
        """Change the weights from x to z, also after a step that failed."""
        if self._is_biased:
            learner.flat.param_LP.div_(self._held(learner))
            self._is_biased = False

    @override
    def after_step(self, learner: Learner) -> None:
        """Exchange x and p, and change the weights to z."""
        step = learner.step - 1
        learner.check_sent()
        learner.comm.mix_(learner.flat.param_LP, self.topology, step)
        drawn = learner.comm.redrawn(self.topology)
        matrix = drawn.mixing_matrix(step, learner.comm.num_learners)  # the same on every rank
        self._push_weights = learner.shares = torch.from_numpy(matrix @ self._push_weights.numpy())
        self.restore_weights(learner)

    @override
    def members_changed(self, learner: Learner, before: Sequence[int | None]) -> None:
        """Lose the push weights of the dead: ``sum_j p_j`` of the living is what they held. A new learner has 1."""
        held = [1.0 if number is None else float(self._push_weights[number]) for number in before]
        self._push_weights = learner.shares = torch.tensor(held, dtype=torch.float64, device="cpu")
        self._share_mean = learner.share_mean = float(self._push_weights.mean())

    def _held(self, learner: Learner) -> Tensor:
        """p of the learners held here, ``[L, 1]``, with the dtype and the device of the weights."""
        return self._push_weights[list(learner.comm.learners)][:, None].to(learner.flat.param_LP)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"push_weights": self._push_weights, "share_mean": self._share_mean}

    @override
    def load_state_dict(self, learner: Learner, state: dict[str, Any]) -> None:
        self._push_weights = learner.shares = state["push_weights"]
        self._share_mean = learner.share_mean = state["share_mean"]
        self._is_biased = False
