"""Splits turn indices into batches; data sets hold samples out and augment only what is trained on."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from ddpcore.data import Augmentation, Dataset, Normalization, Split
from ddpcore.data.base import generator


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


def test_tokens_and_labels_at_each_place_are_whole_numbers() -> None:
    tokens, labels = torch.arange(12).reshape(4, 3) % 5, torch.arange(1, 13).reshape(4, 3) % 5
    split = Split(tokens, labels)
    for indices in (torch.tensor([3, 0]), torch.tensor([[1, 2], [3, 3]])):
        inputs, targets = split.batch(indices)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(inputs, tokens[indices]) and torch.equal(targets, labels[indices])
    data = Dataset("tiny", split, None, 5, (3,))
    assert data.digest() != replace(data, train=replace(split, inputs=tokens.flip(1))).digest()
    shuffled = data.with_random_labels(0).train.labels
    assert shuffled.shape == labels.shape and len(shuffled.unique()) > 2
    with pytest.raises(ValueError, match=r"tiny: a token is outside 0\.\.4, raise num_classes"):
        replace(data, train=replace(split, inputs=tokens + 1))
    with pytest.raises(ValueError, match="tiny: some splits have tokens and others have none"):
        replace(data, test=Split(tokens.float(), labels))


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


def test_the_digest_is_that_of_the_samples() -> None:
    split = images()
    data = Dataset("tiny", split, None, 3, (1, 2, 2))
    brighter = replace(split, inputs=split.inputs + 1)
    relabelled = replace(split, labels=split.labels.flip(0))
    assert not torch.equal(relabelled.labels, split.labels)
    others = [
        replace(data, train=brighter),
        replace(data, train=relabelled),
        replace(data, test=split),
        replace(data, validation=split),
        replace(data, num_classes=4),
        replace(data, train=split.take(torch.arange(5))),
        Dataset("tiny", replace(split, inputs=split.inputs.mT.reshape(6, 2, 2)), None, 3, (2, 2)),
    ]
    assert len({data.digest(), *(other.digest() for other in others)}) == 1 + len(others)
    same = Dataset("another name", split.take(torch.arange(6)), None, 3, (1, 2, 2))
    assert same.digest() == data.digest() == data.to("cpu").digest()
    features = [replace(split, inputs=split.inputs.float() + last) for last in (0.0, 1e-6)]
    first, second = (Dataset("tiny", part, None, 3, (1, 2, 2)).digest() for part in features)
    assert first == second != data.digest(), "of floating samples the shapes alone"


@pytest.mark.parametrize(
    ("inputs", "labels", "message"),
    [
        (torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, dtype=torch.int64), "inputs are torch.int32"),
        (torch.zeros(3, 2, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), r"tokens must be \[N, T\]"),
        (torch.zeros(3, 2), torch.zeros(3), "labels are torch.float32"),
        (torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64), r"\[3, 2\] and labels \[2\]"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.int64), r"\[3\] and labels \[3\]"),
        (torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), "N and T at least 1"),
        (torch.zeros(3, 2), torch.zeros(3, 0, dtype=torch.int64), "N and T at least 1"),
        (torch.zeros(3, 2), torch.zeros(3, 2, 2, dtype=torch.int64), r"must be \[N, ...\] and \[N\] or \[N, T\]"),
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


def big_images(num_samples: int = 40) -> Split:
    pixels = torch.randint(256, (num_samples, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    return Split(pixels.to(torch.uint8), torch.arange(num_samples) % 7)


def test_hold_out_moves_random_training_samples_and_nothing_else() -> None:
    whole, test = big_images(), big_images(5)
    data = Dataset("tiny", whole, test, 7, (3, 8, 8)).transformed(None, Augmentation(seed=3))
    parted = data.hold_out(10, seed=1)
    assert parted.validation is not None and parted.test is data.test
    assert (len(parted.train), len(parted.validation)) == (30, 10)
    samples = torch.cat([parted.train.inputs, parted.validation.inputs]).flatten(1)
    assert sorted(samples.tolist()) == sorted(whole.inputs.flatten(1).tolist()), "each sample is in one of the two"
    rows = whole.inputs.flatten(1).tolist()
    where = [rows.index(row) for row in samples.tolist()]
    assert where != sorted(where)
    assert torch.equal(torch.cat([parted.train.labels, parted.validation.labels]), whole.labels[where])
    assert parted.train.augmentation == Augmentation(seed=3) and parted.validation.augmentation is None
    again, other = data.hold_out(10, seed=1).validation, data.hold_out(10, seed=2).validation
    assert again is not None and torch.equal(again.inputs, parted.validation.inputs)
    assert other is not None and not torch.equal(other.inputs, parted.validation.inputs)
    more = data.hold_out(11, seed=1).validation
    assert more is not None and torch.equal(more.inputs[1:], parted.validation.inputs), "the last of one order"
    for count in (0, 40, -1):
        with pytest.raises(ValueError, match=f"cannot hold out {count} of 40"):
            data.hold_out(count)


def test_only_training_is_augmented_and_all_is_normalized() -> None:
    norm = Normalization((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
    data = Dataset("tiny", big_images(), big_images(6), 7, (3, 8, 8)).hold_out(5).transformed(norm, Augmentation())
    assert set(data.splits()) == {"train", "validation", "test"}
    for name, split in data.to("cpu").splits().items():
        assert split.normalization == norm
        assert (split.augmentation is None) == (name != "train")
        everything = torch.arange(len(split))
        plain = (split.inputs / 255 - torch.tensor(norm.mean).view(3, 1, 1)) / torch.tensor(norm.std).view(3, 1, 1)
        found = split.batch(everything, epoch=4)[0]
        if name == "train":
            assert (found - plain).abs().max() > 0.1
            augmented = Augmentation()(split.inputs, everything, 4)
            assert torch.equal(found, norm(augmented))
        else:
            torch.testing.assert_close(found, plain)  # one rounding more or less


def test_only_images_are_transformed() -> None:
    features, labels = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="only uint8 images"):
        Split(features, labels, augmentation=Augmentation())
    with pytest.raises(ValueError, match="only uint8 images"):
        Split(features, labels, Normalization((0.0,), (1.0,)))
    with pytest.raises(ValueError, match="has 1 channels for images of 3"):
        Split(big_images().inputs, big_images().labels, Normalization((0.0,), (1.0,)))


def test_random_numbers_of_a_seed_and_a_key() -> None:
    def draw(seed: int, *key: int) -> list[float]:
        return torch.randn(8, generator=generator(seed, *key)).tolist()

    known = [draw(0), draw(1), draw(2**32), draw(0, 1), torch.randn(8, generator=torch.manual_seed(0)).tolist()]
    assert all(one != other for i, one in enumerate(known) for other in known[:i])
    assert draw(2**32) == known[2], "and nothing else decides them"
