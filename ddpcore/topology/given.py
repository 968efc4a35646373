"""Topologies from a user's matrix or graph."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ddpcore.topology.base import check, checked_weights, relative
from ddpcore.topology.regular import Static
from ddpcore.topology.rounds import Round, Vector


@dataclass(frozen=True)
class Given(Static):
    """The same rounds at every step, for the number of learners that the rounds have."""

    _rounds: tuple[Round, ...] = field(repr=False)

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        """The given round of `rank`. ValueError for another number of learners."""
        check(step, rank, num_learners)
        if num_learners != len(self._rounds):
            text = f"{type(self).__name__}: a matrix for {len(self._rounds)} learners cannot serve {num_learners}"
            raise ValueError(f"{text}: give one of that size")
        return self._rounds[rank]


@dataclass(frozen=True, init=False)
class FromMatrix(Given):
    """The same mixing matrix at every step: a sparse one of scipy, or anything that numpy converts to [n, n].

    ValueError unless it is square, finite, non-negative, doubly stochastic (within 1e-6) and connected. A connected
    matrix need not average: two learners may only swap their weights; see `spectral_gap`.

    With `weights` p, a number above 0 for each learner, rows of W sum to one and p W = p: averages keep the weighted
    mean of the learners, as averages by `Weighted` do.
    """

    weights: tuple[float, ...] | None = field(default=None, metadata={"new": True})

    def __init__(self, matrix: Any, weights: Sequence[float] | None = None) -> None:
        mixing: Any = matrix if hasattr(matrix, "tocsr") else np.asarray(matrix, dtype=np.float64)
        if mixing.ndim != 2 or mixing.shape[0] != mixing.shape[1] or mixing.shape[0] == 0:
            raise ValueError(f"FromMatrix: the matrix has shape {list(mixing.shape)}, it must be square, [n, n]")
        rows, columns, values = _entries(mixing)
        if not np.isfinite(values).all():
            raise ValueError("FromMatrix: the matrix holds NaN or infinity, each weight must be a finite number")
        found: list[dict[int, float]] = [{} for _ in range(mixing.shape[0])]
        readers: list[list[int]] = [[] for _ in found]
        for reader, source, weight in zip(rows.tolist(), columns.tolist(), values.tolist(), strict=True):
            found[reader][source] = weight
            if reader != source:
                readers[source].append(reader)
        rounds = [
            Round(given.pop(rank, 0.0), tuple(given), tuple(given.values()), tuple(readers[rank]))
            for rank, given in enumerate(found)
        ]
        kept = None if weights is None else checked_weights("FromMatrix", weights)
        vars(self).update(_rounds=tuple(rounds), weights=kept)
        self.validate(len(rounds), push_sum=kept is None)  # the strategy checks the rows, too

    def kept_weights(self, num_learners: int) -> Vector | None:
        """The given weights."""
        return None if self.weights is None else relative("FromMatrix", self.weights, num_learners)


@dataclass(frozen=True, init=False)
class FromGraph(Given):
    """The edges of a networkx graph (or of anything with its `nodes`, `edges` and `is_directed`), its nodes 0 to n - 1.

    Undirected: Metropolis-Hastings weights, W[j, k] = 1 / (1 + max(degree of j, degree of k)) on an edge, and the rest
    for j itself (Xiao, Boyd and Kim 2007, "Distributed average consensus with least-mean-square deviation"). So W is
    symmetric and doubly stochastic for any degrees.

    Directed: an edge (k, j) means that k sends to j. A learner divides its weight equally between itself and its
    destinations, W[j, k] = 1 / (1 + out-degree of k). So columns sum to one, but rows only in special cases such as
    equal degrees. This is for push-sum (Kempe, Dobra and Gehrke 2003, "Gossip-based computation of aggregate
    information"; Assran et al. 2019, "Stochastic Gradient Push"); DPSGD refuses it.

    Loops, parallel edges and edge attributes are ignored. ValueError: the graph is not (strongly) connected.
    """

    def __init__(self, graph: Any) -> None:
        if missing := [name for name in ("nodes", "edges", "is_directed") if not hasattr(graph, name)]:
            raise ValueError(f"FromGraph: a {type(graph).__name__} has no {missing[0]}: give a networkx graph")
        num_learners = len(graph.nodes)
        if num_learners == 0 or set(graph.nodes) != set(range(num_learners)):
            what = f"FromGraph: the nodes must be 0 to {max(num_learners - 1, 0)}"
            raise ValueError(f"{what}: networkx.convert_node_labels_to_integers makes them so")
        directed = bool(graph.is_directed())
        edges = {(edge[0], edge[1]) for edge in graph.edges if edge[0] != edge[1]}
        if not directed:
            edges |= {(reader, source) for source, reader in edges}
        sources: list[list[int]] = [[] for _ in range(num_learners)]
        readers: list[list[int]] = [[] for _ in range(num_learners)]
        for source, reader in sorted(edges):
            sources[reader].append(source)
            readers[source].append(reader)
        degrees, rounds = [len(one) for one in readers], []
        for rank, own in enumerate(degrees):
            weights = tuple(1 / (1 + max(degrees[other], 0 if directed else own)) for other in sources[rank])
            left = 1 / (1 + own) if directed else 1 - math.fsum(weights)
            rounds.append(Round(left, tuple(sources[rank]), weights, tuple(readers[rank])))
        object.__setattr__(self, "_rounds", tuple(rounds))
        self.validate(num_learners, push_sum=directed)


def _entries(mixing: Any) -> tuple[Any, Any, Any]:
    """Rows, columns and float64 values of the entries other than 0, ordered by row and column."""
    if not hasattr(mixing, "tocsr"):
        places = np.nonzero(mixing)
        return *places, mixing[places]
    rows = mixing.tocsr(copy=True)
    rows.sum_duplicates()  # sorts too
    rows.eliminate_zeros()
    entries = rows.tocoo()
    return entries.row, entries.col, entries.data.astype(np.float64)
