"""Samples of the saddle: mean zero to the last bit, decided by the seed."""

from __future__ import annotations

import pytest
import torch

from ddpcore.data import built_in


def test_each_sample_has_its_negative() -> None:
    data = built_in.load_saddle(dimension=4, num_samples=100, seed=3)
    assert (data.name, data.num_classes, data.input_shape, data.test) == ("saddle", 2, (6,), None)
    assert data.train.inputs.shape == (100, 6) and data.train.inputs.dtype == torch.float32
    assert bool((data.train.labels == 1).all())
    rows = {tuple(row) for row in data.train.inputs.tolist()}
    assert len(rows) == 100
    assert {tuple(-value for value in row) for row in rows} == rows


def test_p_and_q_have_their_spreads() -> None:
    """51200 numbers each, half of them free: their spread is off by 0.4 percent."""
    p, q = built_in.load_saddle(dimension=51, slope=0.5, coupling=2.0).train.inputs.chunk(2, dim=1)
    assert float(p.std()) == pytest.approx(0.5, rel=0.02)
    assert float(q.std()) == pytest.approx(2.0, rel=0.02)


def test_the_seed_decides_and_the_global_generator_rests() -> None:
    state = torch.get_rng_state()
    one, same, other = (built_in.load_saddle(seed=seed).train.inputs for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one, same) and not torch.equal(one, other)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dimension": 1}, "dimension is 1"),
        ({"num_samples": 3}, "num_samples is 3"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"slope": -1.0}, "slope is -1.0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_impossible_arguments(options: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        built_in.load_saddle(**options)
