"""Statistics of a run: they do not change training, and a resumed run writes the same ones."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ddpcore.data import Dataset
from ddpcore.diagnostics import Hessian, NoiseStatistics, flatness
from ddpcore.options.fields import get
from ddpcore.training import RunRecord, TrainConfig, train
from ddpcore.training.build import LearnerPlacement, build_dataset, build_trainer
from ddpcore.training.checkpoint import Checkpoints
from ddpcore.training.config import merged
from ddpcore.training.sections import random_samples
from helpers import images as helper

WATCHED = {"strategy": {"learners": 3}, "run": {"statistics_every": 2}}
TIMES = ("seconds", "share")


def run(out: Path, dataset: Dataset | None = None, **fields: Any) -> RunRecord:
    return train(helper.config(fields), out=out, dataset=dataset or helper.images())


def numbers(record: RunRecord) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in TIMES} for line in record.statistics]


FAST = ("ssgd", "ring", "post-local")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
        for name in sorted(set(helper.STRATEGIES) - {"push_sum"})
    ],
)
def test_training_has_the_same_bits(name: str, tmp_path: Path) -> None:
    """With dropout, batch normalisation, augmentation and momentum."""
    fields = merged({"strategy": {"learners": 3}, "model": helper.HESSIAN["model"]}, helper.STRATEGIES[name])
    plain = run(tmp_path / "plain", **fields)
    is_measured = name in FAST  # flatness is that of the trained model, whatever has trained it
    settings = {"run": {"statistics_every": 2, "flatness_samples": 20 if is_measured else 0}}
    watched = run(tmp_path / "watched", **merged(fields, settings))
    for file in ("model.safetensors", "checkpoints/step-00000006/rank-0.safetensors"):
        both = [(tmp_path / out / file) for out in ("plain", "watched")]
        assert weights_of(both[0]) == weights_of(both[1]), file
    assert [line["step"] for line in watched.statistics] == [2, 4, 6]
    assert all(line["valid"] and line["num_learners"] == 3 for line in watched.statistics)
    assert (plain.statistics, plain.final["flatness"]) == ([], None)
    assert not is_measured or math.isfinite(watched.final["flatness"]["relative_trace"])
    losses = [[epoch["train_loss"] for epoch in record.epochs] for record in (plain, watched)]
    assert losses[0] == losses[1]


def weights_of(path: Path) -> dict[str, bytes]:
    """All tensors of a file but those of the statistics."""
    tensors = load_file(path)
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items() if not name.startswith(".statistics")}


@pytest.mark.parametrize("strategy", ["ssgd", "dpsgd"])
@pytest.mark.parametrize("at", [3, 4])
def test_a_resumed_run_writes_the_same(strategy: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed between two records, and at a record, from a copy of the folder right after the checkpoint."""
    save = Checkpoints.save

    def save_and_crash(self: Checkpoints, step: int, state: Any, **options: Any) -> bool:
        is_complete = save(self, step, state, **options)
        if step == at:
            shutil.copytree(tmp_path / "through", tmp_path / "resumed")
        return is_complete

    monkeypatch.setattr(Checkpoints, "save", save_and_crash)
    fields = merged(WATCHED, {"strategy": strategy, "run": {"checkpoint_every": 1}})
    through = run(tmp_path / "through", **fields)
    monkeypatch.undo()
    torch.manual_seed(99)
    resumed = train(helper.config(fields), out=tmp_path / "resumed", resume=True, dataset=helper.images())
    assert [line["step"] for line in resumed.statistics] == [2, 4, 6]
    assert numbers(resumed) == numbers(through)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        pytest.param({"strategy": {"learners": 3, "name": "ssgd"}}, marks=pytest.mark.slow),
        pytest.param({"strategy": {"learners": 3, "name": "dpsgd"}}, marks=pytest.mark.slow),
    ],
)
def test_the_hessian_along_a_run(fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training and noise statistics keep their bits, and a resumed run writes the same records."""
    save = Checkpoints.save

    def save_and_crash(self: Checkpoints, step: int, state: Any, **options: Any) -> bool:
        is_complete = save(self, step, state, **options)
        if step == 4 and (tmp_path / "through") in self.folder.parents:
            shutil.copytree(tmp_path / "through", tmp_path / "resumed")
        return is_complete

    monkeypatch.setattr(Checkpoints, "save", save_and_crash)
    noise = {"run": {"statistics_every": 2}} if fields else {}
    fields = merged(merged({"run": {"checkpoint_every": 1}}, fields), noise)
    plain = run(tmp_path / "plain", **merged(fields, {"model": helper.HESSIAN["model"]}))
    through = run(tmp_path / "through", **merged(fields, helper.HESSIAN))
    torch.manual_seed(99)
    config = helper.config(fields, helper.HESSIAN)
    resumed = train(config, out=tmp_path / "resumed", resume=True, dataset=helper.images())
    files = ["model.safetensors", "checkpoints/step-00000006/rank-0.safetensors"]
    contents = [[(tmp_path / out / file).read_bytes() for file in files] for out in ("plain", "through", "resumed")]
    assert contents[0] == contents[1] == contents[2]
    assert numbers(plain) == numbers(through)
    records = [[{**line, "seconds": 0} for line in one.hessian] for one in (through, resumed)]
    assert records[0] == records[1]
    assert [line["step"] for line in records[0]] == [3, 6]
    for line in records[0]:
        assert line["problem"] is None and line["largest"][0] > line["largest"][1] > line["smallest"]
        is_gossip = get(fields, "strategy") == "dpsgd"
        for name in ("disagreement", "noise_shares"):
            assert (line[name] is not None and len(line[name]) == 2) == is_gossip, name
    assert plain.hessian == []


def test_the_hessian_is_that_of_the_training_set(tmp_path: Path) -> None:
    """SSGD's learners are equal: one pass over all samples, without random layers, has the same largest eigenvalue."""
    config = TrainConfig.from_dict(
        {
            "model": {"name": "mlp", "hidden": [8]},
            "data": {"name": "digits", "batch_size": 40, "num_train": 202},
            "strategy": {"learners": 4, "name": "ssgd"},
            "run": {"steps": 1, "hessian_every": 1, "hessian_top": 1, "device": "cpu"},
            "optimizer": {"lr": 0.5, "label_smoothing": 0.1},
        }
    )
    (line,) = train(config, out=tmp_path).hessian
    place = LearnerPlacement.of(config, None)
    trainer = build_trainer(place, build_dataset(place))
    model = trainer.handle.evaluation_model()
    inputs, labels = trainer.dataset.train.batch(random_samples(trainer.dataset, "", 202, 1, 0)[:200])
    found = Hessian(model, lambda: torch.nn.functional.cross_entropy(model(inputs), labels, label_smoothing=0.1))
    values = found.eigenvalues().values
    assert line["largest"] == pytest.approx([values[0]], rel=1e-3)
    assert line["smallest"] == pytest.approx(values[1], abs=1e-3 * values[0])


def test_the_full_gradient_is_that_of_the_training_set(tmp_path: Path) -> None:
    """Learners of SSGD are equal: one pass over all samples, without random layers, gives the same gradient."""
    config = TrainConfig.from_dict(
        {
            "model": "mlp",
            "data": {"name": "synthetic", "batch_size": 40, "accumulation": 2},
            "strategy": {"learners": 4, "name": "ssgd"},
            "run": {"steps": 1, "statistics_every": 1, "device": "cpu"},
            "optimizer": {"lr": 0.5, "label_smoothing": 0.1},
        }
    )
    record = train(config, out=tmp_path)
    place = LearnerPlacement.of(config, None)
    trainer = build_trainer(place, build_dataset(place))
    inputs, labels = trainer.dataset.train.batch(torch.arange(1000))
    single = trainer.handle.evaluation_model()
    loss = torch.nn.functional.cross_entropy(single(inputs), labels, label_smoothing=0.1)
    loss.backward()
    square = sum(parameter.grad.double().square().sum().item() for parameter in single.parameters())
    (line,) = record.statistics
    assert line["dynamics"]["full_gradient"] == "the training set"
    assert line["dynamics"]["full_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert line["dynamics"]["grad_squared"] == pytest.approx(square, rel=1e-4)
    assert line["batch_size"] == 10


def test_a_part_of_the_training_set(tmp_path: Path) -> None:
    """Samples that three learners cannot divide equally are left out; the seed chooses the part."""
    records = [
        run(
            tmp_path / str(number),
            helper.images(augment=False),
            **merged(WATCHED, {"strategy": "ssgd", "run": {"statistics_samples": samples}}),
        )
        for number, samples in enumerate((20, 20, 48))
    ]
    first, same, other = (record.statistics[0]["dynamics"] for record in records)
    assert first == same
    assert first["full_gradient"] == "a part of the training set, 18 samples"
    assert first["grad_squared"] != other["grad_squared"]
    assert first["mean_grad_squared"] == other["mean_grad_squared"], "the step itself is the same"


@pytest.mark.slow
def test_flatness_is_that_of_the_final_model(tmp_path: Path) -> None:
    dataset = helper.images(augment=False)
    fields = {"strategy": {"learners": 2, "name": "dpsgd"}, "model": helper.HESSIAN["model"]}
    record = run(tmp_path, dataset, **fields, run={"flatness_samples": 50})
    trainer = build_trainer(LearnerPlacement.of(helper.config(fields), None), dataset)
    model = trainer.handle.evaluation_model()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    model.eval()
    inputs, labels = dataset.train.batch(torch.arange(50))
    expected = flatness(model, lambda: torch.nn.functional.cross_entropy(model(inputs), labels))
    assert record.final["flatness"]["loss"] == pytest.approx(expected.loss, rel=1e-5)
    assert record.final["flatness"]["hessian_eigenvalue"] == pytest.approx(expected.hessian_eigenvalue, rel=1e-2)
    with pytest.raises(ValueError, match="flatness_samples is 51: take 1 to 50"):
        run(tmp_path / "refused", dataset, strategy={"learners": 2, "name": "dpsgd"}, run={"flatness_samples": 51})
    assert not (tmp_path / "refused").exists(), "before anything is trained"


def test_flatness_of_attention(tmp_path: Path) -> None:
    tiny = {"patch_size": 16, "width": 8, "depth": 1, "num_heads": 2, "mlp_width": 8}
    record = run(tmp_path, model={"name": "vit", **tiny}, run={"flatness_samples": 20})
    assert math.isfinite(record.final["flatness"]["relative_eigenvalue"])
    assert record.final["flatness_reason"] is None


def test_an_error_of_flatness_does_not_lose_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError("out of memory")

    monkeypatch.setattr("ddpcore.training.loop.flatness_of", fails)
    record = run(tmp_path, run={"flatness_samples": 20})
    assert record.final["flatness"] is None
    assert record.final["flatness_reason"] == "MemoryError: out of memory"
    assert record.final["step"] == 6 and record.final["accuracy"] is not None


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"run": {"statistics_every": 5}}, "statistics_every is 5: it needs at least two learners"),
        (
            {"run": {"statistics_every": 5}, "strategy": {"learners": 2, "name": "push_sum"}},
            "statistics_every is 5: push_sum does not train the mean of its weights",
        ),
        ({"run": {"statistics_every": -1}}, "statistics_every is -1"),
        (
            {"run": {"hessian_every": 5}, "strategy": {"learners": 2, "name": "push_sum"}},
            "hessian_every is 5: push_sum does not train the mean of its weights",
        ),
        (
            {"run": {"hessian_every": 5}, "strategy": {"learners": 3, "on_failure": "shrink", "name": "dpsgd"}},
            "leave them out",
        ),
        ({"run": {"hessian_samples": 0}}, "hessian_samples is 0"),
        ({"run": {"statistics_samples": 0}}, "statistics_samples is 0"),
        ({"run": {"flatness_samples": -1}}, "flatness_samples is -1"),
        (
            {"run": {"escape_loss": 0.5}},
            "escape_loss is 0.5: it does nothing without run.statistics_every, set that or leave it out",
        ),
    ],
)
def test_refusals(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        helper.config(fields)


def test_too_many_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="statistics_samples is 51: take 3 to 50, the size of the training set"):
        run(tmp_path, **merged(WATCHED, {"strategy": "ssgd", "run": {"statistics_samples": 51}}))
    with pytest.raises(ValueError, match="hessian_samples is 51: take 1 to 50, the size of the training set"):
        run(tmp_path, run={"hessian_every": 1, "hessian_samples": 51})
    with pytest.raises(ValueError, match="hessian_top is 100000000: it must be"):
        run(tmp_path, run={"hessian_every": 1, "hessian_top": 100_000_000})
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_gradient_at_the_mean_is_that_of_the_same_passes(accumulation: int, tmp_path: Path) -> None:
    """With a tiny learning rate, dropout, batch norm of micro-batches and clipping must cause no landscape noise."""
    (*_, last) = run(
        tmp_path,
        strategy={"learners": 2, "name": "local_sgd"},
        run={"statistics_every": 2},
        optimizer={"lr": 1e-9, "max_grad_norm": 0.1, "name": "torch_sgd", "momentum": 0.9},
        data={"accumulation": accumulation},
    ).statistics
    moves = last["dynamics"]
    assert last["valid"] and last["at_mean"]
    assert moves["mean_grad_squared"] < 0.011, "otherwise nothing was clipped"
    assert moves["landscape_noise"] < 1e-6 * moves["lr"] ** 2 * moves["mean_grad_squared"]


