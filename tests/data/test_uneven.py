"""Uneven shards: their parts, how uneven they are, and the batches that learners take from them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from ddpcore.data import SHARDS, ShardedBatches, split, total_variation
from ddpcore.data.uneven import _log_gamma

LABELS = torch.arange(1003) * 7 % 10  # 10 classes, in turn
MADE = ("even", "dirichlet", "by_class")


@pytest.mark.parametrize("num_learners", [1, 3, 8, 1003])
@pytest.mark.parametrize("shards", MADE)
def test_parts_are_disjoint_and_equal(shards: str, num_learners: int) -> None:
    parts = split(shards, LABELS, num_learners, seed=4, alpha=0.1)
    assert [len(part) for part in parts] == [1003 // num_learners] * num_learners
    everyone = np.concatenate(parts)
    assert len(set(everyone.tolist())) == len(everyone)
    assert everyone.min() >= 0 and everyone.max() < 1003
    again = split(shards, LABELS.numpy(), num_learners, seed=4, alpha=0.1)
    assert all(map(np.array_equal, parts, again))
    if num_learners in (3, 8):
        other = split(shards, LABELS, num_learners, seed=5, alpha=0.1)
        assert not all(map(np.array_equal, parts, other))


def test_total_variation() -> None:
    labels = [0, 0, 1, 1]
    assert total_variation(labels, [[0, 1], [2, 3]]) == 0.5
    assert total_variation(labels, [[0, 2], [1, 3]]) == 0.0
    assert total_variation([0, 1, 2, 3], [[0], [1], [2], [3]]) == 0.75


def test_alpha_says_how_uneven() -> None:
    found = [total_variation(LABELS, split("dirichlet", LABELS, 8, alpha=alpha)) for alpha in (1e-6, 0.1, 1, 10, 1e6)]
    assert found == sorted(found, reverse=True)
    assert found[0] > 0.75
    assert found[-1] < 10 * 1 / 125 / 2, "counts are at most about one sample off for each of 10 classes"
    assert total_variation(LABELS, split("even", LABELS, 8)) < 0.1
    assert total_variation(LABELS, split("by_class", LABELS, 5)) == pytest.approx(0.8, abs=0.01)


def test_a_large_alpha_gives_all_learners_the_frequencies_of_the_whole() -> None:
    labels = np.repeat([0, 1, 3], [600, 300, 100])  # class 2 has no sample
    for part in split("dirichlet", labels, 4, alpha=1e7):
        np.testing.assert_allclose(np.bincount(labels[part], minlength=4), [150, 75, 0, 25], atol=2)


@pytest.mark.parametrize("shape", [0.05, 0.7, 1.0, 4.5])
def test_gamma_numbers_have_their_moments(shape: float) -> None:
    """Mean and variance of the gamma distribution are both its shape; within five standard errors of 4000 numbers."""
    numbers = np.exp([_log_gamma(shape, 1, index) for index in range(4000)])
    fourth = 3 * shape**2 + 6 * shape  # central
    assert abs(numbers.mean() - shape) < 5 * np.sqrt(shape / 4000)
    assert abs(numbers.var() - shape) < 5 * np.sqrt((fourth - shape**2) / 4000)


def test_dirichlet_frequencies_of_the_first_learner() -> None:
    """Of two classes with alpha 1 the share of one is uniform: its mean is 1/2 and its variance 1/12."""
    labels = np.arange(2000) % 2
    shares = np.array([labels[split("dirichlet", labels, 20, seed=seed, alpha=1.0)[0]].mean() for seed in range(400)])
    assert abs(shares.mean() - 0.5) < 5 * np.sqrt(1 / 12 / 400)
    assert abs(shares.var() - 1 / 12) < 0.02


def test_given_parts() -> None:
    parts = split("given", [0, 0, 1, 1], 2, parts=[[3, 0], (1,)])
    assert [part.tolist() for part in parts] == [[0, 3], [1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shards": "dirichlet", "alpha": 0}, "shards: alpha is 0"),
        ({"shards": "dirichlet", "alpha": -1.0}, "shards: alpha is -1"),
        ({"shards": "dirichlet", "alpha": float("nan")}, "shards: alpha"),
        ({"shards": "dirichlet", "num_learners": 5}, "5 learners cannot share 4 samples: take at most 4"),
        ({"shards": "by_class", "num_learners": 5}, "5 learners cannot share 4 samples"),
        ({"shards": "by_clas"}, "did you mean 'by_class'"),
        ({"shards": "given"}, "give one list of sample numbers for each learner"),
        ({"shards": "given", "parts": [[0]]}, "there are 1 parts and 2 learners"),
        ({"shards": "given", "parts": [[0], []]}, "the part of learner 1 .* at least one sample"),
        ({"shards": "given", "parts": [[0], [4]]}, "learner 1 has samples 4 to 4: there are 0 to 3"),
        ({"shards": "given", "parts": [[-1], [2]]}, "learner 0 has samples -1"),
        ({"shards": "given", "parts": [[0, 1, 0], [2]]}, "learner 0 has a sample twice"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split(**{"labels": [0, 0, 1, 1], "num_learners": 2, **options})
    assert "given" in SHARDS


def test_learners_go_through_their_parts_again_and_again() -> None:
    parts = split("given", np.zeros(30, dtype=int), 3, parts=[range(14), range(14, 17), range(17, 30)])
    batches = ShardedBatches(30, 15, 3, seed=2, parts=parts)
    assert batches.samples_per_learner == 10
    assert batches.steps_per_epoch == 2
    rows = torch.cat([batches.indices(step) for step in range(28)], dim=1)
    assert rows.shape == (3, 140)
    for row, part in zip(rows, parts, strict=True):
        passes = [row[first : first + len(part)].tolist() for first in range(0, 140 - len(part) + 1, len(part))]
        assert all(sorted(one) == part.tolist() for one in passes)
        assert passes[0] != passes[1]
    later = ShardedBatches(30, 15, 3, seed=2, parts=parts)
    for step in (27, 3, 3, 11, 0):  # in any order
        assert torch.equal(later.indices(step), rows[:, 5 * step : 5 * step + 5])
    assert max(Counter(rows[1].tolist()).values()) == 47


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": [[0], []]}, r"parts have \[1, 0\] samples"),
        ({"parts": [[0]]}, r"parts have \[1\] samples"),
        ({"parts": [[0], [1]], "sampler": "fixed"}, "leave the sampler out"),
        ({"parts": [[0], [1]], "drop_last": False}, "leave drop_last on"),
    ],
)
def test_batches_that_do_not_fit_parts(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardedBatches(4, 2, 2, **options)
