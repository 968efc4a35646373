"""Local SGD, and what grew out of it: post-local SGD and DiLoCo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from ddpcore.strategies.base import Strategy
from ddpcore.strategies.learner import Learner
from ddpcore.strategies.ssgd import SSGD

MakeOptimizer = Callable[[Sequence[Tensor]], torch.optim.Optimizer]


class LocalSGD(Strategy):
    r"""Local SGD (Stich 2019): learners step alone and average their weights every H steps.

    ``w_j(t+1) = v_j(t+1)`` or, where H divides t+1, ``1/n sum_k v_k(t+1)``, with ``v_j(t+1) = w_j(t) - a g_j(w_j(t))``.
    Momentum stays local, unless a policy says otherwise.

    Args:
        period: H, local steps between two averages; 1 averages after every step.
        warmup_steps: while t is below it the period grows from 1 to H by doubling (Lin et al. 2020, "local step
            warm-up").
        switch_step: post-local SGD (Lin et al. 2020): the gradients of the first so many steps are averaged as in ssgd,
            and steps are counted from there.
        outer: an optimizer of the averaged weights, made from the list of tensors that it is to step; its gradient is
            the way that the learners went together, ``w(t-H) - 1/n sum_k v_k(t)``. DiLoCo (Douillard et al. 2023) is
            ``lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)``. None takes the average itself.
        fragments: in so many parts, each at its own time, evenly over the period (Douillard et al. 2025): an average
            moves a fraction of the bytes, as often as there are parts.

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
        if period < 1:
            raise ValueError(f"local_sgd: period is {period}, it must be at least 1 step")
        for name, value in (("warmup_steps", warmup_steps), ("switch_step", switch_step)):
            if value < 0:
                raise ValueError(f"local_sgd: {name} is {value}, it must be at least 0")
        if not 1 <= fragments <= period:
            raise ValueError(f"local_sgd: fragments is {fragments}, it must be from 1 to the period, {period}")
        if warmup_steps and fragments > 1:
            raise ValueError("local_sgd: fragments have a time of their own in a fixed period: leave warmup_steps out")
        self.period = period
        self.warmup_steps = warmup_steps
        self.switch_step = switch_step
        self.outer = outer
        self.fragments = fragments
        self.averages_gradients = switch_step > 0
        self._synchronous = SSGD()
        self._anchor: Anchor | None = None

    def __repr__(self) -> str:
        options = f"warmup_steps={self.warmup_steps}, switch_step={self.switch_step}, fragments={self.fragments}"
        return f"LocalSGD(period={self.period}, {options}, outer={'yes' if self.outer else None})"

    @property
    def fixed_layout(self) -> bool:
        """Fragments are ranges of the buffer."""
        return self.fragments > 1

    def before_forward(self, learner: Learner) -> None:
        """Forget what a backward pass that died has left."""
        self._synchronous.before_forward(learner)

    def bucket_ready(self, learner: Learner, columns: Tensor) -> None:
        """Before the switch: as ssgd."""
        if self.averages_gradients_at(learner.step):
            self._synchronous.bucket_ready(learner, columns)

    def after_backward(self, learner: Learner) -> None:
        """Before the switch: as ssgd."""
        self._synchronous.after_backward(learner)

    def before_step(self, learner: Learner) -> None:
        """Keep the weights from which the learners set out, for the outer optimizer."""
        if self.outer is not None and self._anchor is None and learner.step >= self.switch_step:
            self._anchor = Anchor(learner.flat.param_LP, self._columns(learner.flat.numel), self.outer)

    def after_step(self, learner: Learner) -> None:
        """Average what is due."""
        due = [index for index in range(self.fragments) if self._is_due(learner.step, index)]
        columns = self._columns(learner.flat.numel)
        parts = [learner.flat.param_LP[:, slice(*columns[index])] for index in due]
        works = [learner.comm.average_(part, learner.step - 1) for part in parts]
        for index, work in zip(due, works, strict=True):
            work.wait()
            if self._anchor is not None:
                self._anchor.step_(learner.flat.param_LP, index)

    @property
    def learners_stay_identical(self) -> bool:
        """Not after the switch."""
        return False

    def averages_gradients_at(self, step: int) -> bool:
        """Before the switch."""
        return step < self.switch_step

    def averages_weights_at(self, step: int) -> bool:
        """At every step before the switch: gradients are averaged. Then where a period, or that of fragment 0, ends."""
        return self.averages_gradients_at(step - 1) or self._is_due(step, 0)

    def _is_due(self, step: int, fragment: int) -> bool:
        """Whether a fragment is averaged in the step that makes the count ``step``."""
        local = step - self.switch_step
        if local <= 0:
            return False
        if local <= self.warmup_steps:  # 1, 2, 4, ... up to H, in equal shares of the warm-up
            doublings = (self.period - 1).bit_length()
            period = min(self.period, 2 ** ((local - 1) * doublings // self.warmup_steps))
            return local % period == 0
        return (local + fragment * self.period // self.fragments) % self.period == 0

    def _columns(self, numel: int) -> list[tuple[int, int]]:
        """Of the flat buffer, one range a fragment."""
        bounds = [numel * index // self.fragments for index in range(self.fragments + 1)]
        return list(pairwise(bounds))

    def state_dict(self) -> dict[str, Any]:
        """The outer optimizer and the weights that it stands at."""
        return {"anchor": None if self._anchor is None else self._anchor.state_dict()}

    def load_state_dict(self, learner: Learner, state: dict[str, Any]) -> None:
        """See :class:`Strategy`."""
        self._anchor = None
        if state["anchor"] is not None and self.outer is not None:
            self._anchor = Anchor(learner.flat.param_LP, self._columns(learner.flat.numel), self.outer)
            self._anchor.load_state_dict(state["anchor"])


class Anchor:
    """The weights that all learners agreed on last, moved by an optimizer of its own. Alike on every rank.

    Args:
        weights_LP: rows that are alike.
        columns: a range of columns for each part that is stepped at its own time.
        make: the optimizer of the parts, one tensor each.
    """

    def __init__(self, weights_LP: Tensor, columns: Sequence[tuple[int, int]], make: MakeOptimizer) -> None:
        self._columns = list(columns)
        self._parts = [weights_LP[0, begin:end].clone().requires_grad_() for begin, end in columns]
        self._optimizer = make(self._parts)

    @torch.no_grad()
    def step_(self, weights_LP: Tensor, index: int) -> None:
        """From the averaged columns of part ``index`` to where the optimizer goes, in all rows."""
        begin, end = self._columns[index]
        part = self._parts[index]
        part.grad = part - weights_LP[0, begin:end]
        self._optimizer.step()
        part.grad = None
        weights_LP[:, begin:end] = part

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"parts": [part.detach() for part in self._parts], "optimizer": self._optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        for part, saved in zip(self._parts, state["parts"], strict=True):
            part.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])
