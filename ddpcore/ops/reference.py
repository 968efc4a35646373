"""A pure-torch reference implementation of each operator, with the operator's arguments and one line per term.

They compute in fp32 for the dtypes of the kernels and in float64 for float64. So the same functions are the exact
reference of the tests and the fallback where there is no kernel. Factors that the kernels keep in fp32 are rounded too.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddpcore.ops.library import wide
from ddpcore.ops.random import add_noise, memory_order, round_to_bf16, words

BLOCK = 4096  # kBlock of csrc/args.h


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
        return round_to_bf16(state.float(), (drawn >> 16 if is_second else drawn & 0xFFFF)[memory_order(self.param)])


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
        what = "state_firsts must be empty, or a multiple of 4 for each param, with steps and without masters"
        raise RuntimeError(f"ddpcore: {what}")
    if found_inf is not None and bool(found_inf):
        return
    factor = 1.0 if grad_scale is None else 1.0 / float(grad_scale)
    if norm_squared is not None and max_norm != 0:
        clip = float(np.float32(max_norm)) / (math.sqrt(float(norm_squared)) * factor + 1e-6)
        if not clip >= 1:
            factor *= clip
    rates = [float(tensor) for tensor in device_lr] or lr
    for index, group in enumerate([group for group, size in enumerate(group_sizes) for _ in range(size)]):
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
        goes_on = bool(state_firsts) and 2**24 <= float(step) < 2**62  # part of the key of random numbers
        step.copy_(torch.nextafter(step, torch.full_like(step, math.inf)) if goes_on else step + 1)


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


_OF_MIX = ("self_weight", "peer_weights", "offsets", "out", "noise_std", "noise_seed", "noise_step", "noise_first")
_SHARED = tuple(inspect.signature(tensor_steps).parameters)[5:]  # the options that all steps have


def _step_of(names: Sequence[str], update: Callable[..., Tensor | None]) -> Callable[..., None]:
    """Make the update of one tensor the step of a list of tensors, after a mix if there are peers.

    ``names`` are the arguments between ``grads`` and ``masters``. An update returns the new weight; a first pass None.
    """
    places = ("params", "grads", *names, "masters", "steps", "scratch", "trust")

    @wraps(update)
    def take_step(*tensors: Any, peers: Sequence[Tensor] | None = None, **options: Any) -> None:
        given = dict(zip(places, tensors, strict=False))
        given.update({name: options.pop(name) for name in places if name in options})
        params, masters, steps = given["params"], given["masters"], given["steps"]
        mix = {name: options.pop(name) for name in _OF_MIX if name in options}
        shared = {name: options.pop(name) for name in _SHARED if name in options}
        if peers is not None:
            fixed = [masters, shared.get("state_firsts"), options.get("passes", "both") != "both"]
            if any(fixed) or any(shared.get(name) is not None for name in ("grad_scale", "found_inf")):
                what = "ddpcore: a step with a mix takes no masters, state_firsts, grad_scale, found_inf or passes"
                raise RuntimeError(f"{what}: call mix_ first, and then the step without a mix")
            params = _mixed(params, peers, **mix)
        if "exp_avgs" in names and not steps:
            raise RuntimeError("ddpcore: steps must have the length of group_sizes")
        if "trust" in given:
            options["trust"], shared["is_counted"] = given["trust"], options.get("passes") != "first"
        buffers = [given[name] for name in names]
        for step in tensor_steps(params, given["grads"], buffers, masters, steps, **shared):
            index = step.position
            weight = update(step, given["grads"][index], *(it[index] if it else None for it in buffers), **options)
            if weight is not None:
                params[index].copy_(weight)
                if masters:
                    masters[index].copy_(weight)

    return take_step


def _mixed(
    params: Sequence[Tensor],
    peers: Sequence[Tensor],
    *,
    self_weight: float = 1.0,
    peer_weights: Sequence[float] | None = None,
    offsets: Sequence[int] | None = None,
    out: Tensor | None = None,
    noise_first: int = 0,
    **noise: Any,
) -> list[Tensor]:
    """Average each parameter with its part of the rows. Returns the results, which are in ``out`` if it is given."""
    if peer_weights is None or offsets is None:
        raise RuntimeError("ddpcore: peers need peer_weights and offsets")
    results = []
    for param, offset in zip(params, offsets, strict=True):
        ends, size = offset + param.numel(), (param.numel(),)
        flat = param.as_strided(size, (1,))  # in the order of memory, in which noise is numbered
        rows = [peer[offset:ends] for peer in peers]
        row = flat if out is None else out[offset:ends]
        mix_(flat, rows, self_weight, peer_weights, out=row, noise_first=noise_first + offset, **noise)
        results.append(row.as_strided(param.shape, param.stride()))
    return results


def _sgd_weight(
    step: TensorStep,
    grad: Tensor,
    buffer: Tensor | None,
    *,
    inner: float,
    outer: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    decoupled: bool,
) -> Tensor:
    """``d = inner*(g + decay*w); m = momentum*m + (1-dampening)*d``; returns ``w - outer*(d + momentum*m or m)``."""
    weight = step.weight
    direction = rounded(step.factor, weight) * wide_of(grad)
    if step.weight_decay != 0 and not decoupled:
        direction = direction + step.weight_decay * weight
    direction = rounded(inner, weight) * direction
    if buffer is not None and momentum != 0:
        new = direction if step.taken == 0 else momentum * wide_of(buffer) + (1 - dampening) * direction
        buffer.copy_(step.stored(new))
        direction = direction + momentum * new if nesterov else new
    keep = 1.0 - step.lr * step.weight_decay if decoupled else 1.0
    return rounded(keep, weight) * weight - rounded(outer, weight) * direction


@partial(_step_of, ["momentum_buffers"])
def sgd_step_(step: TensorStep, grad: Tensor, buffer: Tensor | None, **rule: Any) -> Tensor:
    """Reference implementation of :func:`ddpcore.ops.sgd_step_`."""
    return _sgd_weight(step, grad, buffer, inner=1.0, outer=step.lr, **rule)


@partial(_step_of, ["momentum_buffers"])
def lars_step_(
    step: TensorStep,
    grad: Tensor,
    buffer: Tensor | None,
    *,
    trust: Tensor,
    variant: str,
    trust_coefficient: float,
    eps: float,
    squares: Tensor | None = None,
    passes: str = "both",
    **rule: Any,
) -> Tensor | None:
    """Reference implementation of :func:`ddpcore.ops.lars_step_`."""
    weight = step.weight
    weight_norm, grad_norm = norms(weight, grad, step.position, squares, passes)
    grad_norm *= abs(rounded(step.factor, weight))
    if passes == "first":
        return None
    ratio = 1.0
    if step.adapt and weight_norm != 0 and grad_norm != 0:
        coupled = 0.0 if rule["decoupled"] else step.weight_decay
        numerator = rounded(trust_coefficient, weight) * weight_norm
        ratio = numerator / (grad_norm + coupled * weight_norm + rounded(eps, weight))
    trust[step.position] = torch.tensor([ratio, weight_norm, grad_norm], dtype=torch.float64, device="cpu")
    factors = {"you2017": (step.lr * ratio, 1.0), "scaled_grad": (ratio, step.lr), "scaled_lr": (1.0, step.lr * ratio)}
    inner, outer = factors[variant]
    return _sgd_weight(step, grad, buffer, inner=inner, outer=outer, **rule)


def _adam_update(
    step: TensorStep,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    coupled_decay: float,
    update_decay: float,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    debias: bool = True,
    has_moments: bool = False,
) -> Tensor:
    """Update both moments, unless this has been done; returns ``m_hat / (sqrt(v_hat) + eps) + update_decay*w``."""
    weight, count = step.weight, 1 + (step.taken or 0)
    debias1 = rounded(1.0 / (1.0 - power(beta1, count)), weight) if debias else 1.0
    debias2 = rounded(1.0 / (1.0 - power(beta2, count)), weight) if debias else 1.0
    direction = rounded(step.factor, weight) * wide_of(grad) + coupled_decay * weight
    first, second = exp_avg.to(weight.dtype), exp_avg_sq.to(weight.dtype)
    if not has_moments:
        exp_avg.copy_(step.stored(beta1 * first + (1 - beta1) * direction))
        exp_avg_sq.copy_(step.stored(beta2 * second + (1 - beta2) * (direction * direction), is_second=True))
        first, second = exp_avg.to(weight.dtype), exp_avg_sq.to(weight.dtype)
    # The root in float64, because torch's own fp32 root is not always the nearest number.
    root = (debias2 * second).double().sqrt().to(weight.dtype)
    return (debias1 * first) / (root + rounded(eps, weight)) + update_decay * weight


@partial(_step_of, ["exp_avgs", "exp_avg_sqs"])
def adamw_step_(
    step: TensorStep, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, decoupled: bool, **rule: Any
) -> Tensor:
    """Reference implementation of :func:`ddpcore.ops.adamw_step_`."""
    decay = step.weight_decay
    update = _adam_update(step, grad, exp_avg, exp_avg_sq, 0.0 if decoupled else decay, 0.0, **rule)
    return (rounded(1.0 - step.lr * decay, step.weight) if decoupled else 1.0) * step.weight - step.lr * update


@partial(_step_of, ["exp_avgs", "exp_avg_sqs"])
def lamb_step_(
    step: TensorStep,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    trust: Tensor,
    decay_mode: str,
    min_ratio: float,
    max_ratio: float,
    min_weight_norm: float,
    max_weight_norm: float,
    squares: Tensor | None = None,
    passes: str = "both",
    **rule: Any,
) -> Tensor | None:
    """Reference implementation of :func:`ddpcore.ops.lamb_step_`."""
    weight, decay = step.weight, step.weight_decay
    decays = (decay if decay_mode == mode else 0.0 for mode in ("coupled", "in_update"))
    update = _adam_update(step, grad, exp_avg, exp_avg_sq, *decays, **rule, has_moments=passes == "second")
    weight_norm, update_norm = norms(weight, update, step.position, squares, passes)
    if passes == "first":
        return None
    ratio = 1.0
    if step.adapt and weight_norm != 0 and update_norm != 0:
        phi = float(np.clip(weight_norm, rounded(min_weight_norm, weight), rounded(max_weight_norm, weight)))
        ratio = float(np.clip(phi / update_norm, rounded(min_ratio, weight), rounded(max_ratio, weight)))
    trust[step.position] = torch.tensor([ratio, weight_norm, update_norm], dtype=torch.float64, device="cpu")
    keep = rounded(1.0 - step.lr * decay, weight) if decay_mode == "decoupled" else 1.0
    return keep * weight - rounded(step.lr * ratio, weight) * update


def mix_(
    weights: Tensor,
    peers: Sequence[Tensor],
    self_weight: float,
    peer_weights: Sequence[float],
    *,
    out: Tensor | None = None,
    **noise: Any,
) -> Tensor:
    """Reference implementation of :func:`ddpcore.ops.mix_`."""
    distances = [square_sum(wide_of(weights) - wide_of(peer)) for peer in peers]
    mixed = self_weight * wide_of(weights)
    for peer_weight, peer in zip(peer_weights, peers, strict=True):
        mixed = mixed + peer_weight * wide_of(peer)
    (weights if out is None else out).copy_(add_noise(mixed, **noise))
    return torch.stack(distances) if distances else weights.new_empty((0,), dtype=torch.float64)


def mix_stacked_(
    weights: Tensor,
    others: Sequence[Tensor],
    offsets: Tensor,
    columns: Tensor,
    values: Tensor,
    *,
    distances: bool = True,
) -> Tensor:
    """Reference implementation of :func:`ddpcore.ops.mix_stacked_`."""
    if not (old := [wide_of(row).clone() for row in weights]):
        return weights.new_empty((0,), dtype=torch.float64)
    rows = [*old, *map(wide_of, others)]
    bounds, of_entry = offsets.tolist(), columns.tolist()
    total = sum(old[1:], start=old[0])
    mean = (1 / torch.tensor(len(old), dtype=total.dtype, device="cpu")) * total
    for j, row in enumerate(weights):
        terms = [values[entry] * rows[of_entry[entry]] for entry in range(bounds[j], bounds[j + 1])]
        row.copy_(sum(terms[1:], start=terms[0]) if terms else torch.zeros_like(mean))
    found = [square_sum(row - mean) for row in old] if distances else []
    return torch.stack(found) if found else weights.new_empty((0,), dtype=torch.float64)


def average_(rows: Sequence[Tensor], size: int) -> Tensor:
    """Reference implementation of :func:`ddpcore.ops.average_`."""
    each = [row for one in rows for row in (one if one.dim() > 1 else [one])]
    places = [] if torch.compiler.is_compiling() else sorted(row.data_ptr() for row in each)
    if any(place - last < each[0].nbytes for last, place in pairwise(places)):
        raise RuntimeError("ddpcore: rows must not overlap in memory, because each is overwritten: pass copies of them")
    sums = torch.stack([row.sum(dtype=wide(row.dtype)) for row in each]).real.double()
    for block in (each[first : first + size] for first in range(0, len(each), size)):
        total = block[0].to(wide(block[0].dtype))  # the first row itself, except for 16 bits
        for row in block[1:]:
            total += row
        torch._foreach_copy_(block, [total.div_(size)] * size)
    return sums


def segment_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Reference implementation of :func:`ddpcore.ops.segment_norms`."""
    return torch.stack([square_sum(tensor) for tensor in tensors])


def total_norm_(tensors: Sequence[Tensor], out: Tensor) -> None:
    """Reference implementation of :func:`ddpcore.ops.total_norm_`."""
    out[0] = sum(map(square_sum, tensors))


def noise_sums(rows: Sequence[Tensor], bounds: Sequence[int], origin: Tensor | None) -> Tensor:
    """Reference implementation of :func:`ddpcore.ops.noise_sums`."""
    sizes = [end - begin for begin, end in pairwise(bounds)]
    if not rows or not bounds or bounds[0] != 0 or bounds[-1] != rows[0].numel() or min(sizes, default=0) < 0:
        raise RuntimeError("ddpcore: bounds must ascend from 0 to the number of elements of at least one row")
    if any(row.dim() != 1 for row in rows):
        raise RuntimeError("ddpcore: rows must be contiguous rows of one length, dtype and device")
    values = torch.stack([wide_of(row) if origin is None else wide_of(row) - wide_of(origin) for row in rows]).double()
    sums = values.new_empty((len(sizes), len(rows), len(rows)))
    for matrix, part in zip(sums, values.split(sizes, dim=1) if sizes else (), strict=True):
        upper = (part @ part.T).triu()
        matrix.copy_(upper + upper.triu(1).T)
    return sums
