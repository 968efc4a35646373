"""AD-PSGD on ranks, over shared memory and over gloo. The functions that the ranks run are in helpers/adpsgd_ranks.py.

No run can be repeated, so these tests hold what is true of every run.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from ddpcore.bench.config import BenchConfig, resolve
from ddpcore.training import TrainConfig
from ddpcore.training.build import check_connection
from ddpcore.training.config import merged
from helpers import adpsgd_ranks as trials
from helpers import ranks

Outcome = list[tuple[int, str]]  # of each rank: exit status, output
KILLED = -9
TIMES = 2  # that ranks end in each way: the clean-up of an interpreter takes a second of CPU time


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder, is_whole = tmp_path_factory.mktemp("adpsgd"), ranks.has_slow_items(request)
    return ranks.Trials("adpsgd_ranks", folder, all_at_once=is_whole, ADPSGD_FOLDER=str(folder))


@pytest.fixture(scope="module")
def endings() -> dict[str, list[list[int]]]:
    """The exit codes of each way to end, each time."""
    command = [sys.executable, ranks.HERE / "exit_ranks.py", str(TIMES)]
    done = subprocess.run(command, env=ranks.environment(), capture_output=True, text=True, timeout=ranks.LIMIT)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[list[int]]] = {}
    for how, *codes in map(str.split, done.stdout.splitlines()):
        found.setdefault(how, []).append([int(code) for code in codes])
    return found


@pytest.fixture
def outcome(outcomes: dict[str, Outcome]) -> Callable[..., Outcome]:
    return lambda function, *arguments: outcomes["-".join([function.__name__, *map(str, arguments)])]


@pytest.mark.parametrize("transport", ["shm", "pg"])
@pytest.mark.parametrize(
    ("function", "world_size", "says"),
    [
        (trials.trains, 4, "right"),
        pytest.param(trials.meets, 4, "True", marks=pytest.mark.slow),
        (trials.is_slow, 3, "20 True"),
        pytest.param(trials.resumes, 2, "True 5\nTrue", marks=pytest.mark.slow),
        (trials.begins_again, 2, "True"),
        (trials.trains_accelerated, 4, "right"),
        pytest.param(trials.meets_in_order, 3, "True", marks=pytest.mark.slow),
        (trials.resumes_accelerated, 2, "True True True"),
        pytest.param(trials.saves, 3, "right", marks=pytest.mark.slow),
    ],
)
def test_what_is_true_of_every_run(
    function: Any, world_size: int, says: str, transport: str, outcome: Callable[..., Outcome]
) -> None:
    assert outcome(function, world_size, transport) == [(0, f"{says}\n")] * world_size


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named(outcome: Callable[..., Outcome]) -> None:
    seen = outcome(trials.dies, 3, "shm")
    assert seen[1] == (KILLED, "")
    for status, output in (seen[0], seen[2]):
        assert status == 0
        assert re.match(r"RuntimeError: rank 1 is gone \(it died or left\) after its last step: .*\n$", output), output


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(("function", "dead"), [("dies", 1), ("dies_in_a_meeting", 0), ("dies_in_a_meeting", 2)])
def test_over_gloo_a_rank_that_is_killed_is_an_error(function: str, dead: int, outcome: Callable[..., Outcome]) -> None:
    seen = outcome(getattr(trials, function), 3, "pg" if function == "dies" else dead)
    assert seen[dead] == (KILLED, "")
    for status, output in (one for rank, one in enumerate(seen) if rank != dead):
        assert status == 0
        assert re.match(
            r"RuntimeError: an average with rank \d failed on rank \d: it, or one that it waits for, died, left or",
            output,
        )
        assert output.count("\n") == 1


@pytest.mark.slow
def test_over_gloo_a_rank_that_does_not_answer_is_an_error(outcome: Callable[..., Outcome]) -> None:
    status, output = outcome(trials.does_not_answer, 2)[0]
    assert status == 0
    assert "an average with rank 1 failed on rank 0: it, or one that it waits for, died, left or did not come" in output
    assert "within 2 s" in output


@pytest.mark.slow
def test_over_gloo_threads_end_with_the_last_rank(outcome: Callable[..., Outcome]) -> None:
    assert outcome(trials.ends, 3) == [(0, "ended\n")] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "allowed"),
    [
        ("orderly", {0: {0}, 1: {0}, 2: {0}}),
        ("early", {0: {0}, 1: {0, 3}, 2: {0, 3}}),
        ("error", {0: {0, 3}, 1: {1}, 2: {0, 3}}),
    ],
)
def test_over_gloo_no_thread_aborts_an_interpreter_that_ends(
    how: str, allowed: dict[int, set[int]], endings: dict[str, list[list[int]]]
) -> None:
    """Of three ranks: 0 is an orderly end, 1 an error of its own, 3 an error that says that a peer left."""
    assert len(endings[how]) == TIMES
    for codes in endings[how]:
        assert all(code in allowed[rank] for rank, code in enumerate(codes)), codes


@pytest.mark.slow
def test_over_gloo_the_others_go_on_when_a_rank_has_left(outcome: Callable[..., Outcome]) -> None:
    seen = outcome(trials.leaves, 3)
    assert seen[1] == (0, "")
    for rank in (0, 2):
        status, output = seen[rank]
        lines = output.splitlines()
        assert status == 0
        assert lines[2:] == ["1.0"], output
        for line in lines[:2]:
            assert line.startswith(f"an average with rank 1 failed on rank {rank}: it has left: end training with a")


@pytest.mark.slow
def test_over_gloo_a_model_keeps_its_weights_when_an_average_fails(outcome: Callable[..., Outcome]) -> None:
    assert outcome(trials.keeps_weights, 2)[0] == (0, "True\n")


@pytest.mark.slow
def test_a_rank_that_keeps_a_lock_is_reported(outcome: Callable[..., Outcome]) -> None:
    (status, output), (other_status, _) = outcome(trials.stops_in_an_average, 2)
    assert (status, other_status) == (0, 0)
    assert re.match(r"RuntimeError: the weights of rank \d were locked for 0.5 s: is a rank stopped\?\n$", output), (
        output
    )


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("link", "adpsgd does not run over transport='link'"),
        ("rows", "adpsgd does not run over several learners on each rank: take virtual learners"),
        ("speeds", "adpsgd does not run over transport='shm': speeds is for virtual"),
    ],
)
def test_what_ranks_are_refused(what: str, says: str, outcome: Callable[..., Outcome]) -> None:
    for status, output in outcome(trials.is_refused, 2, what):
        assert status == 0
        assert output.startswith(f"ValueError: {says}")
        assert output.count("\n") == 1


def test_commands_refuse_transports_before_they_start_ranks() -> None:
    def bench(*settings: str, **options: Any) -> str | None:
        config = BenchConfig(settings=("run.device=cpu", *settings), strategies=("adpsgd",), **options)
        return resolve(config, world_size=4, num_gpus=0).transport_name

    assert (bench(), bench(backend="virtual"), bench("strategy.transport=pg")) == ("shm", None, "pg")

    def check(num_ranks: int, num_hosts: int = 1, **options: Any) -> None:
        run = merged(
            {
                "strategy": {"name": "adpsgd", "learners": 4},
                "run": {"steps": 1, "device": "cpu"},
                "data": {"batch_size": 4},
            },
            options,
        )
        check_connection(TrainConfig.from_dict(run), num_ranks, num_hosts)

    check(1)
    check(4)
    check(4, strategy={"transport": "pg"})
    check(4, num_hosts=2)
    check(1, strategy={"speeds": [1, 1, 1, 0.5]})
    with pytest.raises(ValueError, match="adpsgd does not run over several learners on each rank: take virtual"):
        check(2)
    with pytest.raises(ValueError, match="adpsgd does not run over transport='link'"):
        check(4, strategy={"link": "1Gb/s,1us"})
    with pytest.raises(ValueError, match="speeds is for virtual learners"):
        check(4, strategy={"speeds": [1, 1, 1, 0.5]})
    with pytest.raises(ValueError, match="statistics_every is 5: adpsgd computes gradients at older weights"):
        check(1, run={"statistics_every": 5})
    with pytest.raises(ValueError, match=r"hessian_every is .*: adpsgd computes gradients at older weights"):
        check(1, run={"hessian_every": 5})
