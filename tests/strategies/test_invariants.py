"""What holds of gossip whatever the topology, world, order, codec and staleness.

Matrices alone are tried in ``tests/topology``; here whole training steps of virtual learners are, with a learning rate
of zero.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import networkx as nx
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ddpcore
from ddpcore import DPSGD, TOPOLOGIES, FromGraph, PushSum, Strategy, Topology
from ddpcore.strategies.compression import BFloat16, Int8, TopK
from ddpcore.strategies.dpsgd import ORDERS

NUMEL, NUM_STEPS, LARGEST = 24, 5, 33
EPS = torch.finfo(torch.float32).eps
SETTINGS = settings(max_examples=60, deadline=None)

TOPOLOGIES = st.builds(TOPOLOGIES.build, st.sampled_from(TOPOLOGIES.names()), st.integers(0, 2**40), st.integers(1, 3))
CODECS = st.sampled_from(
    [BFloat16(), Int8(), BFloat16(error_feedback=True), Int8(error_feedback=True), TopK(ratio=0.25), TopK(ratio=1.0)]
)
WORLDS = st.integers(1, 9)


@st.composite
def digraphs(draw: Any) -> nx.DiGraph:
    """Strongly connected: a cycle and some more edges."""
    n = draw(st.integers(2, 8))
    graph = nx.cycle_graph(n, create_using=nx.DiGraph)
    graph.add_edges_from(draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=8)))
    return graph


def gossip(strategy: Strategy, n: int, seed: int) -> tuple[Any, list[Tensor], list[float]]:
    """The handle, the weights ``[n, NUMEL]`` before the first step and after each, and their consensus distances."""
    model = nn.Linear(NUMEL, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    try:
        handle = ddpcore.distribute(model, optimizer, strategy, learners=n, vectorize=False)
    except ValueError:  # what does not go together is refused: see the tests of each
        assume(False)
    with torch.no_grad():
        model.weight.add_(torch.randn(n, 1, NUMEL, generator=torch.Generator().manual_seed(seed)))
    seen, distances = [model.weight.detach().view(n, -1).clone()], [handle.consensus_distance()]
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        handle.model(torch.ones(n, 1, NUMEL)).sum().backward()
        optimizer.step()
        seen.append(model.weight.detach().view(n, -1).clone())
        distances.append(handle.consensus_distance())
    return handle, seen, distances


def rounding(seen: list[Tensor], n: int) -> float:
    """How far rounding moves an element in all steps.

    A step adds at most n + 1 terms, each no larger than twice the largest weight (a weight, or what was published of
    it), times a factor that is rounded too: an epsilon each.
    """
    largest = max(rows.abs().max().item() for rows in seen)
    return NUM_STEPS * (n + 1) * 2 * EPS * 2 * largest


@SETTINGS
@given(TOPOLOGIES, WORLDS, st.sampled_from(ORDERS), st.none() | CODECS, st.integers(0, 1), st.integers(0, 2**31))
def test_the_mean_stays(chosen: Topology, n: int, order: str, codec: Any, staleness: int, seed: int) -> None:
    """With every codec too: what it loses is there twice, with both signs."""
    try:
        strategy = DPSGD(chosen, order=order, compression=codec, staleness=staleness)
    except ValueError:
        assume(False)
    _, seen, _ = gossip(strategy, n, seed)
    start = seen[0].double().mean(0)
    for rows in seen[1:]:
        assert (rows.double().mean(0) - start).abs().max() <= rounding(seen, n)


@SETTINGS
@given(TOPOLOGIES, WORLDS, st.sampled_from(ORDERS), st.integers(0, 2**31))
def test_learners_come_together_as_fast_as_the_gap_says(chosen: Topology, n: int, order: str, seed: int) -> None:
    """By (1 - gap)^T over a period of T steps; by anything at all, but never apart, where pairs are drawn."""
    _, seen, distances = gossip(DPSGD(chosen, order=order), n, seed)
    slack = rounding(seen, n) * NUMEL**0.5
    for before, after in pairwise(distances):
        assert after <= before + slack
    period, gap = chosen.period(n), chosen.spectral_gap(n)
    if period is None or period > NUM_STEPS:
        return
    num_steps = NUM_STEPS - NUM_STEPS % period
    assert distances[num_steps] <= (1 - gap) ** num_steps * distances[0] + slack


@SETTINGS
@given(digraphs(), st.integers(0, 2**31))
def test_push_sum_keeps_the_average_that_it_evaluates(graph: nx.DiGraph, seed: int) -> None:
    """On a graph whose columns alone sum to one: that of the start, by push weights, whatever the graph."""
    n = len(graph)
    handle, seen, _ = gossip(PushSum(FromGraph(graph)), n, seed)
    average = handle.evaluation_model().weight.detach().double().view(-1)
    # Quotients and products by push weights, of at most n, are an epsilon more each step, and the average n + 1 more.
    allowed = n * (rounding(seen, n) + 4 * (NUM_STEPS + n + 1) * EPS * max(rows.abs().max().item() for rows in seen))
    assert (average - seen[0].double().mean(0)).abs().max() <= allowed


@pytest.mark.parametrize("name", TOPOLOGIES.names())
def test_every_send_has_its_receive(name: str) -> None:
    """In every world of up to 33 that the topology takes, over a period or 8 steps: one message an edge, known to both.

    Ranks over a process group post sends and receives from their own round alone: one too many waits for ever.
    """
    chosen, num_worlds = TOPOLOGIES.build(name, seed=3), 0
    for n in range(1, LARGEST + 1):
        try:
            chosen.validate(n)
        except ValueError:
            continue
        num_worlds += 1
        for step in range(chosen.period(n) or 8):
            rounds = chosen.rounds(step, n)
            sent = Counter((rank, reader) for rank, turn in enumerate(rounds) for reader in turn.destinations)
            received = Counter((source, rank) for rank, turn in enumerate(rounds) for source in turn.sources)
            assert sent == received
            assert max(sent.values(), default=1) == 1
            assert all(sender != reader for sender, reader in sent)
            mixing = chosen.matrix(step, n)
            if (mixing == mixing.T).all():
                assert all((reader, sender) in sent for sender, reader in sent)
            assert len(sent) == (mixing > 0).sum() - (mixing.diagonal() > 0).sum()
    assert num_worlds > 3


@pytest.mark.parametrize("make", [lambda: ddpcore.LocalSGD(1), lambda: ddpcore.SlowMo(None, period=1), ddpcore.SSGD])
@pytest.mark.parametrize("n", [3, 32])
def test_sixteen_bit_learners_that_agree_stay(n: int, make: Any) -> None:
    """Averages of what is alike: of weights step by step, of the evaluation model, and for the consensus distance."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16).bfloat16()
    start = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    handle = ddpcore.distribute(model, optimizer, make(), learners=n)
    for _ in range(5):
        optimizer.step()  # without a gradient
    assert torch.equal(model.weight, start.expand(n, -1, -1))
    assert torch.equal(handle.evaluation_model().weight, start)
    assert handle.consensus_distance() == 0.0
