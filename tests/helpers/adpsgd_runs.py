"""AD-PSGD on virtual learners of a quadratic, and a list of its events that knows no steps of a training loop.

The loss of learner j in batch t is ``sum_i h_ji / 2 (w_i - b_tji)^2``.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ddpcore
from ddpcore import ADPSGD

N, SIZE, STEPS = 4, 6, 12
RATE, MOMENTUM = 0.2, 0.5
GENERATOR = np.random.default_rng(0)
CURVATURES = GENERATOR.uniform(0.5, 1.5, (N, SIZE))
MINIMA = GENERATOR.normal(size=(STEPS, N, SIZE))
SPEEDS = {"equal": (1, 1, 1, 1), "half": (1, 1, 1, 0.5), "odd": (0.3, 1, 0.7, 0.25)}
SGD = lambda p: torch.optim.SGD(p, lr=RATE, momentum=MOMENTUM)  # noqa: E731


class Quadratic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))

    def forward(self, problem: Tensor) -> Tensor:
        """The loss of one learner; ``problem [2, SIZE]`` has its curvatures and minima."""
        return (problem[0] / 2 * (self.weight - problem[1]).square()).sum()


class Run:
    """N virtual learners."""

    def __init__(self, strategy: Any, make_optimizer: Any = SGD, learners: int = N) -> None:
        self.model, self.num_steps = Quadratic(), 0
        self.optimizer = make_optimizer(self.model.parameters())
        self.handle = ddpcore.distribute(self.model, self.optimizer, strategy, learners=learners, vectorize=False)

    def step(self, num_steps: int = 1) -> Tensor:
        """The weights ``[N, SIZE]`` after so many steps."""
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            self.loss().backward()
            self.optimizer.step()
            self.num_steps += 1
        return self.weights()

    def loss(self) -> Tensor:
        minima = MINIMA[self.num_steps % STEPS]
        return self.handle.model(torch.from_numpy(np.stack([CURVATURES, minima], 1)).float()).sum()

    def weights(self) -> Tensor:
        """w, not the models' v."""
        return self.handle.learner.weights()[:, :SIZE].double()

    def start_apart(self) -> Tensor:
        with torch.no_grad():
            for seed, model in enumerate(self.handle.models):
                model.weight.copy_(torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)))
        return self.weights()


def expect_refusal(make: Callable[[], ADPSGD], says: str) -> None:
    """``distribute`` refuses the strategy in one line, and changes neither model nor optimizer."""
    model = Quadratic()
    optimizer = SGD(model.parameters())
    with pytest.raises(ValueError, match=says) as caught:
        ddpcore.distribute(model, optimizer, make(), learners=N, vectorize=False)
    assert "\n" not in str(caught.value)
    model(torch.ones(2, SIZE)).backward()  # nothing was changed
    optimizer.step()


def replayed_events(strategy: ADPSGD, speeds: Any, num_steps: int) -> list[tuple[Fraction, int, int]]:
    """(time, learner, peer) of all jobs that end by then: a clock runs from one end to the next."""
    exact = [Fraction(speed).limit_denominator(1000) for speed in speeds]
    draws = [
        np.random.Philox(np.random.SeedSequence(strategy.seed, spawn_key=(step, 0))).random_raw(2 * N)
        for step in range(num_steps)
    ]
    queue: list[tuple[Fraction, int, int]] = []

    def begin(learner: int, now: Fraction) -> None:
        end = now + 1 / exact[learner]
        if end <= num_steps:
            heapq.heappush(queue, (end, int(draws[math.ceil(end) - 1][learner]), learner))

    for learner in range(N):
        begin(learner, Fraction(0))
    events = []
    while queue:
        now, _, learner = heapq.heappop(queue)
        step = math.ceil(now) - 1
        row = strategy.topology.matrix(step, N)[learner]
        peers = [peer for peer in range(N) if row[peer] and peer != learner] or [learner]
        events.append((now, learner, peers[int(draws[step][N + learner]) % len(peers)]))
        begin(learner, now)
    return events
