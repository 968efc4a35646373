"""Splits turn indices into batches; shards are the same global batch for any number of learners."""

from __future__ import annotations

import random
from dataclasses import FrozenInstanceError

import pytest
import torch

from ddpcore.data import Dataset, ShardedBatches, Split
from ddpcore.data.shards import _order


def images(num_samples: int = 6) -> Split:
    pixels = torch.arange(num_samples * 4, dtype=torch.uint8).reshape(num_samples, 1, 2, 2)
    return Split(pixels, torch.arange(num_samples) % 3)


def test_batches_of_images_are_scaled_and_of_features_are_not() -> None:
    split = images()
    inputs, labels = split.batch(torch.tensor([5, 0, 5]))
    assert inputs.dtype == torch.float32
    assert torch.equal(inputs * 255, split.inputs[[5, 0, 5]].float())
    assert torch.equal(labels, torch.tensor([2, 0, 2]))
    assert (
        Split(torch.full((1, 1, 2, 2), 255, dtype=torch.uint8), torch.tensor([0])).batch(torch.tensor([0]))[0].max()
        == 1
    )
    features = Split(torch.tensor([[300.0, -1.0], [2.0, 3.0]], dtype=torch.float64), torch.tensor([1, 0]))
    inputs, labels = features.batch(torch.tensor([0]))
    assert inputs.dtype == torch.float32
    assert inputs.tolist() == [[300.0, -1.0]]


def test_a_batch_does_not_share_memory_with_the_split() -> None:
    features = Split(torch.zeros(2, 2), torch.tensor([1, 0]))
    inputs, labels = features.batch(torch.tensor([0, 1]))
    inputs.add_(1)
    labels.add_(1)
    assert features.inputs.sum() == 0
    assert features.labels.tolist() == [1, 0]


def test_indices_of_all_learners_make_one_stacked_batch() -> None:
    split = images()
    indices = torch.tensor([[0, 1, 2], [3, 4, 5]])
    inputs, labels = split.batch(indices)
    assert inputs.shape == (2, 3, 1, 2, 2)
    for learner in range(2):
        own_inputs, own_labels = split.batch(indices[learner])
        assert torch.equal(inputs[learner], own_inputs)
        assert torch.equal(labels[learner], own_labels)


def test_to_moves_and_frozen_stays() -> None:
    split = images()
    moved = split.to("meta")
    assert moved.inputs.device.type == moved.labels.device.type == "meta"
    assert len(split) == 6
    with pytest.raises(FrozenInstanceError):
        split.labels = split.labels  # type: ignore[misc]
    data = Dataset("tiny", split, split, 3, (1, 2, 2)).to("cpu")
    assert data.test is not None and torch.equal(data.test.labels, split.labels)


@pytest.mark.parametrize(
    ("inputs", "labels", "message"),
    [
        (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), "inputs are torch.int64"),
        (torch.zeros(3, 2), torch.zeros(3), "labels are torch.float32"),
        (torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64), r"\[3, 2\] and labels \[2\]"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.int64), r"\[3\] and labels \[3\]"),
        (torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), "N at least 1"),
    ],
)
def test_a_split_that_does_not_fit(inputs: torch.Tensor, labels: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Split(inputs, labels)


def test_a_dataset_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"tiny: samples are \[1, 2, 2\]"):
        Dataset("tiny", images(), None, 3, (4,))
    with pytest.raises(ValueError, match=r"outside 0\.\.1"):
        Dataset("tiny", images(2), images(), 2, (1, 2, 2))


def test_an_epoch_visits_each_sample_once_and_drops_the_rest() -> None:
    batches = ShardedBatches(103, 20, 4, seed=1)
    assert batches.steps_per_epoch == 5
    for epoch in range(3):
        seen = torch.cat([batches.indices(5 * epoch + step).flatten() for step in range(5)])
        assert seen.dtype == torch.int64
        assert len(set(seen.tolist())) == len(seen) == 100
        assert int(seen.min()) >= 0 and int(seen.max()) < 103


def test_the_global_batch_does_not_depend_on_the_number_of_learners() -> None:
    for step in range(12):
        whole = ShardedBatches(50, 12, 1, seed=3).indices(step)
        assert whole.shape == (1, 12)
        for num_learners in (2, 3, 4, 6, 12):
            shards = ShardedBatches(50, 12, num_learners, seed=3).indices(step)
            assert shards.shape == (num_learners, 12 // num_learners)
            assert torch.equal(shards.flatten(), whole.flatten())


def test_epochs_and_seeds_differ() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        return ShardedBatches(64, 64, 1, seed).indices(number).flatten().tolist()

    orders = [epoch(seed, number) for seed in range(3) for number in range(3)]
    assert len(set(map(tuple, orders))) == 9  # also: seed and epoch are not added up
    assert all(sorted(order) == list(range(64)) != order for order in orders)


def test_indices_are_a_function_of_the_step_alone() -> None:
    batches = ShardedBatches(30, 6, 2, seed=8)
    in_order = [batches.indices(step) for step in range(40)]
    steps = list(range(40))
    random.Random(0).shuffle(steps)
    _order.cache_clear()
    torch_state = torch.get_rng_state()
    for step in steps:
        again = batches.indices(step)
        assert torch.equal(again, in_order[step])
        again.zero_()  # a caller's own copy
        assert torch.equal(batches.indices(step), in_order[step])
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_the_order_is_the_same_on_every_machine() -> None:
    assert ShardedBatches(8, 8, 2, seed=0).indices(1).tolist() == [[7, 6, 2, 3], [1, 0, 4, 5]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((100, 3, 4), "batch size 3 is below .* 4 learners: take 4"),
        ((100, 10, 4), "batch size 10 is not a multiple of 4 learners: take 8"),
        ((100, 11, 4), "take 12"),
        ((100, 9, 4), "take 8"),
        ((11, 11, 4), "take 8"),
        ((100, 101, 1), "batch size is 101 but there are only 100 samples: take at most 100"),
        ((100, 0, 1), "batch size is 0"),
        ((100, 10, 0), "num_learners is 0"),
        ((100, 10, 1, -1), "seed is -1"),
    ],
)
def test_impossible_batches(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        ShardedBatches(*arguments)
    assert "\n" not in str(caught.value)


def test_a_step_before_the_first() -> None:
    with pytest.raises(ValueError, match="step is -1"):
        ShardedBatches(10, 5).indices(-1)
