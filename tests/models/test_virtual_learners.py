"""Every model as virtual learners: vmap over stacked weights and buffers gives what learners one by one give."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from ddpcore.models import MODELS
from ddpcore.parameters.flat import FlatParameters
from ddpcore.parameters.learner_models import LearnerModels
from helpers.models import random_batch, small

NUM_LEARNERS = 2
# (name, vectorize): torch has no batching rule for LSTM layers.
WAYS = [
    (name, together)
    for name in MODELS.names()
    for together in (True, False)
    if (name, together) != ("speech_lstm", True)
]


def learners_of(name: str, **options: float) -> list[nn.Module]:
    torch.manual_seed(0)
    return [small(name, **options).double() for _ in range(NUM_LEARNERS)]


def together_of(learners: list[nn.Module], vectorize: bool | str | None) -> LearnerModels:
    models = [copy.deepcopy(learner) for learner in learners]
    flat = FlatParameters([model.named_parameters() for model in models])
    return LearnerModels(models, flat, vectorize)


def no_dropout(name: str) -> dict[str, float]:
    return {option: 0.0 for option in ("dropout", "stochastic_depth") if option in MODELS.options(name)}


def batches(name: str) -> Tensor:
    torch.manual_seed(1)
    # ResNets take images of any size, and of many channels small ones will do.
    shape = (3, 8, 8) if name in ("resnet", "resnet18") else None
    inputs, _ = random_batch(MODELS.spec(name), NUM_LEARNERS, 3, input_shape=shape)
    return inputs.double() if inputs.is_floating_point() else inputs


def state(model: nn.Module) -> dict[str, Tensor]:
    """Gradients and buffers."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return gradients | dict(model.named_buffers())


@pytest.mark.parametrize(("name", "vectorize"), WAYS)
def test_virtual_learners_are_learners(name: str, vectorize: bool) -> None:
    """Logits, gradients and running statistics, in float64: another order of sums changes the last bits only."""
    learners, inputs = learners_of(name, **no_dropout(name)), batches(name)
    together = together_of(learners, vectorize)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")  # attention: no batching rule on the CPU
        logits = together(inputs)
        logits.square().sum().backward()
    for j, learner in enumerate(learners):
        expected = learner(inputs[j])
        expected.square().sum().backward()
        torch.testing.assert_close(logits[j], expected, rtol=1e-10, atol=1e-10)
        own, found = state(learner), state(together.models[j])
        assert own.keys() == found.keys() and len(own) >= len(list(learner.parameters()))
        for key, value in own.items():
            torch.testing.assert_close(found[key], value, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("name", [name for name in MODELS.names() if no_dropout(name)])
def test_each_learner_drops_on_its_own(name: str, vectorize: bool) -> None:
    learner = learners_of(name)[0]
    together = together_of([learner, learner], vectorize)
    same = batches(name)[:1].expand(2, *batches(name).shape[1:])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        first, second = together(same)
        assert not torch.allclose(first, second)
        first, second = together.eval()(same)
    torch.testing.assert_close(first, second)


def test_lstm_layers_run_in_turn() -> None:
    """Also with ``vectorize=True``: they keep a list of their weights, which vmap would take from learner 0."""
    inputs = batches("speech_lstm")
    outputs = together_of(learners_of("speech_lstm"), vectorize=None)(inputs)
    assert torch.equal(together_of(learners_of("speech_lstm"), vectorize=True)(inputs), outputs)
