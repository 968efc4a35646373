"""A run's folder after a crash, on a full disk, and when two processes use it."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpcore.records.run import RECORD
from ddpcore.storage.files import locked
from ddpcore.storage.json_lines import JsonLines, read_lines
from ddpcore.training import RunRecord, train
from ddpcore.training import run as run_module
from ddpcore.training.trainer import Trainer
from helpers import images as helper


def run(out: Path, resume: bool = False, **fields: Any) -> RunRecord:
    return train(helper.config(fields), out=out, resume=resume, dataset=helper.images())


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A run of six steps, stopped after the checkpoint of step 4."""
    out = tmp_path / "stopped"
    run(out, run={"checkpoint_every": 4})
    (out / "model.safetensors").unlink()
    lines = (out / RECORD).read_text().splitlines(keepends=True)
    (out / RECORD).write_text("".join(line for line in lines if json.loads(line)["kind"] != "end"))
    return out


@pytest.mark.parametrize("damage", ["empty", "missing", "half a line"])
def test_a_record_that_a_crash_has_cut(damage: str, stopped: Path, tmp_path: Path) -> None:
    """A run can be resumed from its checkpoints alone; it then writes its header again."""
    path = stopped / RECORD
    text = path.read_text()
    {
        "empty": lambda: path.write_text(""),
        "missing": path.unlink,
        "half a line": lambda: path.write_text(text + '{"kind": "epoch", "st'),
    }[damage]()
    seen = run(stopped, run={"checkpoint_every": 4}, resume=True)
    through = run(tmp_path / "through", run={"checkpoint_every": 4})
    assert seen.header["config"] == through.header["config"]
    assert [row["step"] for row in seen.resumed] == [4] and seen.resumed[0]["device"] == through.header["device"]
    assert seen.final["accuracy"] == through.final["accuracy"]
    ends = [(out / "model.safetensors").read_bytes() for out in (stopped, tmp_path / "through")]
    assert ends[0] == ends[1]


@pytest.mark.parametrize("number", [0, 1])
def test_a_resumed_run_says_which_lines_it_dropped(
    number: int, stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A digit of the header, or of the first epoch, has changed. The weights are those of a run through."""
    path = stopped / RECORD
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number] = lines[number].replace(b'"kind": "', b'"kind": "x', 1)
    path.write_bytes(b"".join(lines))
    seen = run(stopped, run={"checkpoint_every": 4}, resume=True)
    said = f"ddpcore: {path}: line {number + 1} is damaged: it does not match its checksum: the run goes on without it"
    assert said in capsys.readouterr().err.splitlines()
    assert not RunRecord.read(stopped).problems
    through = run(tmp_path / "through", run={"checkpoint_every": 4})
    assert seen.header["config"] == through.header["config"]
    assert [row["step"] for row in seen.epochs] == [4, 6], "the checkpoint has what the damaged row had"
    ends = [(out / "model.safetensors").read_bytes() for out in (stopped, tmp_path / "through")]
    assert ends[0] == ends[1]


def test_checkpoints_without_a_record_are_a_run(stopped: Path) -> None:
    """Another run would remove them when it saves its own."""
    (stopped / RECORD).unlink()
    before = sorted(path.name for path in (stopped / "checkpoints").iterdir())
    with pytest.raises(ValueError, match="holds a run already"):
        run(stopped, run={"checkpoint_every": 4})
    assert sorted(path.name for path in (stopped / "checkpoints").iterdir()) == before


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path / "out"), pytest.raises(ValueError, match="another process works in it"):
        run(tmp_path / "out")
    assert run(tmp_path / "out").final["step"] == 6


def test_a_run_that_was_made_meanwhile_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process can train in the folder between the first check of the folder and the lock."""
    build = run_module.build_trainer

    def slowly(*args: Any) -> Any:
        monkeypatch.setattr(run_module, "build_trainer", build)
        run(tmp_path, run={"steps": 5})
        return build(*args)

    monkeypatch.setattr(run_module, "build_trainer", slowly)
    with pytest.raises(ValueError, match="holds a run already"):
        run(tmp_path, run={"steps": 3})
    seen = RunRecord.read(tmp_path)
    assert (seen.header["total_steps"], seen.final["step"]) == (5, 5)


def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    """A limit of the file size simulates a full disk."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    path = tmp_path / "rows.jsonl"
    with JsonLines(path) as rows:
        rows.append({"step": 1})
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(path) + 5, limits[1]))
        try:
            with pytest.raises(OSError, match="is the disk full"):
                rows.append({"step": 2})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
        rows.append({"step": 3})
    assert [row["step"] for row in read_lines(path).rows] == [1, 3]


def test_weights_that_blow_up_in_the_last_step_are_a_divergence(tmp_path: Path) -> None:
    seen = run(tmp_path, optimizer={"lr": 1e30, "name": "torch_sgd"}, run={"steps": 1})
    assert seen.final["diverged"]
    assert seen.final["best_accuracy"] is None


def test_local_buffers_are_scored_as_those_of_the_first_learner() -> None:
    """Each rank evaluates a part of one split, so all must have the same model."""

    class First:
        learners = (1,)

        def broadcast_(self, rows: Tensor) -> None:
            rows.fill_(7)

    model = nn.BatchNorm1d(3)
    handle = SimpleNamespace(comm=First(), evaluation_model=lambda *_: model)
    Trainer.evaluation_model(SimpleNamespace(handle=handle), "local")
    assert torch.equal(model.running_mean, torch.full((3,), 7.0)) and model.num_batches_tracked == 7
