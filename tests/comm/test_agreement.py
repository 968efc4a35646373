"""The facts that ranks compare before they train: equal text for equal settings, and different text otherwise."""

from __future__ import annotations

import importlib
import linecache
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import ddpcore
from ddpcore.comm import facts_of
from ddpcore.comm.agreement import describe, identify


class Plain:
    def __init__(self, value: object) -> None:
        self.value = value
        self._private = object()


def test_settings_are_described_in_full() -> None:
    assert describe(ddpcore.SSGD()) == describe(ddpcore.SSGD())
    assert describe(Plain([Plain(1), {"a": (2.5, None)}])) == describe(Plain([Plain(1), {"a": (2.5, None)}]))
    assert describe(Plain([Plain(1)])) != describe(Plain([Plain(2)]))
    matrices = ([[0.5, 0.5], [0.5, 0.5]], [[0.4, 0.6], [0.6, 0.4]])
    first, second = (describe(ddpcore.DPSGD(ddpcore.FromMatrix(matrix))) for matrix in matrices)
    assert first != second
    assert " at 0x" not in describe(Plain([Plain(len), torch.nn.Linear]))


AWC = "order=average_while_computing, staleness=0, compression=None, consensus=None"


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (ddpcore.SSGD(), "SSGD()"),
        (ddpcore.DPSGD(), f"DPSGD(topology=RandomPair(seed=0, num_partners=1), {AWC})"),
        (ddpcore.DPSGD(ddpcore.Ring(2)), f"DPSGD(topology=Ring(neighbors_each_side=2, self_weight=None), {AWC})"),
        (
            ddpcore.SlowMo(ddpcore.DPSGD(ddpcore.Star())),
            f"SlowMo(base=DPSGD(topology=Star(), {AWC}), period=8, slow_momentum=0.5, slow_lr=1.0, topology=Star())",
        ),
    ],
    ids=lambda value: value.name if isinstance(value, ddpcore.Strategy) else "",
)
def test_a_strategy_is_described_by_its_options(strategy: ddpcore.Strategy, text: str) -> None:
    assert describe(strategy).replace("'", "") == text
    assert repr(ddpcore.Ring(2)) == "Ring(neighbors_each_side=2)"


@pytest.mark.parametrize(
    "strategy",
    [
        ddpcore.DPSGD(consensus=ddpcore.AdaptiveConsensus()),
        ddpcore.DPSGD(ddpcore.Ring(self_weight=0.5)),
        ddpcore.LocalSGD(4, fragments=2, overlap=1),
        ddpcore.LocalSGD(4, fragments=2, alpha=0.5),
        ddpcore.LocalSGD(4, fragments=2, group=2),
        ddpcore.LocalSGD(4, fragments=2, topology=ddpcore.Ring()),
        ddpcore.LocalSGD(4, fragments=2, error_decay=0.5),
    ],
    ids=repr,
)
def test_options_that_were_added_are_described(strategy: ddpcore.Strategy) -> None:
    plain = ddpcore.DPSGD() if isinstance(strategy, ddpcore.DPSGD) else ddpcore.LocalSGD(4, fragments=2)
    assert describe(strategy) != describe(plain)


def test_functions_tensors_and_optimizers() -> None:
    assert describe(Plain(describe)) == "Plain(value=describe)"
    first, second = (Plain(partial(torch.optim.SGD, lr=lr)) for lr in (0.1, 0.7))
    assert describe(first) != describe(second)
    assert describe(torch.ones(2)) != describe(torch.zeros(2))
    weights = [torch.zeros(1, requires_grad=True)]
    first, second = (torch.optim.SGD(weights, lr=0.1, momentum=momentum) for momentum in (0.0, 0.9))
    assert describe(first) != describe(second)
    assert describe(first).startswith("SGD(lr=0.1, momentum=0.0, ")


def test_facts() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    model.append(nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last))
    facts = dict(
        facts_of(
            model, torch.optim.SGD(model.parameters(), lr=0.1), ddpcore.LocalSGD(4), {"transport": "pg", "scaler": None}
        )
    )
    assert (facts["transport"], facts["scaler"]) == ("pg", "None")
    assert facts["optimizer"] == "SGD"
    assert facts["strategy"].startswith("LocalSGD(period=4")
    assert facts["parameter 0.weight"] == "float32 [2, 3]"
    assert facts["parameter 0.bias"] == "float32 [2] frozen"
    assert facts["parameter 2.weight"] == "float32 [3, 2, 2, 2] of strides [8, 1, 4, 2]"
    assert facts["parameter 2.bias"] == "float32 [3]"
    assert facts["buffer 1.num_batches_tracked"] == "int64 []"


RULE = """
import ddpcore

class Chain(ddpcore.Ring):
    scale = {scale}
"""


def test_a_class_that_differs_between_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same names and values, but another source: as if ranks had different versions of a user's file."""
    monkeypatch.syspath_prepend(tmp_path)
    model, seen = nn.Linear(1, 1), []
    for scale in (1, 2):
        (tmp_path / "agreement_rule.py").write_text(RULE.format(scale=scale))
        sys.modules.pop("agreement_rule", None)
        linecache.clearcache()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        importlib.invalidate_caches()
        rule = importlib.import_module("agreement_rule")
        seen.append(dict(facts_of(model, torch.optim.SGD(model.parameters()), ddpcore.DPSGD(rule.Chain()), {})))
    assert seen[0].pop("class of the topology") != seen[1].pop("class of the topology")
    assert seen[0] == seen[1]
    assert seen[0]["class of the strategy"] == "ddpcore.strategies.dpsgd.DPSGD"
    assert identify(type("Made", (), {})).endswith(".Made")
