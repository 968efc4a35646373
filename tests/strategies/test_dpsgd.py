"""Decentralized parallel SGD against its equation: w_j(t+1) = sum_k W_jk(t) w_k(t) - a g_j(w_j(t))."""

from __future__ import annotations

from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import nn

import ddpcore
from ddpcore import DPSGD, Complete, FromGraph, FromMatrix, OnePeerExponential, RandomPair, Ring
from helpers import training

ROLLED = FromMatrix(0.7 * np.eye(4) + 0.3 * np.roll(np.eye(4), 1, axis=0))


@pytest.mark.parametrize("topology", [Complete(), Ring(), RandomPair(7), OnePeerExponential(), ROLLED], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_equation(topology: Any, accumulate: int) -> None:
    """Quadratics of four learners with different start weights, also with accumulation. The equation is in float64."""
    n = 4
    torch.manual_seed(0)
    inputs, targets = torch.randn(n, 6, 4), torch.randn(n, 6, 2)
    model = nn.Linear(4, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = ddpcore.distribute(model, optimizer, DPSGD(topology), learners=n, vectorize=False)
    training.set_rows(handle, "weight", training.rows_of(handle, "weight") + torch.randn(n, 2, 4))
    w = training.rows_of(handle, "weight").double()
    for step in range(6):
        optimizer.zero_grad()
        for part in range(accumulate):
            rows = slice(part * 6 // accumulate, (part + 1) * 6 // accumulate)
            (0.5 * (handle.model(inputs[:, rows]) - targets[:, rows]).square()).sum().backward()
        optimizer.step()
        gradients = torch.einsum(
            "jbo,jbi->joi", torch.einsum("jbi,joi->jbo", inputs.double(), w) - targets.double(), inputs.double()
        )
        w = torch.einsum("jk,koi->joi", torch.from_numpy(topology.matrix(step, n)), w) - 0.01 * gradients
        torch.testing.assert_close(training.rows_of(handle, "weight").double(), w, rtol=1e-5, atol=1e-5)


def test_mixing_alone_keeps_the_mean_and_shrinks_the_distance() -> None:
    model = nn.Linear(4, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = ddpcore.distribute(model, optimizer, DPSGD(RandomPair(1)), learners=5)
    training.set_rows(handle, "weight", training.rows_of(handle, "weight") + torch.randn(5, 2, 4))
    mean, distance = training.rows_of(handle, "weight").mean(dim=0), handle.consensus_distance()
    for _ in range(40):
        optimizer.zero_grad()
        handle.model(torch.ones(5, 1, 4)).sum().backward()
        optimizer.step()
    torch.testing.assert_close(training.rows_of(handle, "weight").mean(dim=0), mean, rtol=1e-5, atol=1e-6)
    assert handle.consensus_distance() < 1e-3 * distance


def test_a_step_without_forward_still_mixes() -> None:
    """Gradients that are set without a forward pass: the step starts the exchange."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    handle = ddpcore.distribute(model, optimizer, DPSGD(Complete()), learners=2)
    training.set_rows(handle, "weight", torch.tensor([0.0, 4.0]))
    for one, value in zip(handle.models, (1.0, 3.0), strict=True):
        one.weight.grad = torch.full((1, 1), value)
    optimizer.step()
    assert training.rows_of(handle, "weight").flatten().tolist() == [1.5, 0.5]


def test_the_world_is_checked() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="4 learners"):
        ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), DPSGD(ROLLED), learners=3)


def test_an_unbalanced_digraph_is_refused_and_push_sum_named() -> None:
    model = nn.Linear(1, 1)
    topology = FromGraph(nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2)]))
    with pytest.raises(ValueError, match="push-sum"):
        ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), DPSGD(topology), learners=3)


def test_the_default_is_a_random_pair() -> None:
    assert DPSGD().topology == RandomPair()
