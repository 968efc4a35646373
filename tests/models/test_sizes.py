"""The networks at full size: published numbers of bytes, and gradients that reach every parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpcore.models import MODELS
from helpers.models import awake, idle

# Parameters and fp32 megabytes of 2^20 bytes, as printed in table 1 of "Why Does Decentralized Training Outperform
# Synchronous Training in the Large Batch Setting?".
PUBLISHED = {
    "efficientnet_b0": (2_912_089, 11.11),
    "senet18": (11_260_354, 42.95),
    "vgg19": (20_040_522, 76.45),
    "resnet18": (11_173_962, 42.63),
    "densenet121": (6_956_298, 26.54),
    "mobilenet": (3_217_226, 12.27),
    "mobilenet_v2": (2_296_922, 8.76),
    "shufflenet": (1_263_854, 4.82),
    "googlenet": (6_166_250, 23.53),
    "resnext29": (9_128_778, 34.82),
    "speech_lstm": (43_154_944, 164.62),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name: str) -> None:
    with torch.device("meta"):
        model = MODELS.build(name)
    num_parameters, megabytes = PUBLISHED[name]
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    # Printed with two digits; googlenet's 23.52 is printed as 23.53.
    assert abs(4 * num_parameters / 2**20 - megabytes) <= (0.01 if name == "googlenet" else 0.0051)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "speech_lstm"])
def test_a_batch_of_two_and_gradients_that_reach_every_parameter(name: str) -> None:
    model = awake(MODELS.build(name))
    logits = model(torch.randn(2, 3, 32, 32))
    assert logits.shape == (2, 10) and bool(logits.isfinite().all())
    nn.functional.cross_entropy(logits, torch.tensor([3, 8])).backward()
    expected_idle = idle(model)
    assert bool(expected_idle) == (name in ("vgg19", "googlenet"))
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), parameter_name
        assert parameter_name in expected_idle or parameter.grad.abs().sum() > 0, parameter_name
