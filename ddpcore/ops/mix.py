"""``mix_`` and ``mix_stacked_``: gossip averaging of flat buffers."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ddpcore.ops import reference
from ddpcore.ops.library import define, note_writes, without_derivative

MAX_STEP_PEERS = 8
"""The most peers of a step that begins with a mix, on CUDA. With more, ``mix_`` and then the step cost little more."""

_mix = define(
    "mix_(Tensor(a!) weights, Tensor[] peers, float self_weight, float[] peer_weights, *, float noise_std, "
    "int noise_seed, int noise_step, int noise_first, Tensor(z!)? out=None) -> Tensor",
    reference.mix_,
    lambda weights, peers, *args, **kwargs: weights.new_empty((len(peers),), dtype=torch.float64),
)
_mix_stacked = define(
    "mix_stacked_(Tensor(a!) weights, Tensor[] others, Tensor offsets, Tensor columns, Tensor values, *, "
    "bool distances=True) -> Tensor",
    reference.mix_stacked_,
    lambda weights, *args, distances=True: weights.new_empty((weights.shape[0] * distances,), dtype=torch.float64),
)


@dataclass(frozen=True)
class Noise:
    """Gaussian noise that is added to an average: ``std`` times standard normal numbers.

    The number of an element depends only on ``seed``, ``step`` and the element's index. It has the same bits on every
    rank, device and instruction set, for any number of threads, and for any part of a buffer.

    ValueError: a value is out of its range.
    """

    std: float  #: standard deviation; 0 is no noise
    seed: int  #: from 0 to 2**63 - 1. Each pair of seed and step has its own sequence of numbers.
    step: int  #: from 0 to 2**63 - 1
    first: int = 0  #: the index of the tensor's first element in the buffer that the tensor is a part of; not negative

    def __post_init__(self) -> None:
        if not 0 <= self.std < math.inf:
            raise ValueError(f"std must be finite and not negative, got {self.std}")
        for name in ("seed", "step", "first"):
            if not 0 <= getattr(self, name) < 2**63:
                raise ValueError(f"{name} must be from 0 to 2**63 - 1, got {getattr(self, name)}")


class WeightAverage(ABC):
    """The description of an average of weights. :meth:`apply_` computes it."""

    out: Tensor | None = None  #: a row ``[P]`` that receives the result; None overwrites the weights

    @abstractmethod
    def apply_(self, weights_LP: Tensor) -> None:
        """Average the rows ``[L, P]``, one per learner of this process, in place or into ``out``."""


@dataclass(frozen=True)
class Mixture(WeightAverage):
    """The average of one learner's row with others: the arguments of ``mix_`` besides the learner's own weights."""

    peers: Sequence[Tensor]
    self_weight: float
    peer_weights: Sequence[float]
    noise: Noise | None = None
    out: Tensor | None = None

    @override
    def apply_(self, weights_LP: Tensor) -> None:
        mix_(weights_LP[0], self.peers, self.self_weight, self.peer_weights, self.noise, self.out)

    def columns(self, begin: int, end: int) -> "Mixture":
        """The mixture of the elements ``[begin, end)`` only. Their noise is the same as in the whole mixture."""
        noise = None if self.noise is None else replace(self.noise, first=self.noise.first + begin)
        out = None if self.out is None else self.out[begin:end]
        return replace(self, peers=[peer[begin:end] for peer in self.peers], noise=noise, out=out)


@dataclass(frozen=True)
class RowMixtures(WeightAverage):
    """One mixture per row, applied one after the other. No mixture may read a row that another one writes."""

    mixtures: Sequence[Mixture]

    @override
    def apply_(self, weights_LP: Tensor) -> None:
        for row, mixture in zip(weights_LP.split(1), self.mixtures, strict=True):
            mixture.apply_(row)


@dataclass(frozen=True)
class StackedMixture(WeightAverage):
    """The averages of all rows at once: the arguments of ``mix_stacked_`` besides the rows."""

    others: Sequence[Tensor]
    offsets: Tensor
    columns: Tensor
    values: Tensor

    @override
    def apply_(self, weights_LP: Tensor) -> None:
        mix_stacked_(weights_LP, self.others, self.offsets, self.columns, self.values, distances=False)


def noise_arguments(noise: Noise | None) -> dict[str, Any]:
    """The operators' arguments for this noise."""
    noise = noise or Noise(std=0.0, seed=0, step=0)
    return {f"noise_{name}": getattr(noise, name) for name in ("std", "seed", "step", "first")}


def mixture_arguments(mixture: Mixture, offsets: Sequence[int]) -> tuple[Any, ...]:
    """The last arguments of a step that begins with this mixture, in the order of its schema."""
    weights = mixture.peers, mixture.self_weight, mixture.peer_weights
    return *weights, offsets, *noise_arguments(mixture.noise).values(), mixture.out


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
        peers: any number of tensors with the shape and dtype of ``weights``, but not ``weights``, added in this order.
        self_weight: the weight of ``weights``.
        peer_weights: one per peer.
        noise: added in fp32, before the result is rounded to the dtype of ``weights``; None adds nothing. A captured
            CUDA graph repeats the noise of the step that it captured.
        out: a tensor like ``weights`` that receives the result, so that ``weights`` does not change. It may be
            ``weights``. It must not overlap a peer or a part of ``weights``.

    Returns float64 ``[len(peers)]``: the squared distance of ``weights``, before mixing, to each peer. RuntimeError:
    lengths, shapes, dtypes or devices do not match.
    """
    note_writes("mix_", [weights if out is None else out])
    sums = _mix(weights, peers, self_weight, peer_weights, **noise_arguments(noise), out=out)
    return without_derivative("mix_", sums)


def mix_stacked_(
    weights_LP: Tensor,
    others: Sequence[Tensor],
    offsets: Tensor,
    columns: Tensor,
    values: Tensor,
    *,
    distances: bool = True,
) -> Tensor:
    """``weights_LP <- W @ [weights_LP; others]`` for a stack of learners, in place.

    W has compressed rows (CSR): row ``j`` has the entries from ``offsets[j]`` to ``offsets[j + 1]``. The cost is
    proportional to the number of entries. Every row is computed from the weights before the call, and adds its entries
    in the given order. If a learner's own entry comes first and the others follow in ascending order, the result has
    the bits of ``mix_``. A row without entries becomes zero.

    Args:
        weights_LP: contiguous ``[L, P]``, one row per learner; float32, bfloat16 or float16.
        others: rows ``[P]`` of learners of other processes, with the dtype of ``weights_LP``.
        offsets: int64 ``[L + 1]``, ascending from 0 to the number of entries.
        columns: int64, one per entry: c < L is row c of ``weights_LP``, c >= L is row ``c - L`` of ``others``.
        values: float32, one per entry: the weight of that row. All three tensors are on the device of ``weights_LP``.
        distances: whether to return distances. On a CPU they take 1/3 to 1/2 of the time; on CUDA they are there.

    Returns float64 ``[L]``: the squared distance of each row of ``weights_LP``, before mixing, to the mean of these L
    rows; ``[0]`` without ``distances``. RuntimeError: shapes, dtypes or devices do not match, or, on the CPU, an entry
    has no row. CUDA does not check the entries, because the check would wait for the device. A call on CUDA takes up to
    1024 learners and 1024 others.
    """
    note_writes("mix_stacked_", [weights_LP])
    sums = _mix_stacked(weights_LP, others, offsets, columns, values, distances=distances)
    return without_derivative("mix_stacked_", sums)
