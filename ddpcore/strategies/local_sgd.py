"""Local SGD, post-local SGD and DiLoCo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from ddpcore.options.typed import check_range
from ddpcore.strategies.learner import Learner
from ddpcore.strategies.ssgd import SSGD

MakeOptimizer = Callable[[Sequence[Tensor]], torch.optim.Optimizer]


class LocalSGD(SSGD):
    r"""Local SGD (Stich 2019): learners step alone and average their weights every H steps.

    ``w_j(t+1) = v_j(t+1)`` or, where H divides t+1, ``1/n sum_k v_k(t+1)``, with ``v_j(t+1) = w_j(t) - a g_j(w_j(t))``.
    Each learner keeps its own momentum, unless a policy changes that. Before ``switch_step`` it is :class:`SSGD`.

    Args:
        period: H, local steps between two averages; 1 averages after every step.
        warmup_steps: while t is below it, the period grows from 1 to H by doubling (Lin et al. 2020, "local step
            warm-up").
        switch_step: post-local SGD (Lin et al. 2020): this many first steps average gradients, as ssgd does. ``period``
            and ``warmup_steps`` count from there.
        outer: makes an optimizer of the averaged weights from the list of tensors that it steps; its gradient is
            ``w(t-H) - 1/n sum_k v_k(t)``. DiLoCo (Douillard et al. 2023) is
            ``lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)``. None takes the average itself.
        fragments: number of parts of the weights. Each part is averaged at its own step, evenly over the period
            (Douillard et al. 2025), so an average sends a fraction of the bytes.

    Raises:
        ValueError: a number is out of its range.
    """

    name: ClassVar[str] = "local_sgd"

    def __init__(
        self,
        period: int = 8,
        *,
        warmup_steps: int = 0,
        switch_step: int = 0,
        outer: MakeOptimizer | None = None,
        fragments: int = 1,
    ) -> None:
        super().__init__()
        check_range("local_sgd: period", period, least=1)
        check_range("local_sgd: warmup_steps", warmup_steps, least=0)
        check_range("local_sgd: switch_step", switch_step, least=0)
        check_range("local_sgd: fragments", fragments, least=1, most=period)
        if warmup_steps and fragments > 1:
            raise ValueError("local_sgd: fragments need a period that does not grow: leave warmup_steps out")
        self.period = period
        self.warmup_steps = warmup_steps
        self.switch_step = switch_step
        self.outer = outer
        self.fragments = fragments
        self.averages_gradients = switch_step > 0
        self._anchor: Anchor | None = None

    def __repr__(self) -> str:
        options = f"warmup_steps={self.warmup_steps}, switch_step={self.switch_step}, fragments={self.fragments}"
        return f"LocalSGD(period={self.period}, {options}, outer={'yes' if self.outer else None})"

    @property
    @override
    def fixed_layout(self) -> bool:
        return self.fragments > 1  # fragments are ranges of the buffer

    @override
    def bucket_ready(self, learner: Learner, columns: Tensor) -> None:
        if self.averages_gradients_at(learner.step):
            super().bucket_ready(learner, columns)

    @override
    def before_step(self, learner: Learner) -> None:
        """Copy the weights from which the learners start, for the outer optimizer."""
        if self.outer is not None and self._anchor is None and learner.step >= self.switch_step:
            self._anchor = Anchor(learner.flat.param_LP, self._columns(learner.flat.numel), self.outer)

    @override
    def after_step(self, learner: Learner) -> None:
        """Average the fragments that are due, and step the outer optimizer on them."""
        due = [index for index in range(self.fragments) if self._is_due(learner.step, index)]
        columns = self._columns(learner.flat.numel)
        parts = [learner.flat.param_LP[:, slice(*columns[index])] for index in due]
        for part in parts:
            learner.check_sent(part)
        works = [learner.comm.average_(part, learner.step - 1) for part in parts]
        for index, work in zip(due, works, strict=True):
            work.wait()
            if self._anchor is not None:
                self._anchor.step_(learner.flat.param_LP, index)

    @property
    @override
    def learners_stay_identical(self) -> bool:
        return False

    @override
    def averages_gradients_at(self, step: int) -> bool:
        return step < self.switch_step

    @override
    def averages_weights_at(self, step: int) -> bool:
        """At every step before the switch, then at the end of each period of fragment 0."""
        return self.averages_gradients_at(step - 1) or self._is_due(step, 0)

    def _is_due(self, step: int, fragment: int) -> bool:
        """Whether a fragment is averaged in the step after which ``learner.step`` is ``step``."""
        local = step - self.switch_step
        if local <= 0:
            return False
        if local <= self.warmup_steps:  # 1, 2, 4, ... up to H, in equal shares of the warm-up
            doublings = (self.period - 1).bit_length()
            period = min(self.period, 2 ** ((local - 1) * doublings // self.warmup_steps))
            return local % period == 0
        return (local + fragment * self.period // self.fragments) % self.period == 0

    def _columns(self, numel: int) -> list[tuple[int, int]]:
        """The columns of the flat buffer that belong to each fragment."""
        bounds = [numel * index // self.fragments for index in range(self.fragments + 1)]
        return list(pairwise(bounds))

    @override
    def state_dict(self) -> dict[str, Any]:
        """The outer optimizer and its weights."""
        return {"anchor": None if self._anchor is None else self._anchor.state_dict()}

    @override
    def load_state_dict(self, learner: Learner, state: dict[str, Any]) -> None:
        self._anchor = None
        if state["anchor"] is not None and self.outer is not None:
            self._anchor = Anchor(learner.flat.param_LP, self._columns(learner.flat.numel), self.outer)
            self._anchor.load_state_dict(state["anchor"])


class Anchor:
    """The last weights that all learners shared, and the outer optimizer that steps them. Equal on every rank.

    Args:
        weights_LP: the start weights, equal in all rows.
        columns: the range of columns of each part.
        make: makes the optimizer from the parts, one tensor each.
    """

    def __init__(self, weights_LP: Tensor, columns: Sequence[tuple[int, int]], make: MakeOptimizer) -> None:
        self._columns = list(columns)
        self._parts = [weights_LP[0, begin:end].clone().requires_grad_() for begin, end in columns]
        self._optimizer = make(self._parts)

    @torch.no_grad()
    def step_(self, weights_LP: Tensor, index: int) -> None:
        """Step part ``index``, whose columns of ``weights_LP`` hold the average. All rows get the result."""
        begin, end = self._columns[index]
        part = self._parts[index]
        part.grad = part - weights_LP[0, begin:end]
        self._optimizer.step()
        part.grad = None
        weights_LP[:, begin:end] = part

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"parts": [part.detach() for part in self._parts], "optimizer": self._optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`."""
        for part, saved in zip(self._parts, state["parts"], strict=True):
            part.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])
