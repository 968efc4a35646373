"""Slow momentum around another strategy."""

from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from ddpcore.ops import WeightAverage
from ddpcore.options.typed import check_range, typed
from ddpcore.strategies.base import Plan, Strategy, Traits, check_unweighted
from ddpcore.strategies.dpsgd import DPSGD
from ddpcore.strategies.learner import Learner
from ddpcore.strategies.outer import Start


class SlowMo(Strategy):
    r"""SlowMo (Wang et al. 2020, algorithm 1): gossip or local steps, and every H steps a step of slow momentum.

    ``x = 1/n sum_k w_k(t)``;  ``u <- beta u + (w(t-H) - x) / a``;  ``w_j(t) <- w(t-H) - alpha a u``, with a the
    learning rate of the first parameter group at that step, and w(t-H) the last weights that all learners shared.

    Args:
        base: the strategy between the slow steps: ``DPSGD(...)``, or None for local steps.
        period: H.
        slow_momentum: beta, 0 <= beta < 1.
        slow_lr: alpha.

    ValueError: a number is out of its range, or the base is not supported.
    """

    name: ClassVar[str] = "slowmo"

    def __init__(
        self, base: DPSGD | None = None, *, period: int = 8, slow_momentum: float = 0.5, slow_lr: float = 1.0
    ) -> None:
        check_range("slowmo: period", period, least=1)
        check_range("slowmo: slow_momentum", slow_momentum, least=0, below=1)
        check_range("slowmo: slow_lr", typed("slowmo: slow_lr", slow_lr, float), above=0)
        if not isinstance(base, DPSGD | None):
            raise ValueError(f"slowmo: base is {base!r}: take gossip, a DPSGD, or None for local steps")
        if base is not None and base.group > 1:
            raise ValueError(f"slowmo: base has groups of {base.group}: leave group out")
        if base is not None and base.staleness:
            raise ValueError("slowmo: each exchange must end within its period: take a base of staleness 0")
        if base is not None and base.compression is not None and base.compression.differences:
            what = f"slowmo: base sends differences by {base.compression.name}, which do not include the slow step"
            raise ValueError(f"{what}: take another compression")
        self.base, self._inner = base, Strategy() if base is None else base
        self.period, self.slow_momentum, self.slow_lr = period, slow_momentum, slow_lr
        self.topology = None if base is None else base.topology
        self._begun = Start()
        self._anchor_P: Tensor | None = None  # w(t-H)
        self._momentum_P: Tensor | None = None  # u

    @property
    @override
    def traits(self) -> Traits:
        traits = self._inner.traits
        return replace(traits, shared_state=("anchor", *(f"base.{path}" for path in traits.shared_state)))

    @override
    def plan(self, step: int) -> Plan:
        return Plan(weights=(step + 1) % self.period == 0 or (self.base is not None and self.base.plan(step).weights))

    def __repr__(self) -> str:
        return f"SlowMo({self.base!r}, {self._shown('period', 'slow_momentum', 'slow_lr')})"

    @override
    def setup(self, num_learners: int, dtype: torch.dtype) -> None:
        self._inner.setup(num_learners, dtype)
        check_unweighted(self, num_learners)

    @override
    def members_changed(self, learner: Learner, before: Sequence[int | None]) -> None:
        self._inner.members_changed(learner, before)

    @override
    def before_forward(self, learner: Learner) -> None:
        if self._anchor_P is None:
            self._begun.note(learner)
        self._inner.before_forward(learner)

    @override
    def before_step(self, learner: Learner) -> WeightAverage | None:
        if self._anchor_P is None:
            self._anchor_P = learner.common_weights(self._begun.note(learner))[0].clone()
            self._momentum_P = torch.zeros_like(self._anchor_P)
            self._begun = Start()
        return self._inner.before_step(learner)

    @override
    def after_step(self, learner: Learner) -> None:
        """Call the base and, at the end of a period, take the slow step."""
        self._inner.after_step(learner)
        self._mixing = self._inner._mixing
        if learner.step % self.period:
            return
        weights_LP = learner.flat.param_LP
        learner.check_sent()
        learner.comm.average_(weights_LP, learner.step - 1).wait()
        assert self._anchor_P is not None and self._momentum_P is not None
        if (lr := learner.optimizer.param_groups[0]["lr"]) == 0:
            raise ValueError("slowmo divides by the learning rate, which is 0: begin and end the schedule above 0")
        self._momentum_P.mul_(self.slow_momentum).add_((self._anchor_P - weights_LP[0]) / lr)
        self._anchor_P.sub_(self._momentum_P * (self.slow_lr * lr))
        weights_LP.copy_(self._anchor_P.expand_as(weights_LP))

    @override
    def quarantine(self, learners: Set[int]) -> None:
        self._inner.quarantine(learners)

    @override
    def state_dict(self) -> dict[str, Any]:
        """The state in the format of version 0.2, which kept the momentum in an outer optimizer."""
        base, anchor = None if self.base is None else self.base.state_dict(), None
        if self._anchor_P is not None:
            anchor = {"parts": [self._anchor_P], "optimizer": {"state": {0: {"momentum_buffer": self._momentum_P}}}}
        return {"start": self._begun.rows_LP, "anchor": anchor, "base": base}

    @override
    def load_state_dict(self, learner: Learner, state: dict[str, Any]) -> None:
        self._begun = Start(state.get("start"))
        anchor = state["anchor"]
        self._anchor_P = self._momentum_P = None
        if anchor is not None:
            self._anchor_P = anchor["parts"][0].to(learner.flat.param_LP, copy=True)
            self._momentum_P = torch.zeros_like(self._anchor_P)
            for buffers in anchor["optimizer"]["state"].values():  # none before the first slow step
                self._momentum_P = buffers["momentum_buffer"].to(learner.flat.param_LP, copy=True)
        self._inner.load_state_dict(learner, state["base"])
