"""The rounds of one step: their mixing matrix, and checks of both. All costs are linear in the edges.

Then how much a product of mixing matrices reduces the distance from the mean. D = W - J / n, with J all ones, is the
effect of W on deviations from the mean. If W is doubly stochastic, the norm of D is the second singular value of W. If
only columns sum to one, the spectral radius of D is the modulus of W's second eigenvalue: the eigenvectors of all
eigenvalues but 1 sum to zero, because (1, ..., 1) W = (1, ..., 1).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain

import numpy as np
import numpy.typing as npt

TOLERANCE = 1e-6  # of row and column sums: accepts matrices that were rounded to float32
Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Round:
    """The exchange of one learner at one step: w <- self_weight * w + sum of weights[i] * (w of sources[i])."""

    self_weight: float
    sources: tuple[int, ...]  # learners it reads from, ascending, never itself
    weights: tuple[float, ...]  # weight of each source
    destinations: tuple[int, ...]  # learners that read from it, ascending, never itself

    def without_self(self) -> "Round":
        """The round in which the learner takes the average of its sources alone. Without sources it keeps its own."""
        total = sum(self.weights)
        if total == 0:
            return self
        return replace(self, self_weight=0.0, weights=tuple(weight / total for weight in self.weights))


def uniform(sources: Iterable[int], destinations: Iterable[int]) -> Round:
    """The round in which all sources and the learner itself have the same weight."""
    ordered = tuple(sorted(sources))
    weight = 1 / (len(ordered) + 1)
    return Round(weight, ordered, (weight,) * len(ordered), tuple(sorted(destinations)))


@dataclass(frozen=True, eq=False)
class MixingMatrix:
    """The mixing matrix W of a step, in compressed rows: ``scipy.sparse.csr_array((values, columns, offsets))``."""

    offsets: npt.NDArray[np.int64]  #: int64 [n + 1]; the entries of row j are those from offsets[j] to offsets[j + 1]
    columns: npt.NDArray[np.int64]  #: int64, of each entry. No entry of a row has the column of another.
    values: Vector  #: float64, of each entry

    @property
    def num_learners(self) -> int:
        """n."""
        return len(self.offsets) - 1

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """The row of each entry."""
        return np.repeat(np.arange(self.num_learners), np.diff(self.offsets))

    def __matmul__(self, vector: Vector) -> Vector:
        return self._added(self.rows, self.values * vector[self.columns])

    def sums(self, weights: Vector | None = None) -> tuple[Vector, Vector]:
        """The sums of the rows and of the columns; with weights p, the sums ``sum_j p_j W[j, k] / p_k``."""
        weights = np.ones(self.num_learners) if weights is None else weights
        of_columns = self._added(self.columns, self.values * weights[self.rows]) / weights
        return self._added(self.rows, self.values), of_columns

    def dense(self) -> Vector:
        """W as an array, float64 [n, n]."""
        found = np.zeros((self.num_learners, self.num_learners))
        found[self.rows, self.columns] = self.values
        return found

    def _added(self, places: npt.NDArray[np.int64], values: Vector) -> Vector:
        """The sums of the values of each place, added in order."""
        return np.asarray(np.bincount(places, values, self.num_learners), dtype=np.float64)


def mixing_matrix(rounds: Sequence[Round]) -> MixingMatrix:
    """W; each row has the learner's own weight (even if zero), then its sources in order."""
    offsets = np.cumsum([0, *(1 + len(turn.sources) for turn in rounds)])
    columns = np.fromiter(chain.from_iterable((rank, *turn.sources) for rank, turn in enumerate(rounds)), np.int64)
    values = np.fromiter(chain.from_iterable((turn.self_weight, *turn.weights) for turn in rounds), np.float64)
    return MixingMatrix(offsets, columns, values)


def first_row(turn: Round, shape: tuple[int, ...]) -> Vector:
    """Row 0 of W, reshaped to a grid, from the round of learner 0."""
    row = np.zeros(shape)
    row.flat[[0, *turn.sources]] = [turn.self_weight, *turn.weights]
    return row


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


