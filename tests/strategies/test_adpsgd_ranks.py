"""AD-PSGD on ranks that share memory. The functions that the ranks run are in helpers/adpsgd_ranks.py.

No run can be repeated, so these tests hold what is true of every run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ddpcore.bench.config import BenchConfig, resolve
from ddpcore.training import TrainConfig
from ddpcore.training.build import check_connection
from helpers import adpsgd_ranks as trials
from helpers import ranks

Outcome = list[tuple[int, str]]  # of each rank: exit status, output
KILLED = -9


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("adpsgd")
    path = folder / "outcomes.pt"
    done = ranks.python("-m", "helpers.adpsgd_ranks", path, cwd=folder, ADPSGD_FOLDER=str(folder))
    assert done.returncode == 0, done.stderr
    return torch.load(path)


@pytest.fixture
def outcome(outcomes: dict[str, Outcome]) -> Callable[..., Outcome]:
    return lambda function, *arguments: outcomes["-".join([function.__name__, *map(str, arguments)])]


@pytest.mark.parametrize(
    ("function", "world_size", "says"),
    [
        (trials.trains, 4, "right"),
        (trials.meets, 4, "True"),
        (trials.is_slow, 3, "20 True"),
        (trials.resumes, 2, "True 5\nTrue"),
    ],
)
def test_what_is_true_of_every_run(function: Any, world_size: int, says: str, outcome: Callable[..., Outcome]) -> None:
    assert outcome(function, world_size) == [(0, f"{says}\n")] * world_size


def test_a_rank_that_is_killed_is_named(outcome: Callable[..., Outcome]) -> None:
    seen = outcome(trials.dies, 3)
    assert seen[1] == (KILLED, "")
    for status, output in (seen[0], seen[2]):
        assert status == 0
        assert re.match(r"RuntimeError: rank 1 is gone \(it died or left\) after its last step: .*\n$", output), output


def test_a_rank_that_is_killed_in_an_average_is_named(outcome: Callable[..., Outcome]) -> None:
    """Nobody uses the weights that it has written in part."""
    seen = outcome(trials.dies_in_an_average, 3)
    assert seen[1] == (KILLED, "")
    for status, output in (seen[0], seen[2]):
        assert status == 0
        assert output == (
            "RuntimeError: rank 1 is gone (it died or left) in the middle of an average, so the weights of rank 0 are "
            "lost: begin at the last checkpoint\n"
        )


def test_a_rank_that_keeps_a_lock_is_reported(outcome: Callable[..., Outcome]) -> None:
    (status, output), (other_status, _) = outcome(trials.stops_in_an_average, 2)
    assert (status, other_status) == (0, 0)
    assert re.match(r"RuntimeError: the weights of rank \d were locked for 0.5 s: is a rank stopped\?\n$", output), (
        output
    )


@pytest.mark.parametrize("what", ["pg", "link", "rows", "speeds"])
def test_what_ranks_are_refused(what: str, outcome: Callable[..., Outcome]) -> None:
    says = "adpsgd: speeds is for virtual" if what == "speeds" else "adpsgd does not run over transport="
    for status, output in outcome(trials.is_refused, 2, what):
        assert status == 0
        assert output.startswith(f"ValueError: {says}")
        assert output.count("\n") == 1


def test_commands_refuse_transports_before_they_start_ranks() -> None:
    def bench(**options: Any) -> str | None:
        config = BenchConfig(strategies=("adpsgd",), device="cpu", **options)
        return resolve(config, world_size=4, num_gpus=0).transport_name

    assert (bench(), bench(backend="virtual")) == ("shm", None)
    with pytest.raises(ValueError, match="adpsgd does not run over transport='pg'"):
        bench(transport="pg")

    def check(num_ranks: int, num_hosts: int = 1, **options: Any) -> None:
        run = {"strategy": "adpsgd", "steps": 1, "learners": 4, "batch_size": 4, "device": "cpu", **options}
        check_connection(TrainConfig(**run), num_ranks, num_hosts)

    check(1)
    check(4)
    check(1, strategy_options={"speeds": [1, 1, 1, 0.5]})
    for refused in (
        {"num_ranks": 2},
        {"num_ranks": 4, "transport": "pg"},
        {"num_ranks": 4, "num_hosts": 2},
        {"num_ranks": 4, "link": "1Gb/s,1us"},
    ):
        with pytest.raises(ValueError, match=r"adpsgd does not run over transport='(pg|link)'"):
            check(**refused)
    with pytest.raises(ValueError, match="adpsgd: speeds is for virtual learners"):
        check(4, strategy_options={"speeds": [1, 1, 1, 0.5]})
    with pytest.raises(ValueError, match="other than ddp, push_sum and adpsgd"):
        check(1, statistics_every=5)
    with pytest.raises(ValueError, match="adpsgd does not show the mean of its learners"):
        check(1, hessian_every=5)
