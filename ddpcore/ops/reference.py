"""A pure-torch twin of each operator, with the arguments of the operator and one line a term of its equation.

They compute in fp32 for the storage types of the kernels and in float64 for float64, so that the same functions serve
as the exact oracle and as what runs where no kernel does. Factors that the kernels hold in fp32 are rounded alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddpcore.ops.groups import Groups
from ddpcore.ops.random import add_noise


def _wide(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided:
        raise RuntimeError("ddpcore: tensors must be dense, not sparse")
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _rounded(value: float, like: Tensor) -> float:
    """A factor as the arithmetic on ``like`` holds it."""
    return value if like.dtype == torch.float64 else float(np.float32(value))


def _check(params: Sequence[Tensor], grads: Sequence[Tensor], sizes: Sequence[int], *others: Sequence[Tensor]) -> None:
    """Before anything is written: one gradient, and one or no other tensor, a param; groups that hold them all."""
    if not params or sum(sizes) != len(params):
        raise RuntimeError("ddpcore: a step needs at least one param, and group_sizes must add up to their number")
    for tensors in (grads, *others):
        if len(tensors) != len(params) and (tensors is grads or len(tensors) > 0):
            raise RuntimeError("ddpcore: gradients, buffers and masters must have the length of params")
        for param, tensor in zip(params, tensors, strict=False):
            if tensor.layout != torch.strided or tensor.shape != param.shape:
                raise RuntimeError("ddpcore: tensors must be dense, not sparse, and have the shape of their param")


def _grad_factor(maximize: bool, grad_scale: Tensor | None, norm_squared: Tensor | None, max_norm: float) -> float:
    factor = 1.0 if grad_scale is None else 1.0 / float(grad_scale)
    if norm_squared is not None and max_norm != 0:
        clip = float(np.float32(max_norm)) / (math.sqrt(float(norm_squared)) * factor + 1e-6)
        if not clip >= 1:
            factor *= clip
    return -factor if maximize else factor


def _weight(param: Tensor, master: Tensor | None) -> Tensor:
    """The weight behind a param: its master, unless somebody else has written the param."""
    if master is None:
        return _wide(param)
    same = master.to(param.dtype).view(torch.int16) == param.contiguous().view(torch.int16).view_as(param)
    return torch.where(same, master, param.float())


def _store(param: Tensor, master: Tensor | None, weight: Tensor) -> None:
    param.copy_(weight)
    if master is not None:
        master.copy_(weight)


def _momentum_step(
    param: Tensor,
    grad: Tensor,
    buffer: Tensor | None,
    master: Tensor | None,
    *,
    factor: float,
    inner: float,
    outer: float,
    decay: float,
    keep: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    first_step: bool,
) -> None:
    """``d = inner*(g + decay*w); m = momentum*m + (1-dampening)*d; w = keep*w - outer*(d + momentum*m or m)``."""
    weight = _weight(param, master)
    direction = _rounded(factor, weight) * _wide(grad)
    if decay != 0:
        direction = direction + _rounded(decay, weight) * weight
    direction = _rounded(inner, weight) * direction
    if buffer is not None:
        new = direction if first_step else momentum * _wide(buffer) + (1 - dampening) * direction
        buffer.copy_(new)
        direction = direction + momentum * new if nesterov else new
    _store(param, master, _rounded(keep, weight) * weight - _rounded(outer, weight) * direction)


def _nth(tensors: Sequence[Tensor], index: int) -> Tensor | None:
    return tensors[index] if tensors else None


def sgd_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    masters: Sequence[Tensor],
    steps: Sequence[Tensor],
    scratch: Tensor | None,
    group_sizes: Sequence[int],
    lr: Sequence[float],
    weight_decay: Sequence[float],
    device_lr: Sequence[Tensor],
    momentum: float,
    dampening: float,
    nesterov: bool,
    decoupled: bool,
    maximize: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    norm_squared: Tensor | None,
    max_norm: float,
) -> None:
    """Twin of :func:`ddpcore.ops.sgd_step_`."""
    _check(params, grads, group_sizes, momentum_buffers, masters)
    if found_inf is not None and bool(found_inf):
        return
    groups = Groups(group_sizes, lr, weight_decay, device_lr, steps)
    factor = _grad_factor(maximize, grad_scale, norm_squared, max_norm)
    for index, group in enumerate(groups.of_each()):
        rate, decay = _rounded(groups.lr[group], params[index]), _rounded(weight_decay[group], params[index])
        _momentum_step(
            params[index],
            grads[index],
            _nth(momentum_buffers, index) if momentum != 0 else None,
            _nth(masters, index),
            factor=factor,
            inner=1.0,
            outer=rate,
            decay=0.0 if decoupled else decay,
            keep=1.0 - rate * decay if decoupled else 1.0,
            momentum=momentum,
            dampening=dampening,
            nesterov=nesterov,
            first_step=groups.taken(group) == 0,
        )
    groups.count()


def _lars_places(variant: str, lr: float, ratio: float) -> tuple[float, float]:
    """What multiplies what enters the momentum, and what leaves it."""
    return {"you2017": (lr * ratio, 1.0), "scaled_grad": (ratio, lr), "scaled_lr": (1.0, lr * ratio)}[variant]


def lars_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    masters: Sequence[Tensor],
    steps: Sequence[Tensor],
    scratch: Tensor,
    trust: Tensor,
    group_sizes: Sequence[int],
    lr: Sequence[float],
    weight_decay: Sequence[float],
    device_lr: Sequence[Tensor],
    adapt: Sequence[int],
    variant: str,
    trust_coefficient: float,
    eps: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    decoupled: bool,
    maximize: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    norm_squared: Tensor | None,
    max_norm: float,
) -> None:
    """Twin of :func:`ddpcore.ops.lars_step_`."""
    _check(params, grads, group_sizes, momentum_buffers, masters)
    if found_inf is not None and bool(found_inf):
        return
    groups = Groups(group_sizes, lr, weight_decay, device_lr, steps, adapt)
    factor = _grad_factor(maximize, grad_scale, norm_squared, max_norm)
    for index, group in enumerate(groups.of_each()):
        param, master = params[index], _nth(masters, index)
        rate, decay = _rounded(groups.lr[group], param), _rounded(weight_decay[group], param)
        weight_norm = math.sqrt(_weight(param, master).double().square().sum())
        grad_norm = math.sqrt(grads[index].double().square().sum()) * abs(_rounded(factor, param))
        joined = 0.0 if decoupled else decay
        ratio = 1.0
        if adapt[group] and weight_norm != 0 and grad_norm != 0:
            numerator = _rounded(trust_coefficient, param) * weight_norm
            ratio = numerator / (grad_norm + joined * weight_norm + _rounded(eps, param))
        trust[index] = torch.tensor([ratio, weight_norm, grad_norm], dtype=torch.float64)
        inner, outer = _lars_places(variant, rate, ratio)
        _momentum_step(
            param,
            grads[index],
            _nth(momentum_buffers, index) if momentum != 0 else None,
            master,
            factor=factor,
            inner=inner,
            outer=outer,
            decay=joined,
            keep=1.0 - rate * decay if decoupled else 1.0,
            momentum=momentum,
            dampening=dampening,
            nesterov=nesterov,
            first_step=groups.taken(group) == 0,
        )
    groups.count()


def lamb_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    masters: Sequence[Tensor],
    steps: Sequence[Tensor],
    scratch: Tensor,
    trust: Tensor,
    group_sizes: Sequence[int],
    lr: Sequence[float],
    weight_decay: Sequence[float],
    device_lr: Sequence[Tensor],
    adapt: Sequence[int],
    beta1: float,
    beta2: float,
    eps: float,
    debias: bool,
    decay_mode: str,
    min_ratio: float,
    max_ratio: float,
    min_weight_norm: float,
    max_weight_norm: float,
    maximize: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    norm_squared: Tensor | None,
    max_norm: float,
) -> None:
    """Twin of :func:`ddpcore.ops.lamb_step_`."""
    _check(params, grads, group_sizes, exp_avgs, exp_avg_sqs, masters)
    if found_inf is not None and bool(found_inf):
        return
    groups = Groups(group_sizes, lr, weight_decay, device_lr, steps, adapt)
    factor = _grad_factor(maximize, grad_scale, norm_squared, max_norm)
    for index, group in enumerate(groups.of_each()):
        param, master, exp_avg, exp_avg_sq = params[index], _nth(masters, index), exp_avgs[index], exp_avg_sqs[index]
        rate, decay = _rounded(groups.lr[group], param), _rounded(weight_decay[group], param)
        step = int(steps[group].item()) + 1
        weight = _weight(param, master)
        debias1 = _rounded(1.0 / (1.0 - _power(beta1, step)), weight) if debias else 1.0
        debias2 = _rounded(1.0 / (1.0 - _power(beta2, step)), weight) if debias else 1.0
        direction = _rounded(factor, weight) * _wide(grads[index])
        direction = direction + (decay if decay_mode == "coupled" else 0.0) * weight
        exp_avg.copy_(beta1 * exp_avg + (1 - beta1) * direction)
        exp_avg_sq.copy_(beta2 * exp_avg_sq + (1 - beta2) * (direction * direction))
        # The root in float64, because torch's own fp32 root is not always the nearest number.
        root = (debias2 * exp_avg_sq).double().sqrt().to(weight.dtype)
        update = (debias1 * exp_avg) / (root + _rounded(eps, weight))
        update = update + (decay if decay_mode == "in_update" else 0.0) * weight
        weight_norm = math.sqrt(weight.double().square().sum())
        update_norm = math.sqrt(update.double().square().sum())
        ratio = 1.0
        if adapt[group] and weight_norm != 0 and update_norm != 0:
            phi = _bounded(weight_norm, _rounded(min_weight_norm, weight), _rounded(max_weight_norm, weight))
            ratio = _bounded(phi / update_norm, _rounded(min_ratio, weight), _rounded(max_ratio, weight))
        trust[index] = torch.tensor([ratio, weight_norm, update_norm], dtype=torch.float64)
        keep = _rounded(1.0 - rate * decay, weight) if decay_mode == "decoupled" else 1.0
        _store(param, master, keep * weight - _rounded(rate * ratio, weight) * update)
    groups.count()


def _power(base: float, exponent: int) -> float:
    """By squaring, as the kernels do: the same bits everywhere."""
    result = 1.0
    while exponent > 0:
        if exponent % 2:
            result *= base
        base, exponent = base * base, exponent // 2
    return result


def _bounded(value: float, low: float, high: float) -> float:
    """NaN stays NaN."""
    if value < low:
        value = low
    return high if value > high else value


def mix_(
    weights: Tensor,
    peers: Sequence[Tensor],
    self_weight: float,
    peer_weights: Sequence[float],
    *,
    out: Tensor | None = None,
    **noise: Any,
) -> Tensor:
    """Twin of :func:`ddpcore.ops.mix_`."""
    distances = [(_wide(weights) - _wide(peer)).double().square().sum() for peer in peers]
    mixed = self_weight * _wide(weights)
    for peer_weight, peer in zip(peer_weights, peers, strict=True):
        mixed = mixed + peer_weight * _wide(peer)
    (weights if out is None else out).copy_(add_noise(mixed, **noise))
    return torch.stack(distances) if distances else weights.new_empty((0,), dtype=torch.float64)


def mix_stacked_(weights: Tensor, others: Sequence[Tensor], offsets: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    """Twin of :func:`ddpcore.ops.mix_stacked_`."""
    old = [_wide(row).clone() for row in weights]
    if not old:
        return weights.new_empty((0,), dtype=torch.float64)
    rows = [*old, *map(_wide, others)]
    bounds, of_entry = offsets.tolist(), columns.tolist()
    total = old[0]
    for row in old[1:]:
        total = total + row
    mean = (1 / torch.tensor(len(old), dtype=total.dtype)) * total
    for j, row in enumerate(weights):
        terms = [values[entry] * rows[of_entry[entry]] for entry in range(bounds[j], bounds[j + 1])]
        row.copy_(sum(terms[1:], start=terms[0]) if terms else torch.zeros_like(mean))
    return torch.stack([(row - mean).double().square().sum() for row in old])


def mix_sgd_step_(
    weights: Tensor,
    peers: Sequence[Tensor],
    self_weight: float,
    peer_weights: Sequence[float],
    grad: Tensor,
    momentum_buffer: Tensor | None,
    step: Tensor | None,
    *,
    lr: float,
    weight_decay: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    decoupled: bool,
    maximize: bool,
    out: Tensor | None = None,
    **noise: Any,
) -> Tensor:
    """Twin of :func:`ddpcore.ops.mix_sgd_step_`: one after the other."""
    distances = mix_(weights, peers, self_weight, peer_weights, out=out, **noise)
    sgd_step_(
        [weights if out is None else out],
        [grad],
        [] if momentum_buffer is None else [momentum_buffer],
        [],
        [] if step is None else [step],
        None,
        group_sizes=[1],
        lr=[lr],
        weight_decay=[weight_decay],
        device_lr=[],
        momentum=momentum,
        dampening=dampening,
        nesterov=nesterov,
        decoupled=decoupled,
        maximize=maximize,
        grad_scale=None,
        found_inf=None,
        norm_squared=None,
        max_norm=0.0,
    )
    return distances


def segment_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Twin of :func:`ddpcore.ops.segment_norms`."""
    return torch.stack([tensor.double().square().sum() for tensor in tensors])


def total_norm_(tensors: Sequence[Tensor], out: Tensor) -> None:
    """Twin of :func:`ddpcore.ops.total_norm_`."""
    out[0] = sum(tensor.double().square().sum() for tensor in tensors)


def noise_sums(rows: Sequence[Tensor], bounds: Sequence[int], origin: Tensor | None) -> Tensor:
    """Twin of :func:`ddpcore.ops.noise_sums`."""
    sizes = [end - begin for begin, end in pairwise(bounds)]
    if not rows or not bounds or bounds[0] != 0 or bounds[-1] != rows[0].numel() or min(sizes, default=0) < 0:
        raise RuntimeError("ddpcore: bounds must ascend from 0 to the number of elements of at least one row")
    if any(row.dim() != 1 for row in rows):
        raise RuntimeError("ddpcore: rows must be contiguous rows of one length, dtype and device")
    values = torch.stack([_wide(row) if origin is None else _wide(row) - _wide(origin) for row in rows]).double()
    sums = values.new_empty((len(sizes), len(rows), len(rows)))
    for matrix, part in zip(sums, values.split(sizes, dim=1) if sizes else (), strict=True):
        upper = (part @ part.T).triu()
        matrix.copy_(upper + upper.triu(1).T)
    return sums
