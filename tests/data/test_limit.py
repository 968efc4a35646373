"""Subsets of a data set, and random labels."""

from __future__ import annotations

import pytest
import torch

from ddpcore.data import Dataset, Split, load_dataset


def numbered(num_train: int = 40, num_test: int = 20) -> Dataset:
    """Sample i is i, and its label i % 4."""

    def split(num: int) -> Split:
        return Split(torch.arange(num).float()[:, None], torch.arange(num) % 4)

    return Dataset("numbered", split(num_train), split(num_test), 4, (1,))


def taken(split: Split | None) -> list[int]:
    assert split is not None
    numbers = split.inputs[:, 0].int()
    assert torch.equal(numbers % 4, split.labels.int()), "samples keep their labels"
    return numbers.tolist()


def test_a_part_of_each_split() -> None:
    whole = numbered()
    part = whole.limit(10, 5, seed=1)
    train, test = taken(part.train), taken(part.test)
    assert (len(set(train)), len(set(test))) == (10, 5)
    assert train != sorted(train), "a random part"
    assert taken(whole.limit(10, None, seed=1).train) == train
    assert taken(whole.limit(12, None, seed=1).train)[:10] == train
    other = whole.limit(10, 5, seed=2)
    assert taken(other.train) != train
    assert taken(other.test) == test, "runs with other seeds are tested on the same samples"
    assert whole.limit(None, None).train is whole.train


def test_held_out_samples_are_not_trained_on() -> None:
    part = numbered().hold_out(10, seed=1).limit(20, None, seed=1)
    assert not set(taken(part.train)) & set(taken(part.validation))


@pytest.mark.parametrize(("num_train", "num_test"), [(41, None), (None, 21), (0, None)])
def test_more_than_there_are(num_train: int | None, num_test: int | None) -> None:
    with pytest.raises(ValueError, match="numbered: cannot take"):
        numbered().limit(num_train, num_test)


def test_no_test_split_to_take_from() -> None:
    with pytest.raises(ValueError, match="cannot take 5 of 0 test samples"):
        load_dataset("synthetic", num_test=5)


def test_random_labels() -> None:
    whole = numbered(4000)
    random = whole.with_random_labels(seed=1)
    assert torch.equal(random.train.inputs, whole.train.inputs)
    assert random.test is whole.test
    agreement = (random.train.labels == whole.train.labels).double().mean().item()
    assert abs(agreement - 0.25) < 5 * (0.25 * 0.75 / 4000) ** 0.5, "five standard deviations around chance"
    assert torch.equal(whole.with_random_labels(seed=1).train.labels, random.train.labels)
    assert not torch.equal(whole.with_random_labels(seed=2).train.labels, random.train.labels)


def test_by_name() -> None:
    part = load_dataset("synthetic", num_validation=100, num_train=50, random_labels=True)
    assert part.validation is not None
    assert (len(part.train), len(part.validation)) == (50, 100)
