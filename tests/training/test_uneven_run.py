"""Runs whose learners keep uneven shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpcore.data import split, total_variation
from ddpcore.experiments.metrics import metrics_of
from ddpcore.runtime.launch import World
from ddpcore.training import TrainConfig, train
from ddpcore.training.build import LearnerPlacement, build_batches, build_dataset
from ddpcore.training.config import merged


def config(**sections: Any) -> TrainConfig:
    shared = {
        "model": "mlp",
        "data": {"name": "digits", "batch_size": 40},
        "optimizer": {"lr": 0.05},
        "strategy": {"name": "exact_diffusion", "topology": "ring", "learners": 4},
        "run": {"steps": 6, "device": "cpu"},
    }
    return TrainConfig.from_dict(merged(shared, sections))


@pytest.mark.parametrize(
    ("shards", "options"),
    [("dirichlet", {"alpha": 0.1}), ("by_class", {}), ("given", {"parts": [[0, 1], [2], [3], [4]]})],
)
def test_the_record_says_how_uneven(shards: str, options: Any, tmp_path: Path) -> None:
    chosen = config(data={"shards": {"name": shards, **options}})
    record = train(chosen, out=tmp_path)
    dataset = build_dataset(LearnerPlacement.of(chosen, World()))
    parts = split(shards, dataset.train.labels, 4, seed=chosen.run.seed, **options)
    assert record.header["total_variation"] == total_variation(dataset.train.labels, parts) > 0.4
    assert metrics_of(record)["total_variation"] == record.header["total_variation"]
    batches = build_batches(chosen, dataset)
    for step in range(5):
        for row, part in zip(batches.indices(step), parts, strict=True):
            assert set(row.tolist()) <= set(part.tolist())


def test_even_shards_have_no_such_number(tmp_path: Path) -> None:
    assert train(config(run={"steps": 1}), out=tmp_path).header["total_variation"] is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data": {"shards": "dirichlet", "num_train": 3}}, "4 learners cannot share 3 samples"),
        ({"data": {"shards": {"name": "given", "parts": [[0], [1]]}}}, "there are 2 parts and 4 learners"),
        ({"data": {"shards": {"name": "given", "parts": [[0], [1], [2], [9999]]}}}, "learner 3 has samples 9999"),
        ({"strategy": {"topology": "random_pair"}}, "changes from step to step"),
    ],
)
def test_what_cannot_be_divided_starts_nothing(fields: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        train(config(**fields), out=tmp_path / "run")
    assert not (tmp_path / "run" / "record.jsonl").exists()
