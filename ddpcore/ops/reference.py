"""A pure-torch twin of each operator, with the arguments of the operator and one line a term of its equation.

They compute in fp32 for the storage types of the kernels and in float64 for float64, so that the same functions serve
as the exact oracle.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def sgd_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    first_step: bool = False,
) -> None:
    """Twin of :func:`ddpcore.ops.sgd_step_`."""
    for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
        weight, direction = _wide(param), -_wide(grad) if maximize else _wide(grad)
        if weight_decay != 0:
            direction = direction + weight_decay * weight
        if momentum != 0:
            buffer = momentum_buffers[index]
            new = direction if first_step else momentum * _wide(buffer) + (1 - dampening) * direction
            buffer.copy_(new)
            direction = direction + momentum * new if nesterov else new
        param.copy_(weight - lr * direction)


def mix_(weights: Tensor, peers: Sequence[Tensor], self_weight: float, peer_weights: Sequence[float]) -> Tensor:
    """Twin of :func:`ddpcore.ops.mix_`."""
    distances = [(_wide(weights) - _wide(peer)).double().square().sum() for peer in peers]
    mixed = self_weight * _wide(weights)
    for peer_weight, peer in zip(peer_weights, peers, strict=True):
        mixed = mixed + peer_weight * _wide(peer)
    weights.copy_(mixed)
    return torch.stack(distances) if distances else weights.new_empty((0,), dtype=torch.float64)


def mix_stacked_(weights: Tensor, matrix: Tensor) -> Tensor:
    """Twin of :func:`ddpcore.ops.mix_stacked_`."""
    old = [_wide(row).clone() for row in weights]
    total = old[0]
    for row in old[1:]:
        total = total + row
    mean = (1 / torch.tensor(len(old), dtype=total.dtype)) * total
    for j, row in enumerate(weights):
        mixed = matrix[j, j] * old[j]
        for k in range(len(old)):
            if k != j and matrix[j, k] != 0:
                mixed = mixed + matrix[j, k] * old[k]
        row.copy_(mixed)
    return torch.stack([(row - mean).double().square().sum() for row in old])


def mix_sgd_step_(
    weights: Tensor,
    peers: Sequence[Tensor],
    self_weight: float,
    peer_weights: Sequence[float],
    grad: Tensor,
    momentum_buffer: Tensor | None,
    **rule: float,
) -> Tensor:
    """Twin of :func:`ddpcore.ops.mix_sgd_step_`: one after the other."""
    distances = mix_(weights, peers, self_weight, peer_weights)
    buffers = [] if momentum_buffer is None else [momentum_buffer]
    sgd_step_([weights], [grad], buffers, **rule)  # type: ignore[arg-type]
    return distances


def segment_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Twin of :func:`ddpcore.ops.segment_norms`."""
    return torch.stack([tensor.double().square().sum() for tensor in tensors])
