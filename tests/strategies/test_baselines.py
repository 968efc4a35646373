"""The baselines, and strategies by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ddpcore
from ddpcore import Ring
from ddpcore.strategies import DDP, DPSGD, SSGD, LocalSGD, Single, Strategy, build, names


def test_single_is_the_model_itself() -> None:
    model = nn.Linear(2, 2)
    assert Single().wrap(model, None) is model


def test_ddp_needs_real_ranks() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"real ranks.*torchrun"):
        ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), DDP())


def test_by_name() -> None:
    assert names() == ["ssgd", "dpsgd", "local_sgd", "single", "ddp"]
    for name, kind in zip(names(), (SSGD, DPSGD, LocalSGD, Single, DDP), strict=True):
        strategy = build(name, topology=Ring(), period=5)
        assert type(strategy) is kind
        assert strategy.name == name
    assert build("dpsgd", topology=Ring()).topology == Ring()
    assert build("local_sgd", topology=Ring(), period=5).period == 5
    with pytest.raises(ValueError, match="unknown strategy 'sgd': choose from ssgd"):
        build("sgd", topology=Ring())


def test_only_ssgd_averages_gradients() -> None:
    assert [kind.averages_gradients for kind in (SSGD, DPSGD, LocalSGD)] == [True, False, False]
    assert all(issubclass(kind, Strategy) for kind in (SSGD, DPSGD, LocalSGD))
