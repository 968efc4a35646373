"""Whole runs with numbers that are not finite: the record names them, and checkpoints stay finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from ddpcore.data import Dataset, Split
from ddpcore.storage.serialization import tensors_of
from ddpcore.strategies.learner import is_finite
from ddpcore.training import RunRecord, TrainConfig, train
from ddpcore.training.checkpoint import Checkpoints
from ddpcore.training.config import merged
from helpers import images as helper


def with_a_nan() -> Dataset:
    """The images as floating-point numbers, of which one is not a number: one learner gets it, once an epoch."""
    given = helper.images(augment=False)
    train, test = (Split(part.inputs / 255, part.labels) for part in (given.train, given.test))
    train.inputs[25, 0, 3, 3] = torch.nan
    return Dataset("quarters", train, test, given.num_classes, given.input_shape)


def run(out: Path, dataset: Dataset | None = None, **fields: Any) -> RunRecord:
    config = helper.config(
        merged({"strategy": {"learners": 4, "name": "dpsgd", "topology": "ring"}, "run": {"steps": 12}}, fields)
    )
    return train(config, out=out, dataset=dataset or with_a_nan(), resume=(out / "record.jsonl").exists())


def last_checkpoint(out: Path) -> tuple[int, Any]:
    config = RunRecord.read(out).header["config"]
    found = Checkpoints(folder=out / "checkpoints", config=config).load_last("cpu", print)
    assert found is not None
    return found


@pytest.mark.parametrize("mode", ["skip", "quarantine"])
def test_a_run_goes_on_and_its_record_says_what_was_left_out(mode: str, tmp_path: Path) -> None:
    seen = run(tmp_path, strategy={"on_nonfinite": mode})
    assert seen.final["step"] == 12
    assert not seen.final["diverged"]
    assert len(seen.nonfinite) == 3, "once in each epoch of four steps"
    for row in seen.nonfinite:
        assert row == {
            "kind": "nonfinite", "step": row["step"], "learner": row["learner"], "parameter": "features.0.weight",
            "what": "gradient", "action": mode,
        }  # fmt: skip
    assert all(row["train_loss"] is not None for row in seen.epochs)
    assert is_finite(safetensors.torch.load_file(tmp_path / "model.safetensors").values())


def test_a_run_that_raises_has_diverged_and_says_why(tmp_path: Path) -> None:
    """All ranks end it together, so it ends at the next check of the loss. The checkpoints before stay."""
    seen = run(tmp_path, run={"checkpoint_every": 1})
    assert seen.final["diverged"]
    row = seen.nonfinite[0]
    reason = f"step {row['step']}, learner {row['learner']}: the gradient of {row['parameter']} is not finite"
    assert seen.final["diverged_reason"] == reason
    assert is_finite(tensors_of(last_checkpoint(tmp_path)[1]["model"]))


@pytest.mark.parametrize("strategy", ["single", "ssgd"])
def test_a_diverged_run_keeps_its_last_finite_checkpoints(strategy: str, tmp_path: Path) -> None:
    """Every step is saved, and the loss is checked every 20 steps only. A baseline checks no gradients."""
    fields = {
        "strategy": {"name": strategy, "learners": 1 if strategy == "single" else 2},
        "optimizer": {"lr": 1e6, "warmup": 0},
        "run": {"steps": 19, "checkpoint_every": 1, "epochs": None, "evaluate_every": 0},
    }
    seen = run(tmp_path / "safe", helper.images(), **fields)
    assert seen.final["diverged"]
    step, state = last_checkpoint(tmp_path / "safe")
    assert is_finite(tensors_of(state["model"]))
    assert is_finite(tensors_of(state["optimizer"]))
    if strategy == "single":
        assert step < 4, "the first epoch ends at step 4, with a loss that is not finite"
        run(tmp_path / "asked", helper.images(), **merged(fields, {"run": {"save_nonfinite": True}}))
        assert not is_finite(tensors_of(last_checkpoint(tmp_path / "asked")[1]["model"]))


def test_quarantine_resumes_with_the_same_bits(tmp_path: Path) -> None:
    """Also if the average is still to come, in the next forward pass."""
    fields = {"strategy": {"on_nonfinite": "quarantine", "order": "combine_then_adapt"}, "run": {"checkpoint_every": 1}}
    through = run(tmp_path / "through", **merged(fields, {"run": {"keep_last": 20}}))
    bad = through.nonfinite[0]["step"]
    model = (tmp_path / "through" / "model.safetensors").read_bytes()
    for name in ("record.jsonl", "model.safetensors"):
        (tmp_path / "through" / name).unlink()
    kept = [tmp_path / "through" / "checkpoints" / f"step-{step:08d}" for step in range(1, bad + 1)]
    for folder in (tmp_path / "through" / "checkpoints").iterdir():
        if folder not in kept:
            folder.rename(tmp_path / folder.name)
    config = TrainConfig.from_dict(through.header["config"])
    resumed = train(config, out=tmp_path / "through", dataset=with_a_nan(), resume=True)
    assert resumed.resumed[0]["step"] == bad
    assert (tmp_path / "through" / "model.safetensors").read_bytes() == model


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"strategy": {"name": "ssgd", "on_nonfinite": "quarantine"}}, "ssgd has no neighbours: take 'skip'"),
        (
            {"strategy": {"name": "single", "learners": 1, "on_nonfinite": "skip"}},
            "single checks no gradients, leave it out",
        ),
        ({"strategy": {"on_nonfinite": "ignore"}}, "on_nonfinite is 'ignore': choose from raise, skip, quarantine"),
        ({"strategy": {"learners": 1, "on_nonfinite": "quarantine"}}, "one learner has no neighbours"),
    ],
)
def test_bad_input(fields: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=text):
        run(tmp_path / "out", **fields)
    assert not (tmp_path / "out" / "record.jsonl").exists()
