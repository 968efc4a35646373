"""The saddle is one: value, gradient and Hessian of the mean loss at zero, against the formula."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ddpcore.data import load_dataset
from ddpcore.models import MODELS

ESCAPE, DIMENSION = 0.2, 5


MODEL = MODELS.build("saddle", input_shape=(2 * (DIMENSION - 1),), escape=ESCAPE)


def mean_loss(weights: Tensor, samples: Tensor) -> Tensor:
    logits = torch.func.functional_call(MODEL, {"e": weights[:1], "s": weights[1:]}, (samples,))
    return torch.nn.functional.cross_entropy(logits, torch.ones(len(samples), dtype=torch.int64))


def test_a_strict_saddle() -> None:
    samples = load_dataset("saddle", dimension=DIMENSION).train.inputs.double()
    zero = torch.zeros(DIMENSION, dtype=torch.float64)
    assert float(mean_loss(zero, samples)) == pytest.approx(math.log(2), rel=1e-12)
    gradient = torch.func.grad(mean_loss)(zero, samples)
    assert float(gradient.abs().max()) < 1e-15
    p, q = samples.chunk(2, dim=1)
    expected = torch.zeros(DIMENSION, DIMENSION, dtype=torch.float64)
    expected[0, 0] = -ESCAPE / 2
    expected[1:, 1:] = p.T @ p / (4 * len(p))
    torch.testing.assert_close(torch.func.hessian(mean_loss)(zero, samples), expected, rtol=1e-12, atol=1e-15)
    of_one = torch.func.hessian(mean_loss)(zero, samples[:1])
    torch.testing.assert_close(of_one[0, 1:], -q[0] / 2, rtol=1e-12, atol=1e-15)


def test_where_the_weights_begin() -> None:
    torch.manual_seed(0)
    model = MODELS.build("saddle", input_shape=(2000,), radius=1e-3)
    assert [tuple(parameter.shape) for parameter in model.parameters()] == [(1,), (1000,)]
    assert float(model.s.detach().std()) == pytest.approx(1e-3, rel=0.1)
    assert MODELS.build("saddle", radius=0.0).e.item() == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [({"input_shape": (3,)}, "of 3 numbers"), ({"escape": 0.0}, "escape is 0.0"), ({"radius": -1.0}, "radius is -1.0")],
)
def test_refusals(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        MODELS.build("saddle", **options)
