"""``mix_sgd_step_``: a whole DPSGD update in one pass over the flat buffer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ddpcore.ops import reference
from ddpcore.ops.library import define
from ddpcore.ops.mix import NOISE_SCHEMA, OUT_SCHEMA, Noise, empty_distances, noise_arguments

_mix_sgd_step = define(
    "mix_sgd_step_(Tensor(a!) weights, Tensor[] peers, float self_weight, float[] peer_weights, Tensor grad, "
    "Tensor(b!)? momentum_buffer, Tensor(c!)? step, *, float lr, float momentum, float dampening, "
    f"float weight_decay, bool nesterov, bool decoupled, bool maximize, {NOISE_SCHEMA}, {OUT_SCHEMA}) -> Tensor",
    reference.mix_sgd_step_,
    empty_distances,
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
    """``mix_`` and then ``sgd_step_``, bit for bit, with one read and one write of ``weights``.

    The gradient is taken at the weights before mixing: average-while-computing, Lian et al. 2017, algorithm 1. Weight
    decay uses the mixed weights, as with any optimizer that steps after mixing.

    Args:
        weights: contiguous; float32, bfloat16 or float16 (arithmetic is fp32).
        peers, self_weight, peer_weights, noise: see :func:`ddpcore.ops.mix_`.
        grad: with the shape and dtype of ``weights``. Not changed.
        momentum_buffer: with the shape and dtype of ``weights``, changed in place; None if ``momentum`` is 0.
        step: None, or one float32: the number of steps taken so far, increased by one. At 0 the buffer is not read.
        lr, momentum, dampening, weight_decay, nesterov, decoupled, maximize: see :func:`ddpcore.ops.sgd_step_`.
        out: receives the new weights, so that ``weights`` does not change: see :func:`ddpcore.ops.mix_`.

    Returns:
        float64 ``[len(peers)]``: the squared distance of ``weights``, before mixing, to each peer.

    Raises:
        RuntimeError: lengths, shapes, dtypes or devices do not match.
    """
    mixture = weights, peers, self_weight, peer_weights
    scalars = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
    switches = {"nesterov": nesterov, "decoupled": decoupled, "maximize": maximize}
    noise_scalars = noise_arguments(noise)
    return _mix_sgd_step(*mixture, grad, momentum_buffer, step, **scalars, **switches, **noise_scalars, out=out)
