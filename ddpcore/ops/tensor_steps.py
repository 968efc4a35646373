"""What the reference implementations of all steps share: checks, the options of each tensor, and how it is stored."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddpcore.ops.random import memory_order, round_to_bf16, words

BLOCK = 4096  # kBlock of csrc/args.h

# ---- arithmetic on scalars as the kernels do it ----


def rounded(value: float, like: Tensor) -> float:
    """The factor in the precision of arithmetic on ``like``."""
    return value if like.dtype == torch.float64 else float(np.float32(value))


def power(base: float, exponent: int) -> float:
    """``base`` to a power that is not negative, by repeated squaring, as in the kernels, for the same bits."""
    result = 1.0
    while exponent > 0:
        if exponent % 2:
            result *= base
        base, exponent = base * base, exponent // 2
    return result


def clamped(value: float, low: float, high: float) -> float:
    """The value between two bounds. NaN stays NaN, unlike with ``min`` and ``max``."""
    if value < low:
        value = low
    return high if value > high else value


def square_sum(tensor: Tensor) -> Tensor:
    """The sum of squares in float64. It is added in blocks, because torch divides longer sums among its threads."""
    sums = tensor.double().square().flatten()
    while sums.numel() > BLOCK:
        sums = torch.nn.functional.pad(sums, (0, -sums.numel() % BLOCK)).view(-1, BLOCK).sum(dim=1)
    return sums.sum()


def norms(first: Tensor, second: Tensor, position: int, squares: Tensor | None, passes: str) -> tuple[float, float]:
    """The norms of two tensors. The second pass takes them from ``squares``, into which the first pass writes."""
    if passes == "second":
        assert squares is not None
        return math.sqrt(squares[position, 0]), math.sqrt(squares[position, 1])
    sums = square_sum(first), square_sum(second)
    if squares is not None:
        squares[position] = torch.stack(sums)
    return math.sqrt(sums[0]), math.sqrt(sums[1])


# ---- tensors ----


def wide_of(tensor: Tensor) -> Tensor:
    """The values in the dtype of arithmetic: float32 or float64."""
    if tensor.layout != torch.strided:
        raise RuntimeError("ddpcore: tensors must be dense, not sparse")
    return tensor if tensor.dtype == torch.float64 else tensor.float()


class TensorStep(NamedTuple):
    """The step of one tensor: its position, its weight (the master's if there is one), and its group's options."""

    position: int
    weight: Tensor
    lr: float
    weight_decay: float
    adapt: bool
    taken: int | None  # steps before this one; None if they are not counted
    factor: float  # of the gradient
    param: Tensor
    first: int | None  # the index of its first element among the random numbers; None: states are stored as they are
    seed: int  # of the random numbers

    def stored(self, state: Tensor, *, is_second: bool = False) -> Tensor:
        """A new state as it is stored. ``is_second``: it is exp_avg_sq. Elements are numbered as in memory."""
        if self.first is None:
            return state
        drawn = words(state.numel(), self.seed, self.taken or 0, self.first, state.device)
        random = drawn >> 16 if is_second else drawn & 0xFFFF
        return round_to_bf16(state.float(), random[memory_order(self.param)])


def tensor_steps(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    others: Sequence[Sequence[Tensor]],
    masters: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    group_sizes: Sequence[int],
    lr: Sequence[float],
    weight_decay: Sequence[float],
    device_lr: Sequence[Tensor] = (),
    adapt: Sequence[int] = (),
    maximize: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    norm_squared: Tensor | None = None,
    max_norm: float = 0.0,
    is_counted: bool = True,
    state_firsts: Sequence[int] = (),
    state_seed: int = 0,
) -> Iterator[TensorStep]:
    """Check the lists, yield the step of each tensor, then count the step. Yields nothing if ``found_inf`` is set."""
    _check(params, grads, group_sizes, *others, masters)
    fits = not state_firsts or (len(state_firsts) == len(params) and not masters and bool(steps))
    if not fits or any(first < 0 or first % 4 != 0 for first in state_firsts):
        raise RuntimeError(
            "ddpcore: state_firsts must be empty, or a multiple of 4 for each param, with steps and without masters"
        )
    if found_inf is not None and bool(found_inf):
        return
    factor = 1.0 if grad_scale is None else 1.0 / float(grad_scale)
    if norm_squared is not None and max_norm != 0:
        clip = float(np.float32(max_norm)) / (math.sqrt(float(norm_squared)) * factor + 1e-6)
        if not clip >= 1:
            factor *= clip
    rates = [float(tensor) for tensor in device_lr] or lr
    groups = [group for group, size in enumerate(group_sizes) for _ in range(size)]
    for index, group in enumerate(groups):
        weight = _weight(params[index], masters[index] if masters else None)
        yield TensorStep(
            position=index,
            weight=weight,
            lr=rounded(rates[group], weight),
            weight_decay=rounded(weight_decay[group], weight),
            adapt=bool(adapt and adapt[group]),
            taken=int(steps[group].item()) if steps else None,
            factor=-factor if maximize else factor,
            param=params[index],
            first=state_firsts[index] if state_firsts else None,
            seed=state_seed,
        )
    for step in steps if is_counted else ():
        step.copy_(next_count(step, len(state_firsts) > 0))


def next_count(step: Tensor, rounded_states: bool) -> Tensor:
    """The count after one more step. Where it is part of the key of random numbers, it goes on beyond 2**24."""
    if not rounded_states or not 2**24 <= float(step) < 2**62:
        return step + 1
    return torch.nextafter(step, torch.full_like(step, math.inf))


def _check(params: Sequence[Tensor], grads: Sequence[Tensor], sizes: Sequence[int], *others: Sequence[Tensor]) -> None:
    if not params or sum(sizes) != len(params):
        raise RuntimeError("ddpcore: a step needs at least one param, and group_sizes must add up to their number")
    for tensors in (grads, *others):
        if len(tensors) != len(params) and (tensors is grads or len(tensors) > 0):
            raise RuntimeError("ddpcore: gradients, buffers and masters must have the length of params")
        for param, tensor in zip(params, tensors, strict=False):
            if tensor.layout != torch.strided or tensor.shape != param.shape:
                raise RuntimeError("ddpcore: tensors must be dense, not sparse, and have the shape of their param")


def _weight(param: Tensor, master: Tensor | None) -> Tensor:
    """The weight of a parameter: the master's elements where they round to the parameter's, else the parameter's."""
    if master is None:
        return wide_of(param)
    same = master.to(param.dtype).view(torch.int16) == param.contiguous().view(torch.int16).view_as(param)
    return torch.where(same, master, param.float())


def store_weight(index: int, weight: Tensor, params: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Store the new weight of a parameter, and in its master if there are masters."""
    params[index].copy_(weight)
    if masters:
        masters[index].copy_(weight)
