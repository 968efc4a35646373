"""A run resumed from a checkpoint in the middle of an epoch ends with the same bits as one that never stopped."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddpcore.training import RunRecord, TrainConfig, train
from ddpcore.training.config import merged
from ddpcore.training.trainer import Trainer
from helpers import images as helper
from helpers.each import each
from helpers.resumed import back_to, without_times

ALONE = {
    "single": {},
    "torch": {"optimizer": {"name": "torch_sgd", "momentum": 0.9, "nesterov": True, "max_grad_norm": 0.1}},
    "adam": {"optimizer": {"name": "adam", "lr": 0.01}},
    "lars": {"optimizer": {"name": "lars", "param_groups": True, "weight_decay": 1e-4}},
    "bf16": {"model": {"precision": "bf16"}, "optimizer": {"label_smoothing": 0.1}},
    "channels_last": {"model": {"channels_last": True}},
    "bf16 learners": {"strategy": {"learners": 2, "name": "dpsgd"}, "model": {"precision": "bf16"}},
    "recalibrated": {"run": {"evaluation_batch_norm": "recalibrate", "recalibration_batches": 2}},
}
RUNS: dict[str, dict[str, Any]] = {
    **{name: merged({"strategy": {"learners": 3}}, fields) for name, fields in helper.STRATEGIES.items()},
    **ALONE,
    "policies": {
        "strategy": {"name": "dpsgd", "learners": 3, "policies": {"momentum": "gossip", "batch_norm": "average"}},
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_the_same_bits(name: str, tmp_path: Path) -> None:
    config = helper.config(RUNS[name])
    through = train(config, out=tmp_path / "through", dataset=helper.images())
    assert through.final["step"] == 6 and not through.final["diverged"]
    shutil.copytree(tmp_path / "through", tmp_path / "resumed")
    back_to(3, tmp_path / "resumed")
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    resumed = train(config, out=tmp_path / "resumed", resume=True, dataset=helper.images())
    for file in ("model.safetensors", "checkpoints/step-00000006/rank-0.safetensors"):
        assert (tmp_path / "through" / file).read_bytes() == (tmp_path / "resumed" / file).read_bytes(), file
    assert without_times(resumed) == without_times(through)
    kinds = [json.loads(line)["kind"] for line in resumed.path.read_text().splitlines()]
    assert kinds == ["run", "resume", "epoch", "epoch", "end"]


def test_an_error_in_an_evaluation_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the one at the end: the run goes on from the last checkpoint, and ends as one without the error."""
    config = helper.config(
        strategy={"learners": 2, "name": "dpsgd"}, run={"checkpoint_every": None, "evaluate_every": 0}
    )
    whole = train(config, out=tmp_path / "whole", dataset=helper.images())

    def fails(*_: Any) -> None:
        raise RuntimeError("no memory is left")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", fails)
        with pytest.raises(RuntimeError, match="no memory is left"):
            train(config, out=tmp_path / "run", dataset=helper.images())
    assert (tmp_path / "run" / "checkpoints" / "step-00000006").exists()
    resumed = train(config, out=tmp_path / "run", dataset=helper.images(), resume=True)
    assert without_times(resumed) == without_times(whole)


def test_checkpoints_change_nothing(tmp_path: Path) -> None:
    """Evaluations change nothing either."""
    ends = []
    for fields in ({}, {"run": {"checkpoint_every": 0, "evaluate_every": 0}}):
        config = helper.config(fields, strategy={"learners": 2, "name": "dpsgd"})
        train(config, out=tmp_path / str(len(ends)), dataset=helper.images())
        ends.append((tmp_path / str(len(ends)) / "model.safetensors").read_bytes())
    assert ends[0] == ends[1]
    assert not (tmp_path / "1" / "checkpoints").exists()


def test_a_run_that_is_over_is_not_run_again(tmp_path: Path) -> None:
    first = train(helper.config(), out=tmp_path, dataset=helper.images())
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = train(helper.config(), out=tmp_path, resume=True, dataset=helper.images())
    assert again == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == written


