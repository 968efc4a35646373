"""``mix_sgd_step_``: a whole DPSGD update in one pass over the flat buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ddpcore.ops import reference
from ddpcore.ops.library import define
from ddpcore.ops.mix import NOISE_SCHEMA, OUT_SCHEMA, Noise, noise_arguments


def _fake(weights: Tensor, peers: list[Tensor], *args: Any, **kwargs: Any) -> Tensor:
    return weights.new_empty((len(peers),), dtype=torch.float64)


_mix_sgd_step = define(
    "mix_sgd_step_(Tensor(a!) weights, Tensor[] peers, float self_weight, float[] peer_weights, Tensor grad, "
    "Tensor(b!)? momentum_buffer, Tensor(c!)? step, *, float lr, float momentum, float dampening, "
    f"float weight_decay, bool nesterov, bool decoupled, bool maximize, {NOISE_SCHEMA}, {OUT_SCHEMA}) -> Tensor",
    reference.mix_sgd_step_,
    _fake,
)


def mix_sgd_step_(
    weights: Tensor,
    peers: Sequence[Tensor],
    self_weight: float,
    peer_weights: Sequence[float],
    grad: Tensor,
    momentum_buffer: Tensor | None,
    step: Tensor | None = None,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    decoupled: bool = False,
    maximize: bool = False,
    noise: Noise | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``mix_`` and then ``sgd_step_``, bit for bit, with ``weights`` read and written once.

    The gradient is the one at the unmixed weights: average-while-computing, Lian et al. 2017, algorithm 1. Weight decay
    acts on the mixed weights, as it does when any optimizer steps after the mix.

    Args:
        weights: contiguous; float32, bfloat16 or float16 (arithmetic is fp32).
        peers: tensors like ``weights``.
        self_weight: the learner's weight for itself.
        peer_weights: one a peer.
        grad: like ``weights``. Not changed.
        momentum_buffer: like ``weights``, changed in place; None where ``momentum`` is 0.
        step: None, or one float32: steps taken so far, raised by one. At 0 the buffer holds nothing yet.
        lr: and all to ``maximize``: as in :func:`ddpcore.ops.sgd_step_`.
        momentum: see there.
        dampening: see there.
        weight_decay: see there.
        nesterov: see there.
        decoupled: see there.
        maximize: see there.
        noise: of the mix: see :func:`ddpcore.ops.mix_`.
        out: takes the new weights instead of ``weights``: see there.

    Returns:
        float64 ``[len(peers)]``: the squared distance of ``weights``, before mixing, to each peer.

    Raises:
        RuntimeError: lengths, shapes, dtypes or devices do not fit.
    """
    return _mix_sgd_step(
        weights,
        peers,
        self_weight,
        peer_weights,
        grad,
        momentum_buffer,
        step,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        decoupled=decoupled,
        maximize=maximize,
        **noise_arguments(noise),
        out=out,
    )
