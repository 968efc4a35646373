"""What ranks compare before they train: the same text for equal settings, another one for others."""

from __future__ import annotations

import torch
from torch import nn

import ddpcore
from ddpcore.comm import facts_of
from ddpcore.comm.agreement import describe


class Plain:
    def __init__(self, value: object) -> None:
        self.value = value
        self._private = object()


def test_settings_are_told_in_full() -> None:
    assert describe(ddpcore.SSGD()) == describe(ddpcore.SSGD())
    assert describe(Plain([Plain(1), {"a": (2.5, None)}])) == describe(Plain([Plain(1), {"a": (2.5, None)}]))
    assert describe(Plain([Plain(1)])) != describe(Plain([Plain(2)]))
    matrices = ([[0.5, 0.5], [0.5, 0.5]], [[0.4, 0.6], [0.6, 0.4]])
    first, second = (describe(ddpcore.DPSGD(ddpcore.FromMatrix(matrix))) for matrix in matrices)
    assert first != second
    assert " at 0x" not in describe(Plain([Plain(len), torch.nn.Linear]))


def test_facts() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    facts = dict(facts_of(model, torch.optim.SGD(model.parameters(), lr=0.1), ddpcore.LocalSGD(4), "pg"))
    assert facts["optimizer"] == "SGD"
    assert facts["strategy"].startswith("LocalSGD(period=4")
    assert facts["parameter 0.weight"] == "float32 [2, 3]"
    assert facts["parameter 0.bias"] == "float32 [2] frozen"
    assert facts["buffer 1.num_batches_tracked"] == "int64 []"
