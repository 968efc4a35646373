"""``train`` with ``on_failure="shrink"``: the run goes on when a rank is killed, also the one that writes."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpcore.data import Split
from ddpcore.options.fields import dotted
from ddpcore.records.run import RunRecord
from ddpcore.runtime import launch
from ddpcore.storage.json_lines import read_lines
from ddpcore.training import TrainConfig
from ddpcore.training import __main__ as command
from ddpcore.training.config import merged
from ddpcore.training.trainer import evaluate
from helpers import elastic_ranks, forked, joined_ranks, ranks

pytestmark = pytest.mark.slow

STEPS_PER_EPOCH = 17
LEFT = [1, 2, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run of four ranks whose rank 0 was killed, and of two runs that resume it, see ``main_whole``."""
    folder = tmp_path_factory.mktemp("shrink")
    ranks.succeeds("-m", "helpers.elastic_ranks", "main_whole", folder / "run", 2 * STEPS_PER_EPOCH)
    return folder


@pytest.fixture(scope="module")
def ended(folder: Path) -> list[tuple[dict[int, int], str]]:
    """The exit codes of the ranks of each run, and what they said."""
    return torch.load(folder / "run.pt")


def test_a_run_goes_on_without_the_rank_that_wrote_it(folder: Path, ended: list[tuple[dict[int, int], str]]) -> None:
    """Another one writes on, and the model and the end are there."""
    codes, said = ended[0]
    assert codes == {0: -signal.SIGKILL, 1: 0, 2: 0, 3: 0}, said
    assert "ddpcore: learner 0 is gone, and what it held is lost: 3 learners go on" in said
    run = RunRecord.read(folder / "run")
    assert run.final["step"] == run.header["total_steps"] > 6 * STEPS_PER_EPOCH - 6
    assert run.final["accuracy"] > 0.8
    (change,) = run.members
    assert change["lost"] == [0] and change["members"] == LEFT
    assert change["text"].startswith("learner 0 is gone, and what it held is lost: 3 learners go on")
    steps = [row["step"] for row in run.epochs]
    assert steps == sorted(set(steps)) and len(steps) == 6, "no epoch is missing or written twice"
    assert (folder / "run" / "model.safetensors").exists()


def test_checkpoints_after_a_death_have_the_ranks_that_are_left(folder: Path) -> None:
    """Also the one in which the death was found out."""
    found = {}
    for path in (folder / "run" / "checkpoints").iterdir():
        manifest = json.loads((path / "manifest.json").read_text())["manifest"]
        found[manifest["step"]] = manifest["members"]
        assert sorted(manifest["files"]) == sorted(
            f"rank-{one}.{kind}" for one in manifest["members"] for kind in ("json", "safetensors")
        )
    assert found == {STEPS_PER_EPOCH * epoch: [0, *LEFT] if epoch == 1 else LEFT for epoch in range(1, 7)}


def test_a_resumed_run_ends_with_the_same_bits(folder: Path, ended: list[tuple[dict[int, int], str]]) -> None:
    """The ranks that are left, with their ids, their topology (a hypercube of three is a ring) and their samples."""
    codes, said = ended[1]
    assert codes == dict.fromkeys(range(3), 0), said
    models = [(folder / name / "model.safetensors").read_bytes() for name in ("run", "resumed3")]
    assert models[0] == models[1]
    before, after = (RunRecord.read(folder / name) for name in ("run", "resumed3"))
    assert [row["train_loss"] for row in after.epochs] == [row["train_loss"] for row in before.epochs]
    assert [(row["step"], row["members"]) for row in after.resumed] == [(2 * STEPS_PER_EPOCH, LEFT)]
    for rank, last in enumerate((2, 6, 6, 6)):
        lines = read_lines(folder / "resumed3" / "steps" / f"rank-{rank}.jsonl").rows
        assert [line["step"] for line in lines] == list(range(1, last * STEPS_PER_EPOCH + 1))
        assert {(*line["learners"],) for line in lines} == {(rank,)}


def test_too_many_ranks_are_told_how_many_are_left(folder: Path, ended: list[tuple[dict[int, int], str]]) -> None:
    codes, said = ended[2]
    assert codes == dict.fromkeys(range(4), 1)
    message = "ValueError: the last checkpoint has the learners [1, 2, 3] that were left, and these are 4 ranks: "
    assert message + "resume with 3 ranks and strategy.learners=4" in said