def check_weights(name: str, mixing: MixingMatrix, *, push_sum: bool, kept: Vector | None = None) -> None:
    """ValueError unless weights are at least 0, columns sum to one and, without push-sum, rows sum to one.

    With ``kept``, the weights of learners, columns sum to one as in :meth:`MixingMatrix.sums`.
    """
    if push_sum and kept is not None:
        raise ValueError(f"{name} has weights of learners and push-sum has its own: take a topology without weights")
    if not (mixing.values >= 0).all():  # NaN fails too
        raise ValueError(f"{name} has a negative or NaN weight: each weight must be at least 0")
    of_rows, of_columns = mixing.sums(kept)
    columns_hold = bool((abs(of_columns - 1) <= TOLERANCE).all())
    for line, found in (("column", of_columns),) if push_sum else (("row", of_rows), ("column", of_columns)):
        worst = int(abs(found - 1).argmax())
        if abs(found[worst] - 1) > TOLERANCE:
            fits_push_sum = line == "row" and columns_hold and kept is None
            more = ", or use push-sum: the columns do" if fits_push_sum else ""
            raise ValueError(f"{name}: {line} {worst} sums to {found[worst]:.6g}, make it sum to 1{more}")


def check_connected(name: str, matrices: Sequence[MixingMatrix]) -> None:
    """ValueError unless the directed edges of all matrices together lead from every learner to every other."""
    readers = np.concatenate([mixing.rows[mixing.values > 0] for mixing in matrices])
    sources = np.concatenate([mixing.columns[mixing.values > 0] for mixing in matrices])
    num = matrices[0].num_learners
    for starts, ends in ((readers, sources), (sources, readers)):  # learner 0 is reached by all, and reaches all
        ends = ends[np.argsort(starts, kind="stable")]
        begins = np.searchsorted(np.sort(starts), np.arange(num + 1))
        found, waiting = np.arange(num) == 0, [0]
        while waiting:
            rank = waiting.pop()
            others = ends[begins[rank] : begins[rank + 1]]
            waiting += (new := np.unique(others[~found[others]])).tolist()
            found[new] = True
        if not found.all():
            raise ValueError(f"{name} of {num} learners is not connected: join its parts")


def is_doubly_stochastic(mixing: MixingMatrix) -> bool:
    """Whether rows and columns sum to one."""
    return all(bool((abs(found - 1) <= TOLERANCE).all()) for found in mixing.sums())


def is_symmetric(mixing: MixingMatrix) -> bool:
    """Whether W is symmetric."""
    rows, columns, num_learners = mixing.rows, mixing.columns, mixing.num_learners
    places = np.concatenate([rows * num_learners + columns, columns * num_learners + rows])  # of W and W^T
    _, numbers = np.unique(places, return_inverse=True)
    differences = np.bincount(numbers, np.concatenate([mixing.values, -mixing.values]))
    return bool(abs(differences).max() <= TOLERANCE)


def grid_eigenvalues(rows: Sequence[Vector]) -> npt.NDArray[np.complex128]:
    """All eigenvalues of the product of convolutions whose rows 0 are these grids. The first one is 1, of the mean."""
    return math.prod((np.fft.fftn(row).ravel() for row in rows), start=np.ones(rows[0].size, dtype=np.complex128))


def contraction(matrices: Sequence[MixingMatrix]) -> float:
    """The norm of D of the product W_{T-1} ... W_0, or its spectral radius if only columns sum to one."""
    balanced = all(map(is_doubly_stochastic, matrices))
    product = reduce(lambda product, mixing: mixing.dense() @ product, matrices, np.eye(matrices[0].num_learners))
    deviation = product - 1 / len(product)
    return float(np.linalg.norm(deviation, 2) if balanced else abs(np.linalg.eigvals(deviation)).max())


def weighted_gap(matrices: Sequence[Vector], weights: Vector, *, is_random: bool) -> float:
    """The gap of averages that keep a weighted mean, with distances that are weighted as the mean.

    With p the weights and r = p^(1/2), S = diag(r) W diag(r)^(-1) is symmetric if W is self-adjoint for p, and
    D = S - r r^T. ``is_random``: the mean of S^T S over these matrices stands for the expected one.
    """
    root = np.sqrt(weights / weights.sum())
    scaled = [root[:, None] * mixing / root for mixing in matrices]
    if is_random:
        square = sum(one.T @ one for one in scaled) / len(scaled)
        return min(1.0, 1.0 - float(np.linalg.eigvalsh(square - np.outer(root, root))[-1]))
    product = reduce(np.matmul, reversed(scaled))
    return max(0.0, 1.0 - float(np.linalg.norm(product - np.outer(root, root), 2)) ** (1 / len(matrices)))
