"""A finished run goes on as a longer one where its learning rates do not depend on the length."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ddpcore.records.run import RunRecord
from ddpcore.training import train
from ddpcore.training.trainer import Trainer
from helpers import images as helper
from helpers.resumed import without_times

LEARNERS = {"learners": 2, "name": "dpsgd", "topology": "ring"}


def config(steps: int, **sections: Any) -> Any:
    run = {"steps": steps, "record_steps": True, **sections.pop("run", {})}
    return helper.config(sections, strategy=LEARNERS, run=run)


@pytest.mark.parametrize(
    "optimizer", [{}, {"schedule": "step", "milestones": [4]}, {"schedule": "exponential", "gamma": 0.9}], ids=str
)
def test_the_bits_are_those_of_the_long_run(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    train(config(4, optimizer=optimizer), out=tmp_path / "a", dataset=helper.images())
    record = train(config(8, optimizer=optimizer), out=tmp_path / "a", dataset=helper.images(), resume=True)
    whole = train(config(8, optimizer=optimizer), out=tmp_path / "b", dataset=helper.images())
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b")]
    assert models[0] == models[1] and record.final["step"] == whole.final["step"] == 8
    assert record.header["config"]["run"]["steps"] == record.header["total_steps"] == 8
    assert [row["step"] for row in record.epochs] == [row["step"] for row in whole.epochs] == [4, 8]
    assert [row["train_loss"] for row in record.epochs] == [row["train_loss"] for row in whole.epochs]
    again = train(config(8, optimizer=optimizer), out=tmp_path / "a", dataset=helper.images(), resume=True)
    assert again.final == record.final, "now it is finished"


def test_the_record_is_that_of_the_long_run(tmp_path: Path) -> None:
    """The short run ends inside an epoch, or after one at whose end no evaluation is due: nothing of that end stays."""
    for number, (steps, run) in enumerate(
        (
            (6, {}),
            (6, {"checkpoint_every": 5, "keep_best": True}),
            (8, {"evaluate_every": 0}),
            (4, {"evaluate_every": 2}),
        )
    ):
        out = tmp_path / str(number)
        train(config(steps, run=run), out=out / "a", dataset=helper.images())
        record = train(config(14, run=run), out=out / "a", dataset=helper.images(), resume=True)
        whole = train(config(14, run=run), out=out / "b", dataset=helper.images())
        assert without_times(record) == without_times(whole), (steps, run)


def test_a_run_that_goes_on_has_no_final_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(config(4), out=tmp_path, dataset=helper.images())
    step = Trainer.step

    def failing(self: Trainer) -> Any:
        if self.num_steps == 6:
            raise RuntimeError("the machine fails")
        return step(self)

    monkeypatch.setattr(Trainer, "step", failing)
    with pytest.raises(RuntimeError, match="the machine fails"):
        train(config(8), out=tmp_path, dataset=helper.images(), resume=True)
    assert not RunRecord.read(tmp_path).final and not (tmp_path / "model.safetensors").exists()
    monkeypatch.setattr(Trainer, "step", step)
    assert train(config(8), out=tmp_path, dataset=helper.images(), resume=True).final["step"] == 8


def test_a_run_that_was_stopped_before_its_end_gets_the_new_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.step

    def failing(self: Trainer) -> Any:
        if self.num_steps == 3:
            raise RuntimeError("the machine fails")
        return step(self)

    monkeypatch.setattr(Trainer, "step", failing)
    with pytest.raises(RuntimeError, match="the machine fails"):
        train(config(4), out=tmp_path, dataset=helper.images())
    monkeypatch.setattr(Trainer, "step", step)
    record = train(config(8), out=tmp_path, dataset=helper.images(), resume=True)
    assert record.final["step"] == record.header["total_steps"] == record.header["config"]["run"]["steps"] == 8


def test_refused(tmp_path: Path) -> None:
    train(config(4, optimizer={"schedule": "cosine"}), out=tmp_path / "a", dataset=helper.images())
    content = (tmp_path / "a" / "record.jsonl").read_bytes()
    with pytest.raises(
        ValueError, match="the saved run is shorter, and learning rates of the schedule 'cosine' depend on"
    ):
        train(config(8, optimizer={"schedule": "cosine"}), out=tmp_path / "a", dataset=helper.images(), resume=True)
    assert (tmp_path / "a" / "record.jsonl").read_bytes() == content
    train(config(4), out=tmp_path / "b", dataset=helper.images())
    with pytest.raises(ValueError, match=r"holds another run: run\.steps is 2, not 4"):
        train(config(2), out=tmp_path / "b", dataset=helper.images(), resume=True)
    with pytest.raises(ValueError, match=r"holds another run: run\.epochs is 4, not None; run\.steps is None, not 4"):
        longer = config(4, run={"epochs": 4, "steps": None})
        train(longer, out=tmp_path / "b", dataset=helper.images(), resume=True)
    shutil.rmtree(tmp_path / "b" / "checkpoints")
    with pytest.raises(ValueError, match="has no checkpoint: a run without one cannot be made longer"):
        train(config(8), out=tmp_path / "b", dataset=helper.images(), resume=True)
