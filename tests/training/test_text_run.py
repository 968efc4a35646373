"""Runs on tokens with a label at each place: losses, scores, statistics, flatness; shards by class are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ddpcore.data import load_dataset
from ddpcore.training import TrainConfig, train
from ddpcore.training.build import check_parts
from ddpcore.training.config import merged
from ddpcore.training.finished import FinishedRun
from ddpcore.training.trainer import by_place

SMALL = {"width": 8, "depth": 1, "num_heads": 2, "mlp_width": 8}


def config(*layers: dict[str, Any]) -> TrainConfig:
    values: dict[str, Any] = {
        "model": {"name": "byte_transformer", **SMALL},
        "data": {"name": "python_text", "context": 16, "num_train": 48, "num_test": 30, "batch_size": 8},
        "strategy": {"learners": 2, "name": "ssgd"},
        "run": {"steps": 4, "device": "cpu"},
        "optimizer": {"name": "adamw", "lr": 0.01},
    }
    for layer in layers:
        values = merged(values, layer)
    return TrainConfig.from_dict(values)


@pytest.mark.slow
def test_scores_and_losses_count_every_place(tmp_path: Path) -> None:
    measured = {"run": {"statistics_every": 2, "hessian_every": 4, "hessian_top": 1, "flatness_samples": 20}}
    record = train(config(measured), out=tmp_path / "run")
    run = FinishedRun.load(tmp_path / "run")
    test = run.dataset.test
    assert test is not None
    with torch.no_grad():
        logits = run.model(test.inputs)
    last = record.epochs[-1]
    assert last["accuracy"] == pytest.approx((logits.argmax(dim=1) == test.labels).double().mean().item())
    assert last["loss"] == pytest.approx(F.cross_entropy(logits, test.labels).item(), rel=1e-5)
    data = run.data("test")
    assert sum(part.item() for part in data()) == pytest.approx(last["loss"], rel=1e-5)
    assert 0 < record.final["flatness"]["loss"] < 6 and record.final["flatness_reason"] is None
    line = record.statistics[-1]["dynamics"]
    full = F.cross_entropy(run.model(run.dataset.train.inputs), run.dataset.train.labels)
    assert line["full_loss"] == pytest.approx(full.item(), rel=0.05), "one step earlier"
    assert record.hessian[-1]["problem"] is None
    assert record.header["dataset_digest"] == run.dataset.digest() and record.header["python"]


@pytest.mark.parametrize("strategy", ["noloco", "gasloc", "dpsgd", "local_sgd"])
def test_gossip_trains_it(strategy: str, tmp_path: Path) -> None:
    topology = {"strategy": {"topology": {"num_partners": 2}}} if strategy == "gasloc" else {}
    period = {} if strategy == "dpsgd" else {"strategy": {"period": 2}}
    record = train(config({"strategy": {"learners": 4, "name": strategy}}, topology, period), out=tmp_path / "run")
    assert record.epochs[-1]["train_loss"] < 5.7  # ln 256 is 5.55


@pytest.mark.parametrize("shards", ["by_class", "dirichlet"])
def test_shards_by_class_are_refused_before_the_run(shards: str) -> None:
    chosen = config({"data": {"shards": shards}})
    data = load_dataset("python_text", context=16, num_train=48)
    with pytest.raises(ValueError, match=rf"^shards is '{shards}' and labels are \[48, 16\]: a sample has no single"):
        check_parts(chosen, data)


def test_given_shards_work(tmp_path: Path) -> None:
    parts = {"parts": [list(range(24)), list(range(24, 48))]}
    record = train(config({"data": {"shards": {"name": "given", **parts}}}), out=tmp_path / "run")
    assert 0 < record.header["total_variation"] < 1


def test_by_place() -> None:
    logits, labels = torch.randn(2, 5, 3), torch.randint(5, (2, 3))
    flat_logits, flat_labels = by_place(logits, labels)
    for sample in range(2):
        for place in range(3):
            assert torch.equal(flat_logits[3 * sample + place], logits[sample, :, place])
            assert flat_labels[3 * sample + place] == labels[sample, place]
    no_places, other_places = (torch.randn(4, 5), torch.randint(5, (4,))), (torch.randn(2, 5, 4), labels)
    assert by_place(*no_places) == no_places
    assert by_place(*other_places) == other_places
