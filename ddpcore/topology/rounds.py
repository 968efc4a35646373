"""The rounds of one step: their mixing matrix, and checks of both. All costs are linear in the edges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

TOLERANCE = 1e-6  # of row and column sums: accepts matrices that were rounded to float32


@dataclass(frozen=True)
class Round:
    """The exchange of one learner at one step: w <- self_weight * w + sum of weights[i] * (w of sources[i])."""

    self_weight: float
    sources: tuple[int, ...]  # learners it reads from, ascending, never itself
    weights: tuple[float, ...]  # weight of each source
    destinations: tuple[int, ...]  # learners that read from it, ascending, never itself


def uniform(sources: Iterable[int], destinations: Iterable[int]) -> Round:
    """The round in which all sources and the learner itself have the same weight."""
    ordered = tuple(sorted(sources))
    weight = 1 / (len(ordered) + 1)
    return Round(weight, ordered, (weight,) * len(ordered), tuple(sorted(destinations)))


def mixing_matrix(rounds: Sequence[Round]) -> csr_array:
    """W, float64, compressed rows; each row has the learner's own weight (even if zero), then its sources in order."""
    offsets = np.cumsum([0, *(1 + len(turn.sources) for turn in rounds)])
    columns = np.fromiter(chain.from_iterable((rank, *turn.sources) for rank, turn in enumerate(rounds)), np.int64)
    values = np.fromiter(chain.from_iterable((turn.self_weight, *turn.weights) for turn in rounds), np.float64)
    return csr_array((values, columns, offsets), shape=(len(rounds), len(rounds)))


def first_row(turn: Round, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Row 0 of W, reshaped to a grid, from the round of learner 0."""
    row = np.zeros(shape)
    row.flat[[0, *turn.sources]] = [turn.self_weight, *turn.weights]
    return row


def sums(mixing: csr_array) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The sums of the rows and of the columns."""
    ones = np.ones(mixing.shape[0])
    return mixing @ ones, mixing.T @ ones


def check_exchange(name: str, step: int, rounds: Sequence[Round]) -> None:
    """ValueError unless sources are ascending ranks with a weight each, and j reads from i exactly if i sends to j."""
    readers: list[list[int]] = [[] for _ in rounds]
    for rank, turn in enumerate(rounds):
        if len(turn.sources) != len(turn.weights) or list(turn.sources) != sorted(set(turn.sources) - {rank}):
            raise ValueError(f"{name}: sources of learner {rank} must ascend without itself, with a weight each")
        for source in turn.sources:
            if not 0 <= source < len(rounds):
                raise ValueError(f"{name}: learner {rank} reads from {source}, which must be below {len(rounds)}")
            readers[source].append(rank)
    for rank, turn in enumerate(rounds):
        if turn.destinations != tuple(readers[rank]):
            text = f"learner {rank} sends to {turn.destinations} but {tuple(readers[rank])} read from it"
            raise ValueError(f"{name}: {text} at step {step}, make them agree")


def check_weights(name: str, mixing: csr_array, *, push_sum: bool) -> None:
    """ValueError unless weights are at least 0, columns sum to one and, without push-sum, rows sum to one."""
    if not (mixing.data >= 0).all():  # NaN fails too
        raise ValueError(f"{name} has a negative or NaN weight: each weight must be at least 0")
    of_rows, of_columns = sums(mixing)
    columns_hold = bool((abs(of_columns - 1) <= TOLERANCE).all())
    lines = (("column", of_columns),) if push_sum else (("row", of_rows), ("column", of_columns))
    for line, found in lines:
        worst = int(abs(found - 1).argmax())
        if abs(found[worst] - 1) > TOLERANCE:
            text = f"{name}: {line} {worst} sums to {found[worst]:.6g}, make it sum to 1"
            raise ValueError(text + (", or use push-sum: the columns do" if line == "row" and columns_hold else ""))


def check_connected(name: str, union: csr_array) -> None:
    """ValueError unless the directed edges lead from every learner to every other."""
    if connected_components(union > 0, directed=True, connection="strong", return_labels=False) > 1:
        raise ValueError(f"{name} of {union.shape[0]} learners is not connected: join its parts")
