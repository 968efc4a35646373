"""Whether learners that must be equal are equal: the options and states of their optimizers, and their weights."""

from collections import defaultdict
from operator import is_
from typing import Any, NoReturn
from zlib import crc32

import torch
from torch import Tensor

from ddpcore.optim.checks import is_capturing, is_scalar
from ddpcore.parameters.flat import LARGE, FlatParameters
from ddpcore.parameters.shards import local
from ddpcore.strategies.learner import Learner

FIRST, EVERY = 16, 16  # each of the first steps is checked, and then one of so many
_SAMPLE = 256  # weights of each learner, and one of each small parameter
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_alike(learner: Learner, columns: Tensor, *, is_apart: bool) -> None:
    """Compare the learners of a strategy that keeps them identical, such as ``SSGD``. Collective in some steps.

    Its average makes gradients equal, so learners differ only after one of them was given other weights, another
    state of its optimizer, or other options. It takes one small ``gather`` after the average of gradients.

    RuntimeError, before anything is stepped: an option of a group differs, or weights or states do, unless these may be
    apart, because a step had no average. All bits are added, those of ``columns`` by their places.
    """
    step, flat = learner.step, learner.flat
    if learner.comm.num_learners == 1 or (step >= FIRST and step % EVERY) or is_capturing(flat.param_LP):
        return
    options = compared_options(learner.optimizer)
    bits = bits_of(flat.param_LP, columns).to(torch.int64)
    samples = (bits * torch.arange(1, 1 + bits.shape[1], dtype=torch.int64, device=bits.device)).sum(dim=1)
    weights = flat.param_LP.detach().view(torch.int64).sum(dim=1) + samples  # rows are multiples of 16 numbers
    states = _sums_of_states(learner).sum(dim=1)
    facts = torch.tensor([len(options), crc32(repr(options).encode()), is_apart], dtype=torch.int64, device=bits.device)
    own = torch.cat([torch.stack([weights, states], dim=1), facts.repeat(len(bits), 1)], dim=1)
    everyone, ids = learner.comm.gather(own, step).cpu(), learner.comm.members
    if (other := _first_other(everyone[:, 2])) is not None:
        what = f"the optimizer has {int(everyone[0, 2])} options in its groups on learner {ids[0]}"
        raise RuntimeError(f"{what} and {int(everyone[other, 2])} on learner {ids[other]}: add groups on all alike")
    if _first_other(everyone[:, 3]) is not None:
        _name_option(learner, options)
    if everyone[:, 4].any():
        return
    if (other := _first_other(everyone[:, 0])) is not None:
        what = f"the weights of learner {ids[other]} differ from those of learner {ids[0]}"
        advice = learner.advice("load states and change weights on all alike (or traits.stays_identical is wrong)")
        raise RuntimeError(f"{what}, and their average of gradients cannot bring them together: {advice}")
    if (other := _first_other(everyone[:, 1])) is not None:
        sums = learner.comm.gather(_sums_of_states(learner), step).cpu()
        name = flat.names[int((sums[other] != sums[0]).nonzero()[0])]
        what = f"the state of the optimizer for {name} on learner {ids[other]} differs from that of learner {ids[0]}"
        advice = "load and change states on all alike (or traits.stays_identical is wrong)"
        raise RuntimeError(f"{what}, and so will weights: {advice}")


def _first_other(column: Tensor) -> int | None:
    """The first learner whose number differs from learner 0's number."""
    return next(iter((column != column[0]).nonzero().flatten().tolist()), None)


def _name_option(learner: Learner, options: list[tuple[str, Any]]) -> NoReturn:
    """Raise RuntimeError that names an option in which learners differ. Collective."""
    known = [is_scalar(value) for _, value in options]
    values = [value if is_scalar(value) else crc32(repr(value).encode()) for _, value in options]
    rows = torch.tensor([*values, *known], dtype=torch.float64, device=learner.flat.param_LP.device)
    everyone, are_numbers = learner.comm.gather(rows.repeat(learner.flat.num_rows, 1), learner.step).cpu().chunk(2, 1)
    for index, (name, _) in enumerate(options):
        column, are_known = everyone[:, index], are_numbers[:, index].all()
        if (other := _first_other(column)) is not None:
            first, second = (f"on learner {learner.comm.members[place]}" for place in (0, other))
            found = f"{float(column[0]):g} {first} and {float(column[other]):g}"
            what = f"{name} is {found if are_known else f'not the same {first} and'} {second}"
            advice = "give all of them the same optimizer, schedule and loaded state"
            raise RuntimeError(f"{what}, which must stay equal: {advice}")
    raise RuntimeError("options of the optimizer have other names on one learner: give all learners the same optimizer")


