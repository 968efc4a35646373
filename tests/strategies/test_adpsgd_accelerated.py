"""Accelerated AD-PSGD (A2CiD2) on virtual learners, against a float64 replay that follows a clock.

In the replay rows are moved when an event touches them, by a matrix exponential.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ddpcore import ADPSGD, Complete, OnePeerExponential, RandomPair, Ring, Star, StaticExponential
from ddpcore.strategies.a2cid2 import acceleration_of
from ddpcore.testing import check_strategy
from ddpcore.training import TrainConfig
from helpers.adpsgd_runs import (
    CURVATURES,
    MINIMA,
    MOMENTUM,
    RATE,
    SIZE,
    SPEEDS,
    STEPS,
    N,
    Run,
    expect_refusal,
    replayed_events,
)

EPS = torch.finfo(torch.float32).eps
STILL = partial(torch.optim.SGD, lr=0.0)


def published(adjacency: Any) -> tuple[float, float]:
    """Eta and alpha of a graph as the authors' code computes them: each learner meets once in a unit of time."""
    adjacency = np.asarray(adjacency, dtype=float)
    laplacian = np.eye(len(adjacency)) - adjacency / adjacency.sum(axis=1, keepdims=True)
    inverse, vectors = np.linalg.pinv(laplacian), np.eye(len(adjacency))
    edges = [vectors[i] - vectors[j] for i, j in zip(*np.nonzero(adjacency), strict=True)]
    chi_1 = 1 / np.sort(np.linalg.eigvalsh(laplacian))[1]
    chi_2 = max(0.5 * edge @ inverse @ edge for edge in edges)
    return 0.5 / math.sqrt(chi_1 * chi_2), 0.5 * math.sqrt(chi_1 / chi_2)


def cycle(num: int) -> Any:
    return sum(np.roll(np.eye(num), hop, axis=1) for hop in (-1, 1))


def rows(run: Run) -> Tensor:
    """x and y, ``[N, 2, SIZE]``."""
    return run.handle.learner.live.rows()[..., :SIZE].double()


@pytest.mark.parametrize(("num", "eta", "alpha"), [(4, 0.57735, 0.57735), (16, 0.14247, 1.87169)])
def test_numbers_of_cycles(num: int, eta: float, alpha: float) -> None:
    """They are the ones that the authors' code gives. Learners here meet twice as often, so eta is twice as large."""
    assert published(cycle(num)) == pytest.approx((eta, alpha), abs=5e-6)
    assert acceleration_of(cycle(num) / 2) == pytest.approx((eta, alpha), abs=5e-6)
    assert ADPSGD(Ring(), accelerated=True).acceleration(num) == pytest.approx((2 * eta, alpha), abs=1e-5)


@pytest.mark.parametrize("num", [3, 8])
def test_numbers_of_other_graphs(num: int) -> None:
    def numbers(topology: Any, **options: Any) -> Any:
        return ADPSGD(topology, accelerated=True, **options).acceleration(num)

    assert numbers(Complete()) == pytest.approx((num / (num - 1), 0.5))
    assert ADPSGD(accelerated=True).acceleration(2) == pytest.approx((2, 0.5))
    assert ADPSGD(accelerated=True).acceleration(1) == (0, 0)
    exponential = StaticExponential().matrix(0, num) - np.diag(np.diag(StaticExponential().matrix(0, num)))
    eta, alpha = published((exponential > 0) * 1.0 + (exponential.T > 0))  # a hop that is its own inverse counts twice
    assert numbers(StaticExponential()) == pytest.approx((2 * eta, alpha))
    # The centre of a star meets each of n - 1 leaves at the rate r = speed / (n - 1) + 1: eigenvalues 0, r and n r,
    # and the resistance of each edge is 1 / r.
    speeds = [0.5] + [1.0] * (num - 1)
    rate = 0.5 / (num - 1) + 1
    assert numbers(Star(), speeds=speeds) == pytest.approx((rate / math.sqrt(2), math.sqrt(0.5)))


def test_numbers_can_be_given() -> None:
    ring = partial(ADPSGD, Ring(), accelerated=True)
    eta, alpha = ring().acceleration(N)
    assert ring(eta=0.25).acceleration(N) == (0.25, alpha)
    assert ring(alpha=0).acceleration(N) == (eta, 0.0)
    assert ADPSGD(Ring()).acceleration(N) is None


