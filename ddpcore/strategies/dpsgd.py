"""Decentralized parallel SGD."""

from __future__ import annotations

from typing import ClassVar

from ddpcore.comm.base import Exchange
from ddpcore.learner import Learner
from ddpcore.optim import MixingOptimizer
from ddpcore.strategies.base import Strategy
from ddpcore.topology import RandomPair, Topology


class DPSGD(Strategy):
    r"""Decentralized parallel SGD, average-while-computing (Lian et al. 2017, algorithm 1).

    ``w_j(t+1) = sum_k W_jk(t) w_k(t) - a g_j(w_j(t))``

    The exchange needs w(t) only, so it runs during the whole forward and backward pass. Momentum stays local. With the
    fused optimizers mix, momentum and step are one pass over the weights; any other optimizer steps after the mix.

    Args:
        topology: W(t), who averages with whom at step t.
    """

    name: ClassVar[str] = "dpsgd"
    takes_closure: ClassVar[bool] = False  # the gradient must be the one at the unmixed weights

    def __init__(self, topology: Topology | None = None) -> None:
        self.topology = RandomPair() if topology is None else topology
        self._exchange: Exchange | None = None
        self._versions: list[int] = []  # of the weights that are in flight

    def setup(self, learner: Learner) -> None:
        """Check W against the number of learners."""
        self.topology.validate(learner.comm.num_learners)

    def before_forward(self, learner: Learner) -> None:
        """Start the exchange of w(t). After a step none is in flight, so weights may be loaded or saved there."""
        if self._exchange is None:
            self._versions = [parameter._version for parameter in learner.flat.parameters]
            self._exchange = learner.comm.exchange(learner.flat.param_LP, self.topology, learner.step)

    def before_step(self, learner: Learner) -> None:
        """w <- W w, now, or by the optimizer in the same pass as its step."""
        self.before_forward(learner)
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        if self._versions != [parameter._version for parameter in learner.flat.parameters]:
            raise RuntimeError(
                "weights were changed between a forward pass and the step that follows, while neighbours read them: "
                "change them after a step, or evaluate under torch.no_grad()"
            )
        complete = learner.flat.gather_grads()
        optimizer = learner.optimizer
        mixture = exchange.mixture() if complete and isinstance(optimizer, MixingOptimizer) else None
        if mixture is not None and isinstance(optimizer, MixingOptimizer):
            optimizer.mix_on_next_step(mixture)
        else:
            exchange.mix_()

    def after_step(self, learner: Learner) -> None:
        """Nothing: the next exchange starts with the next forward pass."""
