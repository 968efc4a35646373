"""Four real ranks on one device, and one rank over NCCL, against virtual learners on the CPU.

A GPU rounds matrix products in another way, so its weights may differ by 1e-4 of the largest weight. That is about 800
ULPs after six steps. An average with a wrong learner gives a far larger difference (``test_strategies_differ``).
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from ddpcore.testing.learners import Result
from helpers import device_ranks as helper
from helpers import ranks

TOLERANCES = {"cpu": 4 * torch.finfo(torch.float32).eps, "cuda": 1e-4}
RUNS = [
    pytest.param(
        device, transport, case, marks=[pytest.mark.cuda] if device == "cuda" else [], id=f"{device}-{transport}-{case}"
    )
    for device, transports in helper.TRANSPORTS.items()
    for transport in transports
    for case in helper.runs(device, transport)
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def virtual(case: Any) -> Result:
    """Virtual learners on the CPU."""
    return helper.train(case)


@pytest.fixture(scope="module")
def real() -> list[dict[Any, Any]]:
    return ranks.run("device_ranks", helper.WORLD_SIZE)


def check(seen: Result, expected: Result, row: int, device: str) -> None:
    largest = expected.weights.abs().max()
    pairs = {"weights": (seen.weights, expected.weights[row : row + 1]), "average": (seen.average, expected.average)}
    for name, (ours, theirs) in pairs.items():
        assert (ours - theirs).abs().max() <= TOLERANCES[device] * largest, name
    torch.testing.assert_close(seen.losses[:, 0], expected.losses[:, row], rtol=1e-3, atol=1e-5)


def skip_without(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no CUDA device")


@pytest.mark.parametrize(("device", "transport", "case"), RUNS)
def test_real_ranks_on_one_device(device: str, transport: str, case: Any, request: pytest.FixtureRequest) -> None:
    skip_without(device)
    expected = virtual(case)
    for rank, seen in enumerate(request.getfixturevalue("real")):
        check(seen[device, transport, tuple(case)], expected, rank, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", helper.ALONE, ids=str)
def test_one_rank(case: Any, device: str, request: pytest.FixtureRequest) -> None:
    """On a GPU over NCCL."""
    skip_without(device)
    seen = request.getfixturevalue("real")[0][device, "alone", tuple(case)]
    if isinstance(seen, Exception):
        raise seen
    check(seen, virtual(case), 0, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", helper.CASES, ids=str)
def test_virtual_learners(case: Any, device: str) -> None:
    skip_without(device)
    expected, seen = virtual(case), helper.train(case, device=device)
    for row in range(helper.WORLD_SIZE):
        one = replace(seen, weights=seen.weights[row : row + 1], losses=seen.losses[:, row : row + 1])
        check(one, expected, row, device)