@pytest.mark.parametrize("speeds", SPEEDS.values(), ids=SPEEDS)
def test_rows_against_a_replay(speeds: Any) -> None:
    strategy = ADPSGD(Ring(), speeds=speeds, seed=3, accelerated=True)
    run, events = Run(strategy), replayed_events(strategy, speeds, STEPS)
    start = run.start_apart().numpy()
    pair, momentum, updates = np.stack([start, start], axis=1), *np.zeros((2, N, SIZE))
    since, (eta, alpha) = np.zeros(N), strategy.acceleration(N)
    values, vectors = np.linalg.eigh(np.array([[-eta, eta], [eta, -eta]]))

    def at(learner: int, time: float) -> Any:
        return vectors @ np.diag(np.exp(values * (time - since[learner]))) @ vectors.T @ pair[learner]

    def begin(learner: int, now: Any) -> None:
        batch = math.ceil(now)
        if batch < STEPS:
            gradient = CURVATURES[learner] * (pair[learner, 0] - MINIMA[batch, learner])
            momentum[learner] = MOMENTUM * momentum[learner] + gradient
            updates[learner] = -RATE * momentum[learner]

    for learner in range(N):
        begin(learner, 0)
    for step in range(STEPS):
        while events and events[0][0] <= step + 1:
            now, i, j = events.pop(0)
            for one in (i, j):
                pair[one], since[one] = at(one, float(now)), float(now)
            gap = pair[j, 0] - pair[i, 0]
            pair[i] += np.stack([gap / 2, alpha * gap]) + updates[i]
            pair[j] -= np.stack([gap / 2, alpha * gap])
            begin(i, now)
        run.step()
        expected = np.stack([at(learner, step + 1) for learner in range(N)])
        torch.testing.assert_close(rows(run), torch.from_numpy(expected), rtol=0, atol=4e-6)
        torch.testing.assert_close(run.weights(), torch.from_numpy(expected[:, 0]), rtol=0, atol=4e-6)


@pytest.mark.parametrize("rate", [0.0, RATE])
@pytest.mark.parametrize("topology", [Ring(), Star()], ids=repr)
def test_both_means_move_by_the_gradients_alone(topology: Any, rate: float) -> None:
    """That of the weights, and that of the doubles: they are equal at first, and the rows are read at one time."""
    speeds = SPEEDS["odd"]
    strategy = ADPSGD(topology, speeds=speeds, seed=1, accelerated=True)
    run = Run(strategy, lambda p: torch.optim.SGD(p, lr=rate))
    start = run.start_apart()
    total, begun, largest = torch.zeros(SIZE).double(), torch.zeros(N, SIZE).double(), start.abs().max()
    apart = 0.0
    for step in range(40):
        run.step()
        for learner, model in enumerate(run.handle.models):
            if strategy.begins(step, learner):
                begun[learner] = -rate * model.weight.grad.double()
        total += sum(begun[event.learner] for event in strategy.events(step, N))
        largest = max(largest, rows(run).abs().max())
        # Up to two flows, a meeting and a step round x and y of two learners; the mean counts them as 1 / N.
        error = 8 * (step + 1) * EPS * largest
        for part in rows(run).unbind(1):
            assert (part.mean(0) - start.mean(0) - total / N).abs().max() <= error
        apart = max(apart, (rows(run)[:, 1] - rows(run)[:, 0]).abs().max())
    assert apart > 100 * error
    mean = rows(run)[:, 0].mean(0)
    torch.testing.assert_close(run.handle.evaluation_model().weight.double(), mean, rtol=0, atol=1e-6)


def disagreement(accelerated: bool, seed: int) -> float:
    """Of 16 learners on a ring after 40 steps without gradients, by the distance at first."""
    run = Run(ADPSGD(Ring(), seed=seed, accelerated=accelerated), STILL, learners=16)
    start = run.start_apart()
    for _ in range(40):
        run.handle.model(torch.zeros(16, 2, SIZE)).sum().backward()
        run.optimizer.step()
    end = run.weights()
    return float((end - end.mean(0)).norm() / (start - start.mean(0)).norm())


def test_learners_on_a_ring_agree_faster() -> None:
    """With the same events."""
    plain, fast = ([disagreement(accelerated, seed) for seed in range(4)] for accelerated in (False, True))
    assert max(fast) < min(plain) / 10, (plain, fast)


def test_on_a_complete_graph_of_equal_speeds_nothing_changes() -> None:
    plain, fast = (Run(ADPSGD(seed=1, accelerated=value)) for value in (False, True))
    for run in (plain, fast):
        run.start_apart()
    torch.testing.assert_close(plain.step(STEPS), fast.step(STEPS), rtol=0, atol=4e-6)


