"""Invariants of gossip for every topology, number of learners, order, codec and staleness.

``tests/topology`` tests the matrices alone. These tests run whole training steps of virtual learners with a learning
rate of zero.
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
from helpers.training import rows_of, set_rows, weights_of_learners

NUMEL, NUM_STEPS, LARGEST = 24, 5, 33
EPS = torch.finfo(torch.float32).eps
SETTINGS = settings(max_examples=60, deadline=None)


def build(name: str, seed: int, local_size: int) -> Topology:
    return TOPOLOGIES.build(name, seed=seed, **({"local_size": local_size} if name == "hierarchical" else {}))


CHOSEN = st.builds(build, st.sampled_from(TOPOLOGIES.names()), st.integers(0, 2**40), st.integers(1, 3))
CODECS = st.sampled_from(
    [BFloat16(), Int8(), BFloat16(error_feedback=True), Int8(error_feedback=True), TopK(ratio=0.25), TopK(ratio=1.0)]
)
WORLDS = st.integers(1, 9)


@st.composite
def digraphs(draw: Any) -> nx.DiGraph:
    """A strongly connected graph: a cycle and some more edges."""
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
    except ValueError:  # an unsupported combination: see the tests of the options
        assume(False)
    noise = torch.randn(n, 1, NUMEL, generator=torch.Generator().manual_seed(seed))
    set_rows(handle, "weight", rows_of(handle, "weight") + noise)
    seen, distances = [weights_of_learners(handle)], [handle.consensus_distance()]
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        handle.model(torch.ones(n, 1, NUMEL)).sum().backward()
        optimizer.step()
        seen.append(weights_of_learners(handle))
        distances.append(handle.consensus_distance())
    return handle, seen, distances


def rounding(seen: list[Tensor], n: int) -> float:
    """A bound on the rounding error of an element over all steps.

    A step adds at most n + 1 terms. Each is at most twice the largest weight (a weight or a published weight), times a
    rounded factor, so each term adds one epsilon.
    """
    largest = max(rows.abs().max().item() for rows in seen)
    return NUM_STEPS * (n + 1) * 2 * EPS * 2 * largest


@SETTINGS
@given(CHOSEN, WORLDS, st.sampled_from(ORDERS), st.none() | CODECS, st.integers(0, 1), st.integers(0, 2**31))
def test_the_mean_stays(chosen: Topology, n: int, order: str, codec: Any, staleness: int, seed: int) -> None:
    """Also with every codec, whose loss occurs twice, with opposite signs."""
    try:
        strategy = DPSGD(chosen, order=order, compression=codec, staleness=staleness)
    except ValueError:
        assume(False)
    _, seen, _ = gossip(strategy, n, seed)
    start = seen[0].double().mean(0)
    for rows in seen[1:]:
        assert (rows.double().mean(0) - start).abs().max() <= rounding(seen, n)


@SETTINGS
@given(CHOSEN, WORLDS, st.sampled_from(ORDERS), st.integers(0, 2**31))
def test_distances_shrink_by_the_spectral_gap(chosen: Topology, n: int, order: str, seed: int) -> None:
    """By (1 - gap)^T over a period of T steps. Random pairs never increase the distance."""
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
    """On any graph whose columns sum to one, push weights preserve the average of the start."""
    n = len(graph)
    handle, seen, _ = gossip(PushSum(FromGraph(graph)), n, seed)
    average = handle.evaluation_model().weight.detach().double().view(-1)
    # Products and quotients with push weights, at most n, add one epsilon each step, and the average adds n + 1.
    allowed = n * (rounding(seen, n) + 4 * (NUM_STEPS + n + 1) * EPS * max(rows.abs().max().item() for rows in seen))
    assert (average - seen[0].double().mean(0)).abs().max() <= allowed


@pytest.mark.parametrize("name", TOPOLOGIES.names())
def test_every_send_has_its_receive(name: str) -> None:
    """For every number of learners up to 33, over a period or 8 steps: sender and receiver agree on each message.

    Over a process group each rank derives its sends and receives from its own round: an extra one would hang.
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
    """Averages of equal weights: in each step, in the evaluation model and for the consensus distance."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16).bfloat16()
    start = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    handle = ddpcore.distribute(model, optimizer, make(), learners=n)
    for _ in range(5):
        optimizer.step()  # without a gradient
    assert torch.equal(rows_of(handle, "weight"), start.expand(n, -1, -1))
    assert torch.equal(handle.evaluation_model().weight, start)
    assert handle.consensus_distance() == 0.0