def test_resume_begins_where_there_is_nothing(tmp_path: Path) -> None:
    record = train(helper.config(run={"steps": 2}), out=tmp_path / "new", resume=True, dataset=helper.images())
    assert record.final["step"] == 2


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    train(helper.config(run={"steps": 1}), out=tmp_path, dataset=helper.images())
    with pytest.raises(ValueError, match="holds a run already: take another folder, or resume=True"):
        train(helper.config(run={"steps": 1}), out=tmp_path, dataset=helper.images())


def test_another_config_is_refused(tmp_path: Path) -> None:
    train(helper.config(run={"steps": 3}), out=tmp_path, dataset=helper.images())
    with pytest.raises(ValueError, match=r"holds another run: optimizer\.lr is 0\.1, not 0\.05: take another folder"):
        train(
            helper.config(run={"steps": 3}, optimizer={"lr": 0.1}), out=tmp_path, resume=True, dataset=helper.images()
        )
    (tmp_path / "record.jsonl").unlink()  # the checkpoint has the config too
    with pytest.raises(ValueError, match=r"step-00000003 is of another run: optimizer\.lr is 0\.1, not 0\.05$"):
        train(
            helper.config(run={"steps": 3}, optimizer={"lr": 0.1}), out=tmp_path, resume=True, dataset=helper.images()
        )


def test_another_model_is_refused(tmp_path: Path) -> None:
    """With the same config, but data with another number of classes."""
    train(helper.config(run={"steps": 3}), out=tmp_path, dataset=helper.images())
    back_to(3, tmp_path)
    dataset = helper.images()
    other = type(dataset)("five", dataset.train, dataset.test, 5, dataset.input_shape)
    (tmp_path / "record.jsonl").unlink()  # which has the digest of the data
    with pytest.raises(
        ValueError, match=r"of another model: classifier.7.weight is \(4, 84\) there and \(5, 84\) here"
    ):
        train(helper.config(run={"steps": 3}), out=tmp_path, resume=True, dataset=other)


def test_other_samples_are_refused(tmp_path: Path) -> None:
    """With the same config: the files of its folder, or the data set that is passed, may have changed."""
    config = helper.config(run={"steps": 3})
    train(config, out=tmp_path, dataset=helper.images())
    other = helper.images().with_random_labels(1)
    with pytest.raises(ValueError, match="holds a run on other samples: take another folder"):
        train(config, out=tmp_path, resume=True, dataset=other)
    back_to(3, tmp_path)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != ".lock"}
    with pytest.raises(ValueError, match="holds a run on other samples: take another folder"):
        train(config, out=tmp_path, resume=True, dataset=other)
    assert {path: path.stat().st_mtime_ns for path in written} == written
    record = tmp_path / "record.jsonl"
    record.write_text(record.read_text().replace("dataset_digest", "older"))
    assert train(config, out=tmp_path, resume=True, dataset=other).final, "an older record has no digest"


def test_a_folder_that_holds_the_files_of_other_samples(tmp_path: Path) -> None:
    """A run depends on the samples in the folder, and not on its path."""
    sizes = {"depth": 1, "width": 4, "bottleneck": 3}
    config = {
        "model": {"name": "speech_lstm", **sizes},
        "data": {"name": "features", "batch_size": 10},
        "run": {"steps": 3},
    }
    for name, size in (("first", 20), ("second", 30)):
        (tmp_path / name / "train").mkdir(parents=True)
        arrays = {"inputs": np.zeros((size, 2, 3), np.float32), "labels": np.arange(size) % 2}
        np.savez(tmp_path / name / "train" / "a.npz", **arrays)

    def run(name: str) -> RunRecord:
        return train(
            TrainConfig.from_dict(merged(config, {"data": {"data_dir": str(tmp_path / name)}})),
            out=tmp_path / "out",
            resume=True,
        )

    run("first")
    back_to(3, tmp_path / "out")
    with pytest.raises(ValueError, match="holds a run on other samples"):
        run("second")
    (tmp_path / "first").rename(tmp_path / "moved")
    assert run("moved").final["step"] == 3


def test_how_often_things_are_written_may_change(tmp_path: Path) -> None:
    train(helper.config(), out=tmp_path, dataset=helper.images())
    back_to(3, tmp_path)
    changed: TrainConfig = helper.config(run={"checkpoint_every": 2, "keep_last": 1})
    train(changed, out=tmp_path, resume=True, dataset=helper.images())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000006"]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "manifest"])
