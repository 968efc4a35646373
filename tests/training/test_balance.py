"""Batches of different size: the same samples and the same training, and sizes by the speed of the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from ddpcore.data import ShardedBatches, load_dataset
from ddpcore.training import train
from ddpcore.training.build import LearnerPlacement, build_trainer, dealt
from helpers import images, ranks
from helpers.balanced_ranks import COMMON, LEARNERS
from helpers.each import each


def test_a_batch_has_the_same_samples() -> None:
    even, uneven = ShardedBatches(40, 12, 4), ShardedBatches(40, 12, 4, sizes=(2, 5, 1, 4))
    for step in range(7):
        rows = uneven.indices(step)
        taken = [row[row >= 0] for row in rows]
        assert [len(row) for row in taken] == [2, 5, 1, 4] and rows.shape == (4, 5)
        assert torch.equal(torch.cat(taken), even.indices(step).flatten())
        assert uneven.epoch(step) == even.epoch(step)


@each("name", ["ssgd", "local_sgd"])
def test_learners_train_as_one_with_all_samples(name: str) -> None:
    """SSGD: one learner with the whole batch. LocalSGD that averages after each step of SGD is the same."""
    weights = []
    for number, fields in enumerate(
        ({"name": "ssgd", "learners": 1}, {"name": name, "learners": 3, **({"period": 1} if name != "ssgd" else {})})
    ):
        data = {"name": "digits", "batch_size": 15, "learners_batch": [7, 2, 6] if number else []}
        model, optimizer = {"name": "mlp", "hidden": [16]}, {"name": "torch_sgd", "lr": 0.05}
        config = images.config(data=data, strategy=fields, optimizer=optimizer, model=model)
        trainer = build_trainer(LearnerPlacement.of(config, None), load_dataset("digits", seed=0))
        for _ in range(3):
            trainer.step()
        weights.append(torch.cat([one.detach().flatten() for one in trainer.evaluation_model().parameters()]))
    torch.testing.assert_close(*weights, rtol=0, atol=3e-6)


def test_activations_of_one_learner_live_at_once() -> None:
    """A learner's backward pass runs before the next one's forward pass, with batches of different size too."""
    data, fields = {"name": "digits", "batch_size": 15, "learners_batch": [7, 2, 6]}, {"name": "ssgd", "learners": 3}
    config = images.config(data=data, strategy=fields, model={"name": "mlp", "hidden": [16]})
    trainer = build_trainer(LearnerPlacement.of(config, None), load_dataset("digits", seed=0))
    order: list[str] = []
    for number, model in enumerate(trainer.handle.models):

        def note(_: object, __: object, output: torch.Tensor, number: int = number) -> None:
            order.append(f"forward {number}")
            output.register_hook(lambda _: order.append(f"backward {number}"))

        model.register_forward_hook(note)
    trainer.step()
    assert order == [f"{name} {number}" for number in range(3) for name in ("forward", "backward")]


def test_the_loss_is_that_of_the_whole_batch(tmp_path: Path) -> None:
    """Of learners with 11, 2 and 2 samples the record has the loss that one learner with all 15 has."""
    configs = [
        images.config(
            data={"name": "digits", "num_train": 60, "batch_size": 15, "learners_batch": sizes},
            strategy={"name": "ssgd", "learners": max(1, len(sizes))},
            run={"epochs": 2, "steps": None},
            model={"name": "mlp", "hidden": [8]},
        )
        for sizes in ([], [11, 2, 2])
    ]
    losses = []
    for number, config in enumerate(configs):
        record = train(config, out=tmp_path / str(number))
        losses.append([row["train_loss"] for row in record.epochs])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@each(
    ("speeds", "batch_size", "sizes"),
    [
        ([1.0, 1.0, 1.0, 0.5], 28, [8, 8, 8, 4]),
        ([1.0, 1.0, 1.0, 1.0], 16, [4, 4, 4, 4]),
        ([1.0, 1e-9], 10, [9, 1]),
        ([3.0, 2.0, 1.0], 3, [1, 1, 1]),
    ],
)
def test_samples_by_speed(speeds: list[float], batch_size: int, sizes: list[int]) -> None:
    assert np.abs(np.subtract(dealt(speeds, batch_size), sizes)).max() <= 1
    assert sum(dealt(speeds, batch_size)) == batch_size and min(dealt(speeds, batch_size)) >= 1


def test_ranks_measure_and_train_as_virtual_learners(tmp_path: Path) -> None:
    found = ranks.run("balanced_ranks", LEARNERS)
    sizes, _, model = found[0]
    assert sizes == [6, 6, 3] and all(one[0] == sizes for one in found)
    config = images.config(COMMON, data={"learners_batch": sizes})
    train(config, out=tmp_path / "virtual", dataset=images.images())
    ours, theirs = (
        safetensors.torch.load(one) for one in (model, (tmp_path / "virtual" / "model.safetensors").read_bytes())
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "too few": ({"data": {"learners_batch": [7, 8]}}, "give each of 3 learners at least 1 sample"),
    "another sum": ({"data": {"learners_batch": [7, 2, 5]}}, "together the batch size 15"),
    "none": ({"data": {"learners_batch": [15, 0, 0]}}, "at least 1 sample"),
    "sampler": ({"data": {"learners_batch": [7, 2, 6], "sampler": "fixed"}}, "needs sampler 'global'"),
    "accumulation": ({"data": {"balance": True, "accumulation": 5}}, "one backward pass a step"),
    "compile": ({"data": {"learners_batch": [7, 2, 6]}, "model": {"compile": True}}, "leave one out"),
    "statistics": ({"data": {"learners_batch": [7, 2, 6]}, "run": {"statistics_every": 1}}, "leave one out"),
    "noise": (
        {"data": {"learners_batch": [7, 2, 6]}, "strategy": {"name": "noisy_ssgd"}},
        "averages all learners alike",
    ),
    "ddp": ({"data": {"balance": True}, "strategy": {"name": "ddp"}}, "averages all learners alike"),
}


@each(("fields", "message"), BAD.values())
def test_bad_settings(fields: dict[str, Any], message: str) -> None:
    strategy = {"name": "dpsgd", "learners": 3, **fields.get("strategy", {})}
    with pytest.raises(ValueError, match=message):
        images.config(
            data={"batch_size": 15, **fields["data"]},
            strategy=strategy,
            run=fields.get("run", {}),
            model=fields.get("model", {}),
        )


def test_virtual_learners_have_no_speed(tmp_path: Path) -> None:
    config = images.config(data={"batch_size": 15, "balance": True}, strategy={"name": "dpsgd", "learners": 3})
    with pytest.raises(ValueError, match=r"set data.learners_batch instead"):
        train(config, out=tmp_path / "run", dataset=images.images())
    assert not (tmp_path / "run").exists()
