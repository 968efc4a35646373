"""``mix_sgd_step_``: a whole DPSGD update in one pass over the flat buffer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import Unpack

from ddpcore.ops import reference
from ddpcore.ops.library import define
from ddpcore.ops.mix import NOISE_SCHEMA, OUT_SCHEMA, Noise, empty_distances, noise_arguments
from ddpcore.ops.options import MomentumOptions

_mix_sgd_step = define(
    "mix_sgd_step_(Tensor(a!) weights, Tensor[] peers, float self_weight, float[] peer_weights, Tensor grad, "
    "Tensor(b!)? momentum_buffer, Tensor(c!)? step, *, float lr, float momentum=0.0, float dampening=0.0, "
    "float weight_decay=0.0, bool nesterov=False, bool decoupled=False, bool maximize=False, "
    f"{NOISE_SCHEMA}, {OUT_SCHEMA}) -> Tensor",
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
    weight_decay: float = 0.0,
    noise: Noise | None = None,
    out: Tensor | None = None,
    **options: Unpack[MomentumOptions],
) -> Tensor:
    """``mix_`` and then ``sgd_step_``, bit for bit, with one read and one write of ``weights``.

    The gradient is taken at the weights before mixing: average-while-computing, Lian et al. 2017, algorithm 1. Weight
    decay uses the mixed weights, as with any optimizer that steps after mixing.

    Args:
        weights: contiguous; float32, bfloat16 or float16 (arithmetic is fp32).
        peers, self_weight, peer_weights, noise, out: see :func:`ddpcore.ops.mix_`. ``out`` receives the new weights.
        grad: with the shape and dtype of ``weights``. Not changed.
        momentum_buffer: with the shape and dtype of ``weights``, changed in place; None if ``momentum`` is 0.
        step: None, or one float32: the number of steps taken so far, increased by one. At 0 the buffer is not read.
        lr: learning rate.
        weight_decay: coupled (L2) decay.
        **options: see :class:`ddpcore.ops.options.MomentumOptions`; ``momentum`` defaults to 0.

    Returns:
        float64 ``[len(peers)]``: the squared distance of ``weights``, before mixing, to each peer.

    Raises:
        RuntimeError: lengths, shapes, dtypes or devices do not match.
    """
    scalars = {"lr": lr, "weight_decay": weight_decay, **noise_arguments(noise)}
    tensors = weights, peers, self_weight, peer_weights, grad, momentum_buffer, step
    return _mix_sgd_step(*tensors, out=out, **scalars, **options)
