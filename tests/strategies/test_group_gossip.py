"""Gossip between groups that average their gradients: k learners are one learner with k times the batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import ddpcore
from ddpcore import DPSGD, GASLoC, LocalSGD, NoLoCo, RandomPair, Ring
from ddpcore.optim import FusedSGD
from ddpcore.strategies.compression import Int8
from ddpcore.testing import check_strategy
from ddpcore.topology.wrapped import BetweenGroups
from helpers import training

K, GROUPS, STEPS = 2, 4, 8
ORDERS = ("average_while_computing", "adapt_then_combine", "combine_then_adapt")


def outer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.6)


MAKERS: dict[str, Any] = {
    "local": lambda **o: LocalSGD(2, topology=Ring(), **o),
    "overlap": lambda **o: LocalSGD(
        3, topology=RandomPair(seed=2), outer=outer, overlap=1, alpha=0.3, fragments=2, **o
    ),
    "schedule": lambda **o: LocalSGD([[0, 3], [3, 1]], topology=RandomPair(seed=2), **o),
    "noloco": lambda **o: NoLoCo(RandomPair(seed=1), period=2, outer_momentum=0.3, **o),
    "gasloc": lambda **o: GASLoC(RandomPair(seed=1), period=2, outer_momentum=0.3, **o),
    "consensus": lambda **o: DPSGD(Ring(), consensus=[[0, 0.5], [4, 0.2]], **o),
    **{order: partial(DPSGD, RandomPair(seed=5), order=order) for order in ORDERS},
}


def trained(strategy: ddpcore.Strategy, inputs: torch.Tensor, targets: torch.Tensor) -> ddpcore.Distributed:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = ddpcore.distribute(model, optimizer, strategy, learners=len(inputs))
    for _ in range(STEPS):
        optimizer.zero_grad()
        (handle.model(inputs) - targets).square().mean(dim=(1, 2)).sum().backward()
        optimizer.step()
    return handle


@pytest.mark.parametrize("name", MAKERS)
def test_a_group_is_one_learner_with_its_batch(name: str) -> None:
    """All members hold the bits of each other, and up to the rounding of the gradients those of one learner."""
    torch.manual_seed(1)
    inputs, targets = torch.randn(GROUPS * K, 6, 5), torch.randn(GROUPS * K, 6, 2)
    grouped = trained(MAKERS[name](group=K), inputs, targets)
    whole = trained(MAKERS[name](), inputs.view(GROUPS, 6 * K, 5), targets.view(GROUPS, 6 * K, 2))
    for weights in ("0.weight", "0.bias", "2.weight", "2.bias"):
        rows = training.rows_of(grouped, weights)
        rows_GK = rows.view(GROUPS, K, *rows.shape[1:])
        assert torch.equal(rows_GK[:, 0], rows_GK[:, 1])
        torch.testing.assert_close(rows_GK[:, 0], training.rows_of(whole, weights), rtol=1e-5, atol=1e-6)
    assert grouped.consensus_distance() > 1e-4
    assert grouped.strategy.topology == BetweenGroups(K, whole.strategy.topology)


def test_bytes_between_groups_are_a_part() -> None:
    """In a ring of groups each learner sends 1/k of the weights twice, and k - 1 parts inside its group."""
    torch.manual_seed(1)
    inputs, targets = torch.randn(GROUPS * K, 6, 5), torch.randn(GROUPS * K, 6, 2)
    sent = {}
    for size in (1, K):
        handle = trained(DPSGD(Ring(), group=size), inputs, targets)
        numel = handle.learner.flat.numel
        sent[size] = handle.comm.bytes_sent / 4 / STEPS / numel
    gradients = 2 * (K - 1) / K
    assert sent[1] == 2
    assert sent[K] <= gradients + 2 / K + (K - 1) / K + 4 / numel


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_ranks() -> None:
    """Real ranks over both transports, in loops of several kinds, have the bits of virtual learners."""
    check_strategy(partial(DPSGD, Ring(), group=K), num_learners=(2, 4))
    check_strategy(partial(LocalSGD, 2, group=K, topology=Ring(), overlap=1, alpha=0.5), num_learners=(4,))
    check_strategy(partial(GASLoC, Ring(), period=2, group=K), num_learners=(4,))


@pytest.mark.parametrize("topology", [Ring(), RandomPair(seed=3), ddpcore.OnePeerExponential()], ids=str)
def test_topology_between_groups(topology: ddpcore.Topology) -> None:
    between, n = BetweenGroups(K, topology), K * 4
    between.validate(n)
    assert (between.period(n), between.spectral_gap(n)) == (topology.period(4), topology.spectral_gap(4))
    for step in range(4):
        expected = torch.kron(torch.from_numpy(topology.matrix(step, 4)), torch.eye(K, dtype=torch.float64))
        assert between.matrix(step, n).tolist() == expected.tolist()
    with pytest.raises(ValueError, match="group is 2 of 5 learners: take a divisor of 5"):
        between.validate(5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DPSGD(group=0), "dpsgd: group is 0: it must be at least 1"),
        (lambda: GASLoC(group=2.0), "gasloc: group is 2.0: it must be a whole number"),
        (lambda: NoLoCo(group=-1), "noloco: group is -1: it must be at least 1"),
        (lambda: DPSGD(group=2, staleness=1), "dpsgd: group is 2: take staleness 0 and no compression"),
        (lambda: DPSGD(group=2, compression=Int8()), "dpsgd: group is 2: take staleness 0 and no compression"),
        (lambda: ddpcore.SlowMo(DPSGD(group=2)), "slowmo: base has groups of 2: leave group out"),
    ],
)
def test_groups_that_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("make", [DPSGD, NoLoCo, GASLoC, partial(LocalSGD, topology=Ring())])
def test_what_does_not_fit_is_refused_before_anything_starts(make: Any) -> None:
    model = nn.Linear(2, 1)
    before, optimizer = model.weight.data_ptr(), torch.optim.SGD(model.parameters(), lr=0.1)
    for learners, group in ((6, 4), (4, 8), (1, 2)):
        with pytest.raises(ValueError, match=f"group is {group} of {learners} learners: take a divisor of"):
            ddpcore.distribute(model, optimizer, make(group=group), learners=learners)
    with pytest.raises(ValueError, match="on_failure="):
        connection = ddpcore.Connection(on_failure="shrink")
        ddpcore.distribute(model, optimizer, make(group=2), learners=4, connection=connection)
    with pytest.raises(ValueError, match="quarantine"):
        ddpcore.distribute(model, optimizer, make(group=2), learners=4, on_nonfinite="quarantine")
    narrow = nn.Linear(2, 1).bfloat16()
    with pytest.raises(ValueError, match="too inexact in 16 bits"):
        ddpcore.distribute(narrow, torch.optim.SGD(narrow.parameters(), lr=0.1), make(group=2), learners=4)
    assert model.weight.data_ptr() == before
