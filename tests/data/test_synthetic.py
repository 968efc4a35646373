"""Synthetic data: standard normal, balanced, and decided by the seed."""

from __future__ import annotations

import pytest
import torch

from ddpcore.data import built_in


def test_defaults() -> None:
    data = built_in.load_synthetic()
    assert (data.name, data.num_classes, data.input_shape, data.test) == ("synthetic", 2, (10,), None)
    assert data.train.inputs.shape == (1000, 10)
    assert data.train.inputs.dtype == torch.float32
    # 10000 normal samples: the mean has a standard deviation of 0.01, the spread of 0.007
    assert abs(float(data.train.inputs.mean())) < 0.05
    assert abs(float(data.train.inputs.std()) - 1) < 0.035
    assert 0.42 < float(data.train.labels.float().mean()) < 0.58


def test_any_shape_and_classes() -> None:
    data = built_in.load_synthetic((3, 4, 4), 7)
    assert data.train.inputs.shape == (1000, 3, 4, 4)
    assert sorted(set(data.train.labels.tolist())) == list(range(7))
    assert int(data.train.labels.bincount().min()) > 90  # 143 expected, deviation 11


def test_the_seed_decides_and_the_global_generator_rests() -> None:
    state = torch.get_rng_state()
    one, same, other = (
        built_in.load_synthetic(seed=1).train,
        built_in.load_synthetic(seed=1).train,
        built_in.load_synthetic(seed=2).train,
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.inputs, same.inputs) and torch.equal(one.labels, same.labels)
    assert not torch.equal(one.inputs, other.inputs) and not torch.equal(one.labels, other.labels)


def test_impossible_arguments() -> None:
    for shape in ((), (0,), (3, -1)):
        with pytest.raises(ValueError, match="input_shape"):
            built_in.load_synthetic(shape)
    with pytest.raises(ValueError, match="num_classes is 1"):
        built_in.load_synthetic(num_classes=1)
    with pytest.raises(ValueError, match="seed is -1"):
        built_in.load_synthetic(seed=-1)


def test_samples_are_not_made_of_the_numbers_that_weights_are_made_of() -> None:
    for inputs in (
        built_in.load_synthetic(seed=5).train.inputs,
        built_in.load_saddle(seed=5, dimension=11).train.inputs[:, :10],
    ):
        torch.manual_seed(5)
        weights = torch.stack([torch.empty_like(inputs).uniform_(-1, 1), torch.randn_like(inputs)])
        for other in weights.flatten(1):
            both = torch.stack([inputs.flatten(), other])
            assert abs(float(both.corrcoef()[0, 1])) < 0.06, "10000 pairs: six standard deviations"