def test_the_smaller_batch_at_the_end_of_an_epoch_is_left_out(tmp_path: Path) -> None:
    """50 images in batches of 24: in every third step each learner takes one image."""
    record = run(
        tmp_path,
        strategy={"learners": 2, "name": "ssgd"},
        run={"statistics_every": 3, "steps": 6},
        data={"batch_size": 24, "drop_last": False},
    )
    assert [line["num_skipped"] for line in record.statistics] == [1, 1]
    assert [line["num_steps"] for line in record.statistics] == [2, 3]
    assert all(line["valid"] for line in record.statistics)


def test_without_replacement_is_accounted_for(tmp_path: Path) -> None:
    """The set has 50 samples: without the correction |G|^2 would be smaller by tr S / 50."""
    record = run(tmp_path, **merged(WATCHED, {"strategy": "ssgd", "run": {"steps": 4}}))
    whole = record.statistics[-1]["whole"]
    config = helper.config(merged(WATCHED, {"run": {"statistics_every": 0}}), strategy="ssgd", run={"steps": 4})
    trainer = build_trainer(LearnerPlacement.of(config, None), helper.images())
    statistics = NoiseStatistics(trainer.handle, trainer.optimizer, 2, batch_size=config.data.batch_size // 3)
    for _ in range(4):
        trainer.step()
    plain = statistics.records[-1].whole
    assert whole["trace"] == pytest.approx(plain.trace, rel=1e-12)
    assert whole["grad_squared"] == pytest.approx(plain.grad_squared + plain.trace / 50, rel=1e-9)
