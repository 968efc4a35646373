"""``mix_`` and ``mix_stacked_``: gossip averaging of flat buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddpcore.ops import reference
from ddpcore.ops.library import define


def _fake_mix(weights: Tensor, peers: list[Tensor], self_weight: float, peer_weights: list[float]) -> Tensor:
    return weights.new_empty((len(peers),), dtype=torch.float64)


def _fake_mix_stacked(
    weights: Tensor, others: list[Tensor], offsets: Tensor, columns: Tensor, values: Tensor
) -> Tensor:
    return weights.new_empty((weights.shape[0],), dtype=torch.float64)


_mix = define(
    "mix_(Tensor(a!) weights, Tensor[] peers, float self_weight, float[] peer_weights) -> Tensor",
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
    """STUB"""

    std: float
    seed: int
    step: int
    first: int = 0


@dataclass(frozen=True)
class Mixture:
    """What ``mix_`` takes beside the learner's own weights: the neighbours' weights and what each counts."""

    peers: Sequence[Tensor]
    self_weight: float
    peer_weights: Sequence[float]
    noise: Noise | None = None


def mix_(
    weights: Tensor,
    peers: Sequence[Tensor],
    self_weight: float,
    peer_weights: Sequence[float],
    noise: Noise | None = None,
) -> Tensor:
    """``weights <- self_weight * weights + sum_k peer_weights[k] * peers[k]``, in place, in one pass.

    Args:
        weights: contiguous, of any shape; float32, bfloat16 or float16 (arithmetic is fp32).
        peers: any number of tensors like ``weights``, none of them ``weights`` itself. Added in this order.
        self_weight: the learner's weight for itself.
        peer_weights: one a peer.

    Returns:
        float64 ``[len(peers)]``: the squared distance of ``weights``, before mixing, to each peer.

    Raises:
        RuntimeError: lengths, shapes, dtypes or devices do not fit.
    """
    return _mix(weights, peers, self_weight, peer_weights)


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