def test_the_command_starts_the_ranks_that_are_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the words of the first start and --resume."""
    started: list[Any] = []
    monkeypatch.setattr(launch, "run", lambda worker, args, **options: started.append((args[0], options)))
    words = [
        f"{key}={str(value).lower()}"
        for key, value in dotted(elastic_ranks.WHOLE).items()
        if key != "strategy.learners"
    ]
    assert command.main(["--out", str(folder / "run"), "--world-size", "4", "--resume", *words]) == 0
    ((config, options),) = started
    assert config == TrainConfig.from_dict(elastic_ranks.WHOLE)
    assert options["world_size"] == 3
    assert capsys.readouterr().err == ("ddpcore train: the run goes on with the learners [1, 2, 3] that are left\n")


def test_a_rank_joins_a_run(tmp_path: Path) -> None:
    """It takes the number of the rank that was killed, and writes nothing but its checkpoints and steps."""
    out = tmp_path / "run"
    ranks.succeeds("-m", "helpers.elastic_ranks", "main_joined", out)
    codes, said = torch.load(out.with_suffix(".pt"))
    assert codes == {0: -signal.SIGKILL, 1: 0, 2: 0, 3: 0}, said
    run = RunRecord.read(out)
    assert [(row["lost"], row["joined"], row["members"]) for row in run.members] == [
        ([0], [], [1, 2]), ([], [0], [0, 1, 2]),
    ]  # fmt: skip
    assert [row["epoch"] for row in run.epochs] == [1, 2, 3, 4, 5, 6]
    assert f"finished step {run.final['step']}, accuracy " in said
    last = max((out / "checkpoints").iterdir())
    assert json.loads((last / "manifest.json").read_text())["manifest"]["members"] == [0, 1, 2]
    lines = [line for path in (out / "steps").iterdir() for line in read_lines(path).rows]
    steps = [line["step"] for line in lines if line["learners"] == [0]]
    first = run.epochs[1]["step"]
    assert steps[:first] == list(range(1, first + 1)), "until it was killed"
    assert steps[first:] == list(range(steps[first], run.final["step"] + 1)), "after it has joined"
    assert run.epochs[2]["step"] < steps[first] <= run.epochs[4]["step"]
    for before, row in zip(run.epochs, run.epochs[1:], strict=False):
        losses = [line["loss"][0] for line in lines if before["step"] < line["step"] <= row["step"]]
        assert sum(losses) / len(losses) == pytest.approx(row["train_loss"], rel=1e-6)
    assert not (out / "join.json").exists()


def test_a_rank_that_joins_while_the_one_that_writes_is_dead(tmp_path: Path) -> None:
    """It knows who writes, also before the record has the death. If it is the next one, no row is missing."""
    ranks.succeeds("-m", "helpers.joined_ranks", tmp_path)
    ended = torch.load(tmp_path / "ended.pt")
    for number, (deaths, (codes, said)) in enumerate(zip(joined_ranks.DEATHS, ended, strict=True)):
        assert codes == {one: -signal.SIGKILL if one in deaths else 0 for one in range(5)}, said
        run, left, last = RunRecord.read(tmp_path / f"run{number}"), {0, 1, 2, 3}, max(deaths, key=deaths.__getitem__)
        assert [row["epoch"] for row in run.epochs] == [1, 2, 3]
        assert run.final["step"] == run.header["total_steps"]
        assert (tmp_path / f"run{number}" / "model.safetensors").exists()
        changes = [*(([one], []) for one in deaths if one != last), ([], [0]), ([last], [])]
        assert [(row["lost"], row["joined"]) for row in run.members] == changes
        for row, (lost, joined) in zip(run.members, changes, strict=True):
            left = left.difference(lost).union(joined)
            assert row["members"] == sorted(left)
        began, row = run.epochs[0]["step"], run.epochs[1]
        lines = read_lines(tmp_path / f"run{number}" / "steps" / f"rank-{max(left)}.jsonl").rows
        seconds = [line["seconds"] for line in lines if began < line["step"] <= row["step"]]
        assert row["seconds"] > 0.9 * sum(seconds), "those before it has joined count, too"


def test_rows_that_a_dying_rank_was_to_write_are_written_once(tmp_path: Path) -> None:
    """By the next one, if the rank that writes dies before or after the row of an epoch or of the end."""
    out = tmp_path / "run"
    ranks.succeeds("-m", "helpers.elastic_ranks", "main_ended", out)
    codes, said = torch.load(out.with_suffix(".pt"))
    assert codes == {**dict.fromkeys(range(3), -signal.SIGKILL), 3: 0, 4: 0}, said
    rows = read_lines(out / "record.jsonl").rows
    assert [row["kind"] for row in rows] == ["run", "members", "epoch", "epoch", "members", "end", "members"]
    (end,) = (row for row in rows if row["kind"] == "end")
    assert end["step"] == rows[0]["total_steps"] and end["flatness"] and end["accuracy"] > 0.3
    assert (out / "model.safetensors").exists()


def test_one_torchrun_for_each_rank(tmp_path: Path) -> None:
    """Rank 1 is killed, so its agent ends; the other two finish the run. The commands of docs/multihost.md."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    out, agents = tmp_path / "run", []
    for number in range(3):
        words = ["-m", "torch.distributed.run", "--nnodes", "3", "--nproc-per-node", "1", "--node-rank", str(number)]
        words += ["--master-addr", "127.0.0.1", "--master-port", str(port), "-m", "ddpcore", "train", "--out", str(out)]
        words += ["model=mlp", "data=digits", "data.batch_size=60", "run.epochs=30"]
        words += ["strategy=dpsgd", "strategy.on_failure=shrink"]
        agents.append(forked.start(words, ranks.log_folder(tmp_path, number), ranks.environment(), Path.cwd()))
    try:
        _wait_until((out / "checkpoints" / "step-00000023").exists, agents)
        (worker,) = Path(f"/proc/{agents[1].pid}/task/{agents[1].pid}/children").read_text().split()
        os.kill(int(worker), signal.SIGKILL)
        _wait_until((out / "model.safetensors").exists, agents)
        _wait_until(lambda: bool(RunRecord.read(out).final), agents)
    finally:
        for agent in agents:  # those that are left would wait 300 s for the other one, also after SIGTERM
            agent.kill()
            agent.join()
    run = RunRecord.read(out)
    assert [row["lost"] for row in run.members] == [[1]]
    assert run.final["step"] == run.header["total_steps"] == 30 * 23


