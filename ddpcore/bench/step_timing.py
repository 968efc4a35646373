"""The time of the parts of a step: forward, backward, update, and the arrival of each gradient."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from ddpcore.bench.contender import Contender
from ddpcore.bench.step_model import Compute


class StepTimer:
    """Times the parts of a contender's steps; results are medians over steps.

    On a GPU each time stamp waits for the stream, which is harmless in a step without communication.
    """

    def __init__(self, one: Contender) -> None:
        assert one.trainer is not None
        self._trainer = one.trainer
        self._cuda = one.trainer.dataset.train.labels.is_cuda
        self._steps: list[tuple[float, float, float]] = []  # seconds of forward, backward and update
        self._arrivals: dict[int, list[float]] = {}
        self._sizes: dict[int, int] = {}
        self._marks: list[float] = []
        self._order: list[int] = []

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Install the hooks that :meth:`step` needs."""
        model, optimizer = self._trainer.handle.model, self._trainer.optimizer
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._sizes = {id(parameter): parameter.numel() for parameter in parameters}
        hooks: list[Any] = [
            model.register_forward_hook(lambda *_: self._marks.append(self._now())),
            optimizer.register_step_pre_hook(lambda *_: self._marks.append(self._now())),
            *(parameter.register_post_accumulate_grad_hook(self._arrived) for parameter in parameters),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def step(self) -> None:
        """Train and time one step, inside :meth:`hooks`."""
        start = self._now()
        self._marks, self._order, index = [], [], len(self._steps)
        self._trainer.step()
        end = self._now()
        forward, backward = (mark - start for mark in self._marks)
        self._steps.append((forward, backward - forward, end - start - backward))
        for key in self._order:
            when = self._arrivals[key][index]
            self._arrivals[key][index] = min(1.0, max(0.0, (when - start - forward) / (backward - forward)))

    def compute(self, seconds: float, cpu: float = 0.0) -> Compute:
        """A step of this length in seconds, divided into parts in the measured proportions."""
        parts = [median(part) for part in zip(*self._steps, strict=True)]
        forward, backward, update = (seconds * part / sum(parts) for part in parts)
        found = [(self._sizes[key], median(shares)) for key, shares in self._arrivals.items()]
        arrivals = tuple(sorted(found, key=lambda entry: entry[1]))
        return Compute(forward=forward, backward=backward, update=update, cpu=cpu, arrivals=arrivals)

    def _arrived(self, parameter: torch.Tensor) -> None:
        self._arrivals.setdefault(id(parameter), []).append(self._now())
        self._order.append(id(parameter))

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()