def test_a_damaged_checkpoint_is_passed_over(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = helper.config()
    train(config, out=tmp_path / "through", dataset=helper.images())
    shutil.copytree(tmp_path / "through", tmp_path / "resumed")
    back_to(6, tmp_path / "resumed")
    last = tmp_path / "resumed" / "checkpoints" / "step-00000006"
    file = last / ("manifest.json" if damage == "manifest" else "rank-0.safetensors")
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "flipped":
        content[-100] ^= 1
        file.write_bytes(content)
    else:
        file.write_bytes(content[: len(content) // 2])
    train(config, out=tmp_path / "resumed", resume=True, dataset=helper.images())
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ddpcore:")]
    assert len(said) == 1 and f"{last} is damaged" in said[0] and "taking the one before it" in said[0]
    ends = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("through", "resumed")]
    assert ends[0] == ends[1]


def test_nothing_but_damaged_checkpoints_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(helper.config(run={"steps": 3}), out=tmp_path, dataset=helper.images())
    back_to(3, tmp_path)
    (tmp_path / "checkpoints" / "step-00000003" / "rank-0.json").write_text("{}")
    with pytest.raises(ValueError, match=r"every checkpoint is damaged: remove .* to begin anew"):
        train(helper.config(run={"steps": 3}), out=tmp_path, resume=True, dataset=helper.images())
    assert "there is none before it" in capsys.readouterr().err


OPTIMIZERS: tuple[dict[str, Any], ...] = (
    {"name": "sgd", "nesterov": True, "state_dtype": "bfloat16"},
    {"name": "sgd", "max_grad_norm": 0.5, "param_groups": True, "weight_decay": 1e-3},
    {"name": "adamw", "lr": 0.01, "state_dtype": "bfloat16", "max_grad_norm": 1.0},
    {"name": "lars", "param_groups": True, "weight_decay": 1e-4},
    {"name": "lamb", "lr": 0.01},
    {"name": "muon", "lr": 0.01, "param_groups": True},
    {"name": "torch_sgd", "momentum": 0.9},
    {"name": "adam", "lr": 0.01},
)
MODELS: tuple[dict[str, Any], ...] = (
    {},  # LeNet-5, with dropout and batch normalization
    {"name": "simple_cnn"},
    {"name": "lenet5", "precision": "bf16", "channels_last": True},
    {"name": "vit", "depth": 1, "width": 8, "num_heads": 2, "mlp_width": 12},
    {"name": "resnext29", "blocks": [1, 1], "base_width": 4},
)
DATA: tuple[dict[str, Any], ...] = (
    {"sampler": "distributed"},
    {"sampler": "fixed", "accumulation": 2},
    {"drop_last": False},
    {"shards": "dirichlet"},
    {"batch_growth": [[2, 24]], "batch_growth_lr": "sqrt"},
    {},
)


@pytest.mark.slow
@each("seed", range(14))
def test_drawn_configs(seed: int, tmp_path: Path) -> None:
    """``docs/training.md``: any strategy, model, optimizer and order of the data, stopped after any step."""
    draw = random.Random(seed)
    strategy = draw.choice([{}, *helper.STRATEGIES.values()])
    fields = merged({"strategy": {"learners": 2}}, strategy) if strategy else {}
    fields = {**fields, "model": draw.choice(MODELS), "data": merged(fields.get("data", {}), draw.choice(DATA))}
    schedule = draw.choice([{}, {"schedule": "cosine", "schedule_unit": "epochs"}])
    config = helper.config({**fields, "optimizer": {**draw.choice(OPTIMIZERS), **schedule}})
    config = helper.config(config.to_dict(), run={"checkpoint_every": 1, "seed": seed})
    out, at = tmp_path / str(seed), draw.randint(1, 5)
    train(config, out=out, dataset=helper.images())
    files = [out / "model.safetensors", out / "checkpoints/step-00000006/rank-0.safetensors"]
    through = [file.read_bytes() for file in files]
    back_to(at, out)
    torch.manual_seed(99)
    train(config, out=out, resume=True, dataset=helper.images())
    assert [file.read_bytes() for file in files] == through
