"""``mix_`` and ``mix_stacked_``: gossip averaging of flat buffers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ddpcore.ops import reference
from ddpcore.ops.library import define

NOISE_SCHEMA = "float noise_std, int noise_seed, int noise_step, int noise_first"
OUT_SCHEMA = "Tensor(z!)? out=None"


def _fake_mix(weights: Tensor, peers: list[Tensor], *args: Any, **noise: Any) -> Tensor:
    return weights.new_empty((len(peers),), dtype=torch.float64)


def _fake_mix_stacked(
    weights: Tensor, others: list[Tensor], offsets: Tensor, columns: Tensor, values: Tensor
) -> Tensor:
    return weights.new_empty((weights.shape[0],), dtype=torch.float64)


_mix = define(
    f"mix_(Tensor(a!) weights, Tensor[] peers, float self_weight, float[] peer_weights, *, {NOISE_SCHEMA}, "
    f"{OUT_SCHEMA}) -> Tensor",
    reference.mix_,
    _fake_mix,
)
_mix_stacked = define(
    "mix_stacked_(Tensor(a!) weights, Tensor[] others, Tensor offsets, Tensor columns, Tensor values) -> Tensor",
    reference.mix_stacked_,
    _fake_mix_stacked,
)


@dataclass(frozen=True)
class Noise:
    """Gaussian noise of constant variance, the last term of an average: ``std`` times standard normals.

    The normal of an element depends on (``seed``, ``step``, its index) alone: it has the same bits on every rank,
    device and instruction set, for any number of threads, and wherever a buffer is cut.

    Args:
        std: standard deviation; 0 is no noise.
        seed: from 0 to 2**63 - 1. Another seed is another sequence.
        step: from 0 to 2**63 - 1; so is another step.
        first: the index of the first element, not negative: where the tensor begins in the buffer that it is a part of.

    Raises:
        ValueError: one of them is out of its range.
    """

    std: float
    seed: int
    step: int
    first: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.std < math.inf:
            raise ValueError(f"std must be finite and not negative, got {self.std}")
        for name in ("seed", "step", "first"):
            if not 0 <= getattr(self, name) < 2**63:
                raise ValueError(f"{name} must be from 0 to 2**63 - 1, got {getattr(self, name)}")


class WeightAverage(ABC):
    """An average of weights as a value: it says what is averaged, and nothing has changed yet.

    Attributes:
        out: a row ``[P]`` that takes the result; None where the rows themselves do.
    """

    out: Tensor | None = None

    @abstractmethod
    def apply_(self, weights_LP: Tensor) -> None:
        """Overwrite the rows ``[L, P]`` of the learners held here with their averages."""


@dataclass(frozen=True)
class Mixture(WeightAverage):
    """The average of one learner's row with others: the arguments of ``mix_`` beside the learner's own weights."""

    peers: Sequence[Tensor]
    self_weight: float
    peer_weights: Sequence[float]
    noise: Noise | None = None
    out: Tensor | None = None

    def apply_(self, weights_LP: Tensor) -> None:
        """One call of ``mix_``. With ``out`` the result goes there, and ``weights_LP`` keeps its values."""
        mix_(weights_LP[0], self.peers, self.self_weight, self.peer_weights, self.noise, self.out)

    def columns(self, begin: int, end: int) -> Mixture:
        """The mixture of elements ``[begin, end)`` alone. Their noise is the same as in the whole mixture."""
        noise = None if self.noise is None else replace(self.noise, first=self.noise.first + begin)
        out = None if self.out is None else self.out[begin:end]
        return replace(self, peers=[peer[begin:end] for peer in self.peers], noise=noise, out=out)


@dataclass(frozen=True)
class RowMixtures(WeightAverage):
    """One mixture a row, applied one after the other. No mixture reads a row that another one writes."""

    mixtures: Sequence[Mixture]

    def apply_(self, weights_LP: Tensor) -> None:
        """One call of ``mix_`` a row."""
        for row, mixture in zip(weights_LP.split(1), self.mixtures, strict=True):
            mixture.apply_(row)


@dataclass(frozen=True)
class StackedMixture(WeightAverage):
    """The average of all rows at once: the arguments of ``mix_stacked_`` beside the rows."""

    others: Sequence[Tensor]
    offsets: Tensor
    columns: Tensor
    values: Tensor

    def apply_(self, weights_LP: Tensor) -> None:
        """One call of ``mix_stacked_``. Every row reads the weights as they were before the call."""
        mix_stacked_(weights_LP, self.others, self.offsets, self.columns, self.values)


def noise_arguments(noise: Noise | None) -> dict[str, Any]:
    """Noise as the operators take it."""
    noise = noise or Noise(std=0.0, seed=0, step=0)
    return {f"noise_{name}": getattr(noise, name) for name in ("std", "seed", "step", "first")}


def mix_(
    weights: Tensor,
    peers: Sequence[Tensor],
    self_weight: float,
    peer_weights: Sequence[float],
    noise: Noise | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``weights <- self_weight * weights + sum_k peer_weights[k] * peers[k] + noise``, in place, in one pass.

    Args:
        weights: contiguous, of any shape; float32, bfloat16 or float16 (arithmetic is fp32).
        peers: any number of tensors like ``weights``, none of them ``weights`` itself. Added in this order.
        self_weight: the learner's weight for itself.
        peer_weights: one a peer.
        noise: added in fp32, before the result is rounded to the storage type; None: none. A captured CUDA graph
            repeats the noise of its own step.
        out: like ``weights``: takes the result, and ``weights`` stay as they are. It may be ``weights``, and must not
            overlap them or a peer in another way.

    Returns:
        float64 ``[len(peers)]``: the squared distance of ``weights``, before mixing, to each peer.

    Raises:
        RuntimeError: lengths, shapes, dtypes or devices do not fit.
    """
    return _mix(weights, peers, self_weight, peer_weights, **noise_arguments(noise), out=out)


def mix_stacked_(
    weights_LP: Tensor, others: Sequence[Tensor], offsets: Tensor, columns: Tensor, values: Tensor
) -> Tensor:
    """``weights_LP <- W @ [weights_LP; others]`` for a stack of learners, in place; the cost follows the entries of W.

    W is given in compressed rows (CSR): the entries of row ``j`` are those from ``offsets[j]`` to ``offsets[j + 1]``.
    Every row reads the weights as they were before the call, and adds its entries in the order in which they stand.
    With its own term first and the others in ascending order it has the bits of ``mix_``. Without entries it becomes
    zero.

    Args:
        weights_LP: contiguous ``[L, P]``, one row a learner; float32, bfloat16 or float16.
        others: rows ``[P]`` of learners that are held elsewhere, like those of ``weights_LP`` and none of them.
        offsets: int64 ``[L + 1]``, ascending from 0 to the number of entries.
        columns: int64, one an entry: below L a row of ``weights_LP``, from L on row ``column - L`` of ``others``.
        values: float32, one an entry: the weight that row ``j`` gives to that row. All three are on the device of
            ``weights_LP``.

    Returns:
        float64 ``[L]``: the squared distance of each learner of ``weights_LP``, before mixing, to the mean of these L.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; on the CPU also, an entry names no row. On CUDA that is not
            looked at, since it would wait for the device. There a call takes up to 1024 learners and 1024 others.
    """
    return _mix_stacked(weights_LP, others, offsets, columns, values)
