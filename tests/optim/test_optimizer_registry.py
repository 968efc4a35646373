"""Optimizers by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpcore.optim import OPTIMIZERS, FusedLAMB, build_optimizer
from ddpcore.optim.registry import clips_itself


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_every_name_makes_a_step(name: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = build_optimizer(name, model, lr=0.1, options={})
    before = model.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)
    assert {"params", "lr", "max_grad_norm"}.isdisjoint(OPTIMIZERS.options(name))


def test_options_groups_and_clipping_arrive() -> None:
    model = nn.Linear(3, 2)
    optimizer = build_optimizer(
        "lamb", model, lr=0.1, options={"betas": [0.8, 0.9], "weight_decay": 0.5}, two_groups=True, max_grad_norm=2.0
    )
    assert isinstance(optimizer, FusedLAMB)
    assert [(g["weight_decay"], g["always_adapt"]) for g in optimizer.param_groups] == [(0.5, None), (0.0, False)]
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert optimizer.param_groups[0]["max_grad_norm"] == 2.0
    plain = build_optimizer("torch_adamw", model, lr=0.1, options={}, max_grad_norm=2.0)
    assert "max_grad_norm" not in plain.param_groups[0], "the trainer clips"
    assert [clips_itself(name) for name in ("sgd", "adamw", "lars", "lamb", "torch_sgd")] == [True] * 4 + [False]


def test_a_frozen_parameter_is_left_out() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    optimizer = build_optimizer("sgd", model, lr=0.1, options={})
    assert [p is model.weight for p in optimizer.param_groups[0]["params"]] == [True]


def test_a_wrong_value_names_the_optimizer() -> None:
    with pytest.raises(ValueError, match="optimizer adam: Invalid beta"):
        build_optimizer("adam", nn.Linear(1, 1), lr=0.1, options={"betas": [2, 0.9]})
    with pytest.raises(ValueError, match="optimizer adam: tuple index"):
        build_optimizer("adam", nn.Linear(1, 1), lr=0.1, options={"betas": [0.9]})
    with pytest.raises(ValueError, match=r"optimizer adam: .*fused.* and .*foreach"):
        build_optimizer("adam", nn.Linear(1, 1), lr=0.1, options={"fused": True, "foreach": True})


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_two_groups_leave_weights_the_decay_that_the_optimizer_has(name: str) -> None:
    model = nn.Linear(3, 2)
    whole, *_ = build_optimizer(name, model, lr=0.1, options={}).param_groups
    weights, biases = build_optimizer(name, model, lr=0.1, options={}, two_groups=True).param_groups
    assert (weights["weight_decay"], biases["weight_decay"]) == (whole["weight_decay"], 0.0)
