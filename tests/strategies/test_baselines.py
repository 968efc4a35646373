"""The baselines, and strategies by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ddpcore
from ddpcore import (
    ADPSGD,
    DDP,
    DPSGD,
    SSGD,
    STRATEGIES,
    ExactDiffusion,
    GASLoC,
    GradientTracking,
    LocalSGD,
    NoisySSGD,
    NoLoCo,
    PushSum,
    Ring,
    Single,
    SlowMo,
    Strategy,
)


def test_single_is_the_model_itself() -> None:
    model = nn.Linear(2, 2)
    assert Single().wrap(model, None) is model


def test_ddp_needs_real_ranks() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"real ranks.*torchrun"):
        ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), DDP())


def test_by_name() -> None:
    names = "ssgd dpsgd local_sgd noloco gasloc noisy_ssgd slowmo push_sum exact_diffusion gradient_tracking"
    names += " adpsgd single ddp"
    assert STRATEGIES.names() == tuple(names.split())
    kinds = (SSGD, DPSGD, LocalSGD, NoLoCo, GASLoC, NoisySSGD, SlowMo, PushSum, ExactDiffusion, GradientTracking)
    kinds += (ADPSGD, Single, DDP)
    for name, kind in zip(STRATEGIES.names(), kinds, strict=True):
        strategy = STRATEGIES.build(name, topology=Ring())
        assert type(strategy) is kind
        assert strategy.name == name
    assert STRATEGIES.build("dpsgd", topology=Ring()).topology == Ring()
    assert STRATEGIES.build("local_sgd", topology=Ring(), period=5).period == 5
    with pytest.raises(ValueError, match="unknown strategy 'sgd': did you mean 'ssgd'"):
        STRATEGIES.build("sgd", topology=Ring())


def test_options_reach_the_strategy_of_the_name() -> None:
    gossip = STRATEGIES.build("dpsgd", topology=Ring(), order="adapt_then_combine", compression="int8")
    assert (gossip.order, gossip.compression.name) == ("adapt_then_combine", "int8")
    assert STRATEGIES.build("dpsgd", topology=Ring(), staleness=1).staleness == 1
    noisy = STRATEGIES.build("noisy_ssgd", topology=Ring(), std=0.5, seed=3)
    assert (noisy.std, noisy.seed) == (0.5, 3)
    slow = STRATEGIES.build("slowmo", topology=Ring(), period=5)
    assert (slow.period, slow.topology) == (5, Ring())
    with pytest.raises(ValueError, match="unknown compression 'zip': choose from none, bf16"):
        STRATEGIES.build("dpsgd", topology=Ring(), compression="zip")
    for wrong, says in (
        (3, "compression is 3: it must be a codec, such as"),
        ({"name": ["topk"]}, r"unknown compression \['topk'\]"),
        ({"name": "topk", "ratoi": 1}, "compression topk: .*'ratoi'"),
        ({"name": "topk", "ratio": "a"}, "compression topk: "),
    ):
        with pytest.raises(ValueError, match=says):
            STRATEGIES.build("dpsgd", topology=Ring(), compression=wrong)
    assert STRATEGIES.build("local_sgd", group=4).group == 4
    for outer in (3, "sgd", ["lr"]):
        with pytest.raises(ValueError, match=r"local_sgd: outer is .*: it must be a mapping"):
            STRATEGIES.build("local_sgd", outer=outer)


def test_options_that_a_strategy_does_not_have_are_refused() -> None:
    names = "period warmup_steps switch_step outer fragments overlap alpha compression error_decay group"
    names += " gossip restart seed then weights"
    assert set(STRATEGIES.options("local_sgd")) == set(names.split())
    assert "topology" not in STRATEGIES.options("dpsgd")
    with pytest.raises(ValueError, match="ssgd has no option 'period': choose from weights"):
        STRATEGIES.build("ssgd", period=5)
    with pytest.raises(ValueError, match="dpsgd has no option 'period': choose from order, staleness, compression"):
        STRATEGIES.build("dpsgd", topology=Ring(), period=5)
    with pytest.raises(ValueError, match="slowmo: base is 'ssgd': did you mean 'dpsgd'"):
        STRATEGIES.build("slowmo", base="ssgd")
    codec = STRATEGIES.build("dpsgd", topology=Ring(), compression={"name": "topk", "ratio": 0.5}).compression
    assert (codec.name, codec.ratio) == ("topk", 0.5)
    assert STRATEGIES.build("dpsgd", compression="none").compression is None


def test_who_averages_gradients() -> None:
    kinds = (SSGD, NoisySSGD, DPSGD, LocalSGD, SlowMo)
    assert [kind().traits.averages_gradients for kind in kinds] == [True, True, False, False, False]
    assert LocalSGD(4, switch_step=1).traits.averages_gradients
    assert all(issubclass(kind, Strategy) for kind in kinds)
