"""Graphs as topologies: Metropolis-Hastings weights, directed graphs for push-sum, and what is refused."""

from __future__ import annotations

from typing import Any

import networkx as nx
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpcore import FromGraph, FromMatrix, Ring, Round, Star
from ddpcore.topology.describe import describe

SETTINGS = settings(max_examples=60, deadline=None)


@st.composite
def connected_graphs(draw: st.DrawFn) -> nx.Graph:
    """A tree whose nodes come in any order, and further edges."""
    n = draw(st.integers(1, 12))
    graph = nx.Graph()
    graph.add_nodes_from(draw(st.permutations(range(n))))
    for node in range(1, n):
        graph.add_edge(node, draw(st.integers(0, node - 1)))
    pairs = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1))
    graph.add_edges_from(draw(st.lists(pairs, max_size=20)))  # loops too
    return graph


@st.composite
def strong_digraphs(draw: st.DrawFn) -> nx.DiGraph:
    """A cycle through all nodes in any order, and further edges."""
    n = draw(st.integers(1, 10))
    order = draw(st.permutations(range(n)))
    graph = nx.DiGraph()
    graph.add_nodes_from(order)
    nx.add_cycle(graph, order)
    pairs = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1))
    graph.add_edges_from(draw(st.lists(pairs, max_size=15)))
    return graph


@SETTINGS
@given(connected_graphs())
def test_any_graph_has_metropolis_weights(graph: nx.Graph) -> None:
    chosen, n = FromGraph(graph), len(graph)
    mixing = chosen.matrix(0, n)
    simple = nx.Graph(graph)
    simple.remove_edges_from(list(nx.selfloop_edges(simple)))
    for j in range(n):
        for k in range(n):
            expected = 1 / (1 + max(simple.degree[j], simple.degree[k])) if simple.has_edge(j, k) else 0.0
            if j != k:
                assert mixing[j, k] == pytest.approx(expected, abs=1e-15)
    np.testing.assert_array_equal(mixing, mixing.T)
    np.testing.assert_allclose(mixing.sum(axis=0), 1, atol=1e-14)
    assert (mixing.diagonal() > 0).all()
    chosen.validate(n)
    assert n == 1 or chosen.spectral_gap(n) > 0, "connected, and everyone keeps a share"


@SETTINGS
@given(strong_digraphs())
def test_any_digraph_splits_evenly_along_its_edges(graph: nx.DiGraph) -> None:
    """And push-sum on it finds the mean of any values: sums over weights, both of them pushed alike."""
    n = len(graph)
    chosen = FromGraph(graph)
    chosen.validate(n, push_sum=True)
    mixing = chosen.matrix(0, n)
    np.testing.assert_allclose(mixing.sum(axis=0), 1, atol=1e-14)
    for sender in range(n):
        readers = set(graph.successors(sender)) - {sender}
        assert set(np.flatnonzero(mixing[:, sender])) == readers | {sender}
        assert set(mixing[mixing[:, sender] > 0, sender]) == {1 / (1 + len(readers))}
        assert chosen.round(0, sender, n).destinations == tuple(sorted(readers))
    values = np.random.default_rng(n).standard_normal(n)
    power = np.linalg.matrix_power(mixing, 4000)
    np.testing.assert_allclose((power @ values) / (power @ np.ones(n)), values.mean(), atol=1e-8)
    gap = chosen.spectral_gap(n)
    found = describe(chosen, n)
    assert found.doubly_stochastic == bool((abs(mixing.sum(axis=1) - 1) < 1e-9).all())
    if n > 1 and not found.doubly_stochastic:
        assert gap == pytest.approx(1 - sorted(abs(np.linalg.eigvals(mixing)))[-2], abs=1e-6)


def test_an_unbalanced_digraph_is_for_push_sum_alone() -> None:
    graph = nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2)])
    chosen = FromGraph(graph)
    assert chosen.round(0, 2, 3) == Round(1 / 2, (0, 1), (1 / 3, 1 / 2), (0,))
    with pytest.raises(ValueError, match=r"FromGraph: row 2 sums to 1\.33333, .* or use push-sum: the columns do"):
        chosen.validate(3)
    chosen.validate(3, push_sum=True)
    assert not describe(chosen, 3).doubly_stochastic
    assert describe(chosen, 3).smallest_eigenvalue is None


def test_a_reversed_digraph_sends_the_other_way() -> None:
    graph = nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2)])
    forward, backward = FromGraph(graph), FromGraph(graph.reverse())
    assert forward != backward
    for rank in range(3):
        assert forward.round(0, rank, 3).sources == backward.round(0, rank, 3).destinations
        assert forward.round(0, rank, 3).destinations == backward.round(0, rank, 3).sources


def test_a_balanced_digraph_serves_ordinary_gossip_too() -> None:
    chosen = FromGraph(nx.cycle_graph(5, create_using=nx.DiGraph))
    chosen.validate(5)
    assert describe(chosen, 5).doubly_stochastic
    assert chosen.spectral_gap(5) == pytest.approx(1 - abs(1 + np.exp(2j * np.pi / 5)) / 2, abs=1e-12)


def test_known_graphs() -> None:
    np.testing.assert_allclose(FromGraph(nx.cycle_graph(6)).matrix(0, 6), Ring().matrix(0, 6), atol=1e-15)
    np.testing.assert_allclose(FromGraph(nx.star_graph(6)).matrix(0, 7), Star().matrix(0, 7), atol=1e-15)
    multi = nx.MultiGraph([(0, 1), (0, 1), (1, 2), (2, 2)])
    assert FromGraph(multi) == FromGraph(nx.path_graph(3))
    assert FromGraph(nx.empty_graph(1)).round(0, 0, 1) == Round(1.0, (), (), ())


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (nx.Graph([(0, 1), (2, 3)]), "FromGraph of 4 learners is not connected"),
        (nx.DiGraph([(0, 1), (1, 2)]), "FromGraph of 3 learners is not connected"),
        (nx.Graph([("a", "b")]), "the nodes must be 0 to 1: networkx.convert_node_labels_to_integers"),
        (nx.Graph([(1, 2)]), "the nodes must be 0 to 1"),
        (nx.Graph(), "the nodes must be 0 to 0"),
        (np.eye(3), "a ndarray has no nodes: give a networkx graph"),
    ],
)
def test_refused_graphs(graph: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FromGraph(graph)


def test_another_number_of_learners() -> None:
    with pytest.raises(ValueError, match="for 3 learners cannot serve 4"):
        FromGraph(nx.path_graph(3)).validate(4)


def test_a_sparse_matrix_is_taken_as_it_is() -> None:
    mixing = Ring().matrix(0, 6)
    sparse = scipy.sparse.coo_array(mixing)
    assert FromMatrix(sparse) == FromMatrix(scipy.sparse.csc_matrix(mixing)) == FromMatrix(mixing)
    halves = scipy.sparse.coo_array((np.full(8, 0.25), ([0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0, 1, 1])))
    np.testing.assert_array_equal(FromMatrix(halves).matrix(0, 2), np.full((2, 2), 0.5))  # duplicates add up
    with pytest.raises(ValueError, match="square"):
        FromMatrix(scipy.sparse.coo_array((2, 3)))
