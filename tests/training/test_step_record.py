"""``record_steps``: a line for each step and rank, also after a restart, and ranges for torch's profiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ddpcore.storage.json_lines import read_lines
from ddpcore.topology.describe import edges_of
from ddpcore.training import Interrupted, train
from ddpcore.training.build import LearnerPlacement, build_trainer
from ddpcore.training.checkpoint import Checkpoints
from ddpcore.training.trainer import Trainer
from helpers import images as helper
from helpers import ranks

NAMES = {"before_forward", "bucket_ready", "after_backward", "before_step", "after_step"}  # in torch's profiler


def config(**fields: Any) -> Any:
    return helper.config(
        fields, strategy={"learners": 2, "name": "dpsgd", "topology": "ring"}, run={"record_steps": True}
    )


def steps_of(out: Path, rank: int = 0) -> list[dict[str, Any]]:
    return read_lines(out / "steps" / f"rank-{rank}.jsonl").rows


def test_virtual_learners(tmp_path: Path) -> None:
    record = train(config(), out=tmp_path, dataset=helper.images())
    lines = steps_of(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines:
        assert line["learners"] == [0, 1] and line["waits"] == {}
        assert line["compute"] + line["exposed"] == pytest.approx(line["seconds"])
        assert 0 < line["exposed"] < line["seconds"]
        assert line["overlapped"] == 0.0, "nothing is sent to another process"
    first = lines[: record.epochs[0]["step"]]
    mean = sum(sum(line["loss"]) / 2 for line in first) / len(first)
    assert mean == pytest.approx(record.epochs[0]["train_loss"]), "the recorded losses are those of training"
    for epoch in record.epochs:
        assert lines[epoch["step"] - 1]["consensus_distance"] == epoch["consensus_distance"] > 0


def test_a_checkpoint_is_not_newer_than_the_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed after a checkpoint goes on there, and does not take the steps before it again."""
    seen, save = {}, Checkpoints.save

    def look(self: Checkpoints, step: int, *args: Any, **more: Any) -> bool:
        seen[step] = [line["step"] for line in steps_of(tmp_path)]
        return save(self, step, *args, **more)

    monkeypatch.setattr(Checkpoints, "save", look)
    train(config(run={"checkpoint_every": 2}), out=tmp_path, dataset=helper.images())
    assert {2, 4} <= seen.keys()
    assert all(lines == [*range(1, step + 1)] for step, lines in seen.items())


def test_the_header_has_the_topology(tmp_path: Path) -> None:
    record = train(config(run={"steps": 1}), out=tmp_path / "gossip", dataset=helper.images())
    drawn = record.header["topology"]
    built = config().make_topology()
    assert drawn["num_learners"] == 2 and drawn["spectral_gap"] == pytest.approx(built.spectral_gap(2))
    assert [tuple(edge) for edge in drawn["edges"]] == edges_of(built, 2) == [(0, 1), (1, 0)]
    plain = helper.config(strategy={"learners": 2, "name": "ssgd"}, run={"steps": 1})
    assert train(plain, out=tmp_path / "all", dataset=helper.images()).header["topology"] is None


def test_recording_changes_no_bit_and_may_change_on_resume(tmp_path: Path) -> None:
    for name, recorded in (("with", True), ("without", False)):
        settings = helper.config(
            strategy={"learners": 2, "name": "dpsgd", "topology": "ring"}, run={"record_steps": recorded}
        )
        train(settings, out=tmp_path / name, dataset=helper.images())
    contents = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("with", "without")]
    assert contents[0] == contents[1]
    assert not (tmp_path / "without" / "steps").exists()
    assert not config().difference(
        helper.config(strategy={"learners": 2, "name": "dpsgd", "topology": "ring"}).to_dict()
    )


def test_a_resumed_run_has_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainer.step

    def failing(self: Trainer) -> torch.Tensor:
        if self.num_steps == 5:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Trainer, "step", failing)
    with pytest.raises((KeyboardInterrupt, Interrupted)):
        train(config(), out=tmp_path, dataset=helper.images())
    assert [line["step"] for line in steps_of(tmp_path)] == [1, 2, 3, 4, 5], "an error loses no step"
    monkeypatch.setattr(Trainer, "step", step)
    train(config(), out=tmp_path, dataset=helper.images(), resume=True)  # from the checkpoint after step 3 or 4
    assert [line["step"] for line in steps_of(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_resumed_run_says_which_steps_were_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All other steps stay, and it writes the ones after its checkpoint."""
    step = Trainer.step

    def failing(self: Trainer) -> torch.Tensor:
        if self.num_steps == 5:
            raise RuntimeError("the machine fails")
        return step(self)

    monkeypatch.setattr(Trainer, "step", failing)
    with pytest.raises(RuntimeError, match="the machine fails"):
        train(config(), out=tmp_path, dataset=helper.images())
    monkeypatch.setattr(Trainer, "step", step)
    path = tmp_path / "steps" / "rank-0.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[1].replace(b"0", b"1", 1), *lines[2:-1], lines[-1][:-20]]))
    train(config(), out=tmp_path, dataset=helper.images(), resume=True)
    assert [line["step"] for line in steps_of(tmp_path)] == [1, 3, 4, 5, 6]
    said = [line for line in capsys.readouterr().err.splitlines() if "rank-0.jsonl" in line]
    assert [line.partition(str(path))[2] for line in said] == [
        ": line 2 is damaged: it does not match its checksum: the run goes on without it",
        ": line 5 is incomplete, as after a crash: the run goes on without it",
    ]


def test_a_line_with_a_damaged_step_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "rank-0.jsonl").write_text('{"step": "x"}\n{"step": null}\n{"loss": [1]}\n')
    train(config(run={"steps": 2}), out=tmp_path, dataset=helper.images())
    assert [line["step"] for line in steps_of(tmp_path)] == [1, 2]


@pytest.mark.parametrize("strategy", ["dpsgd", "ssgd"])
def test_ranges_in_the_profiler(strategy: str) -> None:
    settings = helper.config(strategy={"learners": 2, "name": strategy, "topology": "ring"})
    trainer = build_trainer(LearnerPlacement.of(settings, None), helper.images())
    trainer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        trainer.step()
    found = {event.key for event in profile.key_averages() if event.key.startswith("ddpcore::")}
    expected = NAMES - (set() if strategy == "ssgd" else {"bucket_ready", "after_backward"})
    assert found >= {f"ddpcore::{name}" for name in expected}


def test_ranks_say_for_whom_they_wait() -> None:
    first, second = ranks.run("waiting_ranks", 2)
    assert [line["step"] for line in first] == [line["step"] for line in second] == [1, 2, 3, 4, 5, 6]
    assert first[0]["learners"] == [0] and second[0]["learners"] == [1]
    for line in (*first, *second):
        assert (line["compute"], line["overlapped"]) == (2.0, 1.0), "on the clock of waiting_ranks.py"
        assert line["exposed"] + line["compute"] == line["seconds"]
    assert all(line["consensus_distance"] is None for line in (*first, *second)), "ranks do not meet for it"
    assert all(line["exposed"] >= line["waits"]["1"] > 0 for line in first), "rank 0 waits for rank 1"
    assert all(line["exposed"] == line["waits"]["0"] == 0 for line in second), "rank 1 waits for nobody"
