"""What the tests of the oracle compare: real ranks with virtual learners, a part of the cases in each file."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from ddpcore.testing.learners import STEPS
from helpers import oracle, ranks

GOSSIPING = tuple(name for name in oracle.GOSSIP if name != "slowmo")  # without other averages
APART = ("local_sgd", "grouped", "dpsgd", "dpsgd_cta", "dpsgd_stale")  # learners differ after the last step


def runs(part: str) -> list[Any]:
    """The runs of a file. Those that ``make test`` leaves out are slow."""
    marks = {run: () if run in oracle.FAST else pytest.mark.slow for run in oracle.runs_of(part)}
    return [pytest.param(run, id=str(run), marks=mark) for run, mark in marks.items()]


def results_of(part: str) -> Callable[[pytest.FixtureRequest], list[dict[Any, Any]]]:
    """A fixture: the results of six ranks, in all runs of the file or in the fast ones, as they are selected."""

    @pytest.fixture(scope="module")
    def real(request: pytest.FixtureRequest) -> list[dict[Any, Any]]:
        speed = "all" if ranks.has_slow_items(request) else "fast"
        return ranks.run("oracle", oracle.LARGEST, timeout=900.0, more=[[part, speed]] * oracle.LARGEST)

    return real


@cache
def virtual(case: Any) -> Any:
    """The result of virtual learners in the same case."""
    return oracle.train(case)


def ulps(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, in units of the last place of the largest weight."""
    unit = torch.finfo(torch.float32).eps * theirs.abs().max()
    return ((ours - theirs).abs().max() / unit).item()


def is_bitwise(run: oracle.Run) -> bool:
    """Whether real and virtual learners do the same arithmetic in a case.

    A gossip average adds a learner's own weights first, and then those of its neighbours by ascending rank. A mean of
    gathered rows, or of rows in shared memory, adds all rows by ascending rank. An all-reduce of gloo adds in another
    order, which changes the rounding for three or more learners.
    """
    return run.way == "shm" or run.case.topology != "all_reduce" or run.case.world_size <= 2


def check_run(run: oracle.Run, real: list[dict[Any, Any]]) -> None:
    """Weights, losses, average, distance and bytes."""
    seen = [rank[str(run)] for rank in real[: run.num_ranks]]
    _check_weights(run, seen)
    _check_average(run, seen)


def _check_weights(run: oracle.Run, seen: list[Any]) -> None:
    """Every learner ends with the same weights: bit for bit, or within 4 ULPs of the largest one (see is_bitwise)."""
    case = run.case
    weights = torch.cat([one.weights for one in seen])
    losses = torch.cat([one.losses for one in seen], dim=1)
    assert losses.shape == (STEPS, case.world_size)
    assert losses.isfinite().all()
    if is_bitwise(run):
        assert torch.equal(weights, virtual(case).weights)
        assert torch.equal(losses, virtual(case).losses)
    else:
        assert ulps(weights, virtual(case).weights) <= 4
        torch.testing.assert_close(losses, virtual(case).losses, rtol=1e-5, atol=1e-6)
    size = 2 if case.strategy.startswith("grouped") else case.world_size
    if case.strategy in ("ssgd", "noisy_ssgd") or size < case.world_size:
        groups = weights[:, : virtual(case).num_weights].view(-1, size, virtual(case).num_weights)
        assert torch.equal(groups, groups[:, :1].expand_as(groups)), "they must hold the same bits"


def _check_average(run: oracle.Run, seen: list[Any]) -> None:
    """The evaluation model is the mean on every rank. Distances and bytes are equal.

    Both parameters and buffers are weighted, in push_sum and by the samples of learners.

    For three or more learners they may differ by 4 ULPs, because the mean may be an all-reduce of gloo, or because a
    rank adds up its own virtual learners first.
    """
    case = run.case
    expected, weights = virtual(case), virtual(case).weights.double()
    shares = torch.ones(case.world_size).double() if expected.shares is None else expected.shares
    if case.topology == oracle.UNBALANCED:
        assert shares.max() > 1.2, "the graph is not balanced, or this test compares nothing"
    mean = (shares[:, None] * weights).mean(dim=0)
    assert ulps(expected.average, mean) <= 4
    weights, mean = (rows[..., : expected.num_weights] for rows in (weights, mean))
    distance = (weights - mean).square().sum(dim=1).mean().sqrt().item()
    # The mean is rounded to fp32: the error of each distance is at most 4 ULPs of the largest weight.
    error = 4 * torch.finfo(torch.float32).eps * weights.abs().max().item() * weights.shape[1] ** 0.5
    assert expected.consensus == pytest.approx(distance, abs=error)
    if case.strategy in APART and case.world_size > (2 if case.strategy == "grouped" else 1):
        assert distance > 0.01, "learners on different data must differ, or this test compares nothing"
    is_same = is_bitwise(run) and not oracle.num_rows(run.way)
    for one in seen:
        assert ulps(one.average, expected.average) <= (0 if is_same else 4)
        assert one.consensus == pytest.approx(distance, abs=error)
    # Shared memory gathers no small averages, and learners of one rank send each other nothing.
    if run.way == "pg" or (run.way == "shm" and case.strategy in GOSSIPING):
        assert seen[0].bytes_sent == expected.bytes_sent