def _wait_until(is_true: Callable[[], bool], agents: list[Any]) -> None:
    deadline = time.monotonic() + 300
    while not is_true():
        assert time.monotonic() < deadline and sum(agent.is_alive() for agent in agents) > 1, "the run has ended"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strategy": "ddp"}, "ddp: it ends when a rank dies: take 'raise', or another strategy"),
        ({"strategy": {"name": "single", "learners": 1}}, "2 learners must be left, and learners is 1: take more"),
        ({"strategy": {"learners": 2}}, "2 learners must be left, and learners is 2: take more"),
        ({"run": {"statistics_every": 5}}, "statistics need a fixed number of ranks"),
        ({"strategy": {"link": "1Gb/s,1ms"}}, "an emulated link needs a fixed number of ranks"),
        ({"data": {"shards": "dirichlet"}}, "it deals samples again, and shards is 'dirichlet': take 'even'"),
        ({"data": {"sampler": "fixed"}}, "samples are dealt again with sampler 'global' and drop_last"),
        ({"strategy": {"compression": "topk", "topology": "ring"}}, "topk sends differences"),
    ],
)
def test_configs_that_cannot_go_on_are_refused(fields: dict, message: str) -> None:
    known = {
        "strategy": {"name": "dpsgd", "learners": 4, "on_failure": "shrink"},
        "data": {"batch_size": 60},
        "run": {"epochs": 1},
    }
    with pytest.raises(ValueError, match=message) as error:
        TrainConfig.from_dict(merged(known, fields))
    assert "\n" not in str(error.value)


class _Dying:
    """Of two learners, the other one dies in the first gathering."""

    learners, num_learners, rows_read = (0,), 2, (0,)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        self.num_learners = 1
        return values


def test_an_evaluation_in_which_a_rank_dies_has_all_samples() -> None:
    """Its part is evaluated by the others."""
    inputs, labels = torch.eye(4)[[0, 1, 2, 3, 0, 2]], torch.tensor([0, 1, 2, 3, 1, 2])
    found = evaluate(torch.nn.Identity(), Split(inputs, labels), 4, _Dying())
    assert int(found.confusion.sum()) == 6
    expected = torch.nn.functional.cross_entropy(inputs, labels)
    assert found.loss == pytest.approx(expected.item(), rel=1e-6)
