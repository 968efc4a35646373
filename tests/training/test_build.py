"""The parts that are built from a config."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch

from ddpcore.data import ShardedBatches, load_dataset
from ddpcore.runtime.launch import World
from ddpcore.training import TrainConfig
from ddpcore.training.build import (
    LearnerPlacement,
    build_batches,
    build_dataset,
    build_schedule,
    build_trainer,
    total_steps,
)
from ddpcore.training.config import merged
from helpers import images

TEN = ShardedBatches(1280, 128)  # steps in an epoch


def rates(num: int, **fields: Any) -> list[float]:
    schedule = build_schedule(
        TrainConfig.from_dict(merged({"run": {"epochs": 4}, "optimizer": {"lr": 1.0}}, fields)), TEN
    )
    return [schedule(step) for step in range(num)]


def test_schedules() -> None:
    assert rates(3) == [1.0] * 3
    assert rates(1, data={"batch_size": 512}, optimizer={"reference_batch_size": 128}) == [4.0]
    step = rates(40, optimizer={"schedule": "step", "milestones": [1, 2.5], "gamma": 0.5})
    assert [step[i] for i in (0, 9, 10, 24, 25, 39)] == [1, 1, 0.5, 0.5, 0.25, 0.25]
    assert rates(3, optimizer={"schedule": "step", "milestones": [1], "gamma": 0.5, "schedule_unit": "steps"}) == [
        1,
        0.5,
        0.5,
    ]
    cosine = rates(41, optimizer={"schedule": "cosine"})
    assert (cosine[0], cosine[20], cosine[40]) == pytest.approx((1.0, 0.5, 0.0))
    exponential = rates(21, optimizer={"schedule": "exponential", "gamma": 0.25})
    assert (exponential[10], exponential[20]) == pytest.approx((0.25, 0.0625))


def test_warmup_in_epochs_and_steps() -> None:
    assert rates(21, optimizer={"warmup": 2})[::5] == pytest.approx([0.05, 0.3, 0.55, 0.8, 1.0])
    assert rates(3, optimizer={"warmup": 2, "schedule_unit": "steps"}) == pytest.approx([0.5, 1.0, 1.0])
    ramp = rates(
        4,
        optimizer={"warmup": 4, "schedule_unit": "steps", "reference_batch_size": 128, "warmup_start": 0.25},
        data={"batch_size": 512},
    )
    assert ramp == pytest.approx([1.75, 2.5, 3.25, 4.0]), "from the reference's rate to the scaled one"


def test_warmup_and_milestones_are_rounded_to_the_nearest_step() -> None:
    """2.6 steps are 3, and 2.4 are 2."""
    three, two = [1 / 3, 2 / 3, 1.0, 1.0], [0.5, 1.0, 1.0, 1.0]
    assert (
        rates(4, optimizer={"warmup": 0.26})
        == rates(4, optimizer={"warmup": 2.6, "schedule_unit": "steps"})
        == pytest.approx(three)
    )
    assert (
        rates(4, optimizer={"warmup": 0.24})
        == rates(4, optimizer={"warmup": 2.4, "schedule_unit": "steps"})
        == pytest.approx(two)
    )
    for mark, first in ((0.26, 3), (0.24, 2)):
        step = rates(4, optimizer={"schedule": "step", "milestones": [mark], "gamma": 0.5})
        assert step == [1.0] * first + [0.5] * (4 - first)


def test_length() -> None:
    assert total_steps(TrainConfig.from_dict({"run": {"epochs": 3}}), TEN) == 30
    assert total_steps(TrainConfig.from_dict({"run": {"steps": 7}}), TEN) == 7


def test_places_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="a world of 2 needs a process group"):
        LearnerPlacement.of(TrainConfig.from_dict({"run": {"epochs": 1}}), World(0, 2, 0, 2))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device is 'cuda' and torch sees no GPU: take 'cpu'"):
            LearnerPlacement.of(TrainConfig.from_dict({"run": {"epochs": 1, "device": "cuda"}}), None)


def test_the_same_start_for_every_strategy() -> None:
    """Weights and batches depend only on the seed."""
    starts = []
    for fields in ({}, {"strategy": {"name": "dpsgd", "learners": 2}}, {"strategy": {"name": "ssgd", "learners": 4}}):
        place = LearnerPlacement.of(
            TrainConfig.from_dict(
                merged({"run": {"epochs": 1, "device": "cpu"}, "model": "mlp", "data": {"batch_size": 8}}, fields)
            ),
            None,
        )
        trainer = build_trainer(place, build_dataset(place))
        starts.append(trainer)
        weights = list(trainer.handle.evaluation_model().parameters())
        first = list(starts[0].handle.evaluation_model().parameters())
        assert all(torch.equal(a, b) for a, b in zip(weights, first, strict=True))
        assert torch.equal(trainer.batches.indices(3).flatten(), starts[0].batches.indices(3).flatten())
        assert torch.equal(trainer.dataset.train.inputs, starts[0].dataset.train.inputs)


def test_options_reach_their_parts() -> None:
    config = TrainConfig.from_dict(
        {
            "run": {"epochs": 1, "device": "cpu", "seed": 9},
            "model": {"name": "lenet5", "dropout": 0.1, "channels_last": True, "precision": "bf16"},
            "data": {
                "sampler": "fixed",
                "drop_last": False,
                "batch_size": 12,
                "accumulation": 3,
                "num_validation": 100,
            },
            "optimizer": {"label_smoothing": 0.1, "max_grad_norm": 1.0, "name": "torch_adamw"},
        }
    )
    place = LearnerPlacement.of(config, None)
    dataset = build_dataset(place)
    assert {name: len(split) for name, split in dataset.splits().items()} == {"train": 900, "validation": 100}
    trainer = build_trainer(place, dataset)
    model = trainer.module
    assert model.classifier[3].p == 0.1
    assert model.features[4].weight.is_contiguous(memory_format=torch.channels_last)
    assert trainer.batches == build_batches(config, dataset)
    assert (trainer.batches.sampler, trainer.batches.drop_last, trainer.batches.seed) == ("fixed", False, 9)
    assert (trainer.accumulation, trainer.autocast, trainer.label_smoothing) == (3, torch.bfloat16, 0.1)
    assert trainer.max_grad_norm == 1.0
    fused = build_trainer(place_of(config, optimizer="lamb"), dataset)
    assert fused.max_grad_norm is None
    assert fused.optimizer.param_groups[0]["max_grad_norm"] == 1.0


def place_of(config: TrainConfig, **fields: Any) -> LearnerPlacement:
    return LearnerPlacement.of(config.overridden(fields), None)


def test_models_and_schedules_are_tried_before_training() -> None:
    """One line names what is wrong; a right model and the generators stay as they are."""
    own = "helpers.own_models"
    digits = load_dataset("digits", num_train=40)
    wrong = {"wide": "gives [2, 1000] for", "few": "gives [2, 5] for", "images": "gives [2, 10, 8, 8] for",
             "dict": "gives a dict for", "lazy": "has a parameter without a shape"}  # fmt: skip
    for kind, says in wrong.items():
        config = images.config(model={"name": f"{own}:Outputs", "kind": kind}, data={"name": "digits"})
        with pytest.raises(ValueError, match=re.escape(f"model {own}:Outputs")) as caught:
            build_trainer(LearnerPlacement.of(config, None), digits)
        assert says in str(caught.value) and "\n" not in str(caught.value)
    config = images.config(data={"name": "digits"}, model="mlp", optimizer={"schedule": f"{own}:no_rate"})
    with pytest.raises(ValueError, match=f"schedule {own}:no_rate gives None at step 0: it must give a number"):
        build_trainer(LearnerPlacement.of(config, None), digits)
    config, before = images.config(model=f"{own}:Counts", data={"name": "digits"}), random.getstate()
    module = build_trainer(LearnerPlacement.of(config, None), digits).module
    assert float(module.passes) == 0 and module.training and not module.norm.training and not module.is_begun
    assert random.getstate() == before


def test_options_reach_the_data_set() -> None:
    """Synthetic speech, and an LSTM of the size of its samples, on two virtual learners."""
    config = TrainConfig.from_dict(
        {
            "run": {"steps": 2, "device": "cpu"},
            "model": {"name": "speech_lstm", "depth": 1, "width": 4, "bottleneck": 3},
            "data": {
                "name": "synthetic_speech",
                "num_classes": 6,
                "num_frames": 5,
                "num_features": 3,
                "num_samples": 50,
                "batch_size": 8,
            },
            "strategy": {"name": "dpsgd", "learners": 2},
        }
    )
    place = LearnerPlacement.of(config, None)
    dataset = build_dataset(place)
    assert (dataset.num_classes, dataset.input_shape, len(dataset.train)) == (6, (5, 3), 40)
    trainer = build_trainer(place, dataset)
    model = trainer.module
    assert (model.lstm.input_size, model.head[1].out_features) == (3, 6)
    before = [parameter.clone() for parameter in model.parameters()]
    trainer.step()
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    measured = build_dataset(place_of(config, data="synthetic", model="mlp"))
    assert (measured.num_classes, measured.input_shape) == (10, (1, 28, 28))
    other = build_dataset(place_of(config, data={"name": "synthetic", "num_classes": 3}, model="mlp"))
    assert (other.num_classes, other.input_shape) == (3, (1, 28, 28))