@pytest.mark.parametrize("at", [1, 4, 5])
@pytest.mark.parametrize("speeds", [None, SPEEDS["odd"]], ids=["equal", "odd"])
def test_a_resumed_run_has_the_same_bits(speeds: Any, at: int) -> None:
    run, resumed, whole = (Run(ADPSGD(Ring(), speeds=speeds, seed=2, accelerated=True)) for _ in range(3))
    run.step(at)
    saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict(), run.handle.state_dict()))
    for part, state in zip((resumed.model, resumed.optimizer, resumed.handle), saved, strict=True):
        part.load_state_dict(state)
    resumed.num_steps = at
    resumed.step(6)
    whole.step(at + 6)
    assert torch.equal(rows(resumed), rows(whole))
    assert not torch.equal(rows(whole)[:, 0], rows(whole)[:, 1])


@pytest.mark.parametrize("part", ["drift", "meet"])
def test_a_failed_average_leaves_the_model(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the learner whose average fails: the first of the events."""

    def fail(*_: Any) -> None:
        raise RuntimeError("a rank is gone")

    run = Run(ADPSGD(Ring(), accelerated=True))
    run.step(3)
    before = run.handle.learner.flat.param_LP.clone()
    first = run.handle.strategy.events(3, N)[0].learner
    monkeypatch.setattr(type(run.handle.learner.live), part, fail)
    with pytest.raises(RuntimeError, match="a rank is gone"):
        run.step(4)
    changed = (run.handle.learner.flat.param_LP != before).any(dim=1)
    assert not bool(changed[first])
    assert int(changed.sum()) == N - 1, "the others have stepped, so the step was there"


def test_a_state_of_plain_learners_is_refused() -> None:
    plain, fast = Run(ADPSGD(Ring())), Run(ADPSGD(Ring(), accelerated=True))
    plain.step()
    with pytest.raises(ValueError, match=r"seed=0\) of 4 learners, .* seed=0, accelerated=True"):
        fast.handle.load_state_dict(plain.handle.state_dict())


def test_virtual_learners() -> None:
    check_strategy(partial(ADPSGD, Ring(), accelerated=True), num_learners=(1, 2, 3), transports=())
    check_strategy(partial(ADPSGD, Ring(), speeds=(0.4, 1, 0.5), accelerated=True), num_learners=(3,), transports=())


def test_bytes_sent_are_those_of_plain_learners() -> None:
    """Doubles are not sent."""
    plain, fast = (Run(ADPSGD(Ring(), accelerated=value)) for value in (False, True))
    for run in (plain, fast):
        run.step(5)
    assert fast.handle.comm.bytes_sent == plain.handle.comm.bytes_sent > 0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ADPSGD(accelerated=1), "adpsgd: accelerated is 1: it must be true or false"),
        (lambda: ADPSGD(accelerated=True, eta=0), "adpsgd: eta is 0.0: it must be above 0"),
        (lambda: ADPSGD(accelerated=True, eta=math.inf), "adpsgd: eta is inf: it must be a finite number"),
        (lambda: ADPSGD(accelerated=True, alpha=-0.1), "adpsgd: alpha is -0.1: it must be at least 0"),
        (lambda: ADPSGD(accelerated=True, alpha="1"), "adpsgd: alpha is '1': it must be a finite number"),
        (lambda: ADPSGD(eta=0.5), "adpsgd: eta is 0.5: take accelerated=True, or leave it out"),
        (lambda: ADPSGD(alpha=0.5), "adpsgd: alpha is 0.5: take accelerated=True, or leave it out"),
        (lambda: ADPSGD(RandomPair(3), accelerated=True), r"every step, RandomPair\(seed=3\) changes them: take"),
        (lambda: ADPSGD(OnePeerExponential(), accelerated=True), r"adpsgd: accelerated needs the same neighbours at"),
        (lambda: ADPSGD(RandomPair(), accelerated=True, eta=1, alpha=1), "adpsgd: accelerated needs the same"),
    ],
)
def test_refusals(make: Any, says: str) -> None:
    expect_refusal(make, says)


def test_by_name() -> None:
    options = {"speeds": [1, 0.5], "accelerated": True, "eta": 0.5}
    made = TrainConfig.from_dict(
        {"strategy": {"name": "adpsgd", "topology": "ring", "learners": 2, **options}, "run": {"steps": 1, "seed": 4}}
    ).make_strategy()
    assert repr(made) == repr(ADPSGD(Ring(), speeds=(1, 0.5), seed=4, accelerated=True, eta=0.5))
    assert "accelerated=True, eta=0.5, alpha=None" in repr(made)
    assert "accelerated" not in repr(ADPSGD())