def check_divided(learner: Learner) -> None:
    """Compare the gradients of ranks among which an optimizer divides its work, as Muon does. Collective.

    RuntimeError: a gradient differs, or a rank does not step, for which others would wait without a timeout.
    """
    flat, name = learner.flat, type(learner.optimizer).__name__
    if learner.comm.num_learners == 1 or is_capturing(flat.param_LP):
        return
    grads = [parameter.grad for parameter in flat.parameters]
    missing = [index for index, grad in enumerate(grads) if grad is None]
    none = torch.full((), crc32(repr(missing).encode()), dtype=torch.int64, device=flat.param_LP.device)
    # One sum, and on a device one kernel, where the gradients lie in the flat buffer.
    is_inside = flat.grad_start is not None and all(map(is_, grads, flat.grad_views))
    total = sum(_sum_of_numbers(grad) for grad in ([flat.grad_LP] if is_inside else grads) if grad is not None)
    everyone = learner.comm.gather(torch.stack([none, none + total])[None], learner.step)
    if bool((everyone == everyone[0]).all()):
        return
    sums = [none if grad is None else _sum_of_numbers(grad) for grad in grads]
    everyone = learner.comm.gather(torch.stack(sums)[None], learner.step).cpu()
    for index in (everyone != everyone[0]).any(dim=0).nonzero().flatten().tolist()[:1]:
        other = _first_other(everyone[:, index])
        what = f"the gradient of {flat.names[index]} on learner {other} is not that of learner 0"
        why = f"{name} divides its work among ranks that have the same gradients"
        raise RuntimeError(f"{what}, and {why}: change them on all alike, or set process_group = None")


def _sum_of_numbers(numbers: Tensor) -> Tensor:
    """The bits of all numbers as integers, added: the same in any order. They overflow, because that is fast."""
    return _row_sums(local(numbers).detach()[None])[0]


def _row_sums(rows: Tensor) -> Tensor:
    """For each row the bits of its numbers as integers, added."""
    integer = _INTEGERS[rows.element_size()]
    return rows[:, None].flatten(1).view(integer).sum(dim=1, dtype=integer).to(torch.int64)


def _sums_of_states(learner: Learner) -> Tensor:
    """``[L, parameters]``: for each parameter the bits of its states of its shape."""
    flat, states, device = learner.flat, learner.optimizer.state, learner.flat.param_LP.device
    sums = torch.zeros(len(flat.parameters), dtype=torch.int64, device=device)
    small: dict[Any, list[tuple[int, Tensor]]] = defaultdict(list)  # with their indices, by what is added in one call
    for index, parameter in enumerate(flat.parameters):
        for key, value in states.get(parameter, {}).items():
            if key == "step" or not isinstance(value, Tensor) or value.shape != parameter.shape or value.is_sparse:
                continue
            if value.device != parameter.device or type(own := local(value).detach()) is not Tensor:
                continue
            if own.numel() < LARGE:
                small[own.dtype, own.shape].append((index, own))
            else:
                sums[index] += _sum_of_numbers(own)
    for pairs in small.values():
        indices, values = zip(*pairs, strict=True)
        sums.index_add_(0, torch.tensor(indices, device=device), _row_sums(torch.stack(values)))
    return sums.view(flat.num_rows, -1)


def compared_options(optimizer: torch.optim.Optimizer) -> list[tuple[str, Any]]:
    """All options of the groups, one for each key, with their names. A tensor becomes a number."""
    return [
        (f"{key} of group {index}", _plain(group[key]))
        for index, group in enumerate(optimizer.param_groups)
        for key in sorted(set(optimizer.defaults).intersection(group))
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return float(value) if is_scalar(value) else value


def sampled_columns(flat: FlatParameters) -> Tensor:
    """``[n]``: columns of some weights, at least one of each parameter. None is padding."""
    places = [
        torch.arange(one.offset, one.offset + one.numel, max(1, flat.numel // _SAMPLE), dtype=torch.int64, device="cpu")
        for one in flat.segments
    ]
    return torch.cat(places).to(flat.param_LP.device)


def bits_of(weights_LP: Tensor, columns: Tensor) -> Tensor:
    """``[L, bytes]``: the bits of some weights."""
    return weights_LP.detach().index_select(1, columns).view(torch.uint8)
