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


def _fake_mix_stacked(weights: Tensor, matrix: Tensor) -> Tensor:
    return weights.new_empty((weights.shape[0],), dtype=torch.float64)


_mix = define(
    "mix_(Tensor(a!) weights, Tensor[] peers, float self_weight, float[] peer_weights) -> Tensor",
    reference.mix_,
    _fake_mix,
)
_mix_stacked = define(
    "mix_stacked_(Tensor(a!) weights, Tensor matrix) -> Tensor", reference.mix_stacked_, _fake_mix_stacked
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


def mix_stacked_(weights: Tensor, matrix: Tensor) -> Tensor:
    """``weights <- matrix @ weights`` for a stack of learners, in place; the cost follows the non-zero entries.

    Row ``j`` adds its own term first and then the others in ascending order, so that it has the bits of ``mix_`` with
    the peers in ascending order.

    Args:
        weights: contiguous ``[L, P]``, one row a learner; float32, bfloat16 or float16.
        matrix: contiguous float32 ``[L, L]`` on the same device.

    Returns:
        float64 ``[L]``: the squared distance of each learner, before mixing, to the mean of the learners.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit.
    """
    return _mix_stacked(weights, matrix)
