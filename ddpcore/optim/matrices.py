"""The matrices of Muon: the parameters of a step, or the parts of them, that are orthogonalized."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpcore.optim.checks import Group
from ddpcore.optim.newton_schulz import direct_products, gram_products, orthogonalize, takes_gram
from ddpcore.parameters.shards import local

MAX_BATCH = 2**26  # elements of the matrices that are orthogonalized together


@dataclass(frozen=True, eq=False)
class Matrix:
    """A parameter of one step, or one of its parts, as a matrix."""

    param: Tensor
    grad: Tensor
    momentum: Tensor
    group: Group
    dtype: torch.dtype  # of the products
    factor: float = 1.0  # of the step

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.param.shape[0], self.param.numel() // self.param.shape[0]

    @property
    def wide(self) -> tuple[int, int]:
        """The shape, transposed if there are more rows than columns."""
        rows, columns = self.shape
        return min(rows, columns), max(rows, columns)

    @property
    def stored(self) -> torch.dtype:
        """The dtype of O(u)."""
        return torch.float64 if self.param.dtype == torch.float64 else torch.bfloat16

    @property
    def cost(self) -> int:
        """Multiplications."""
        is_gram = takes_gram(*self.wide, self.group["ns_steps"], self.dtype, self.param.device)
        return (gram_products if is_gram else direct_products)(*self.wide, self.group["ns_steps"])

    @property
    def kind(self) -> tuple[Any, ...]:
        """Matrices that are equal in this can be one batch."""
        options = tuple(self.group["ns_coefficients"]), self.group["eps"], self.group["ns_steps"]
        return self.wide, self.dtype, self.param.dtype, self.param.device, options

    def direction(self) -> Tensor:
        """u, with ``rows <= columns``."""
        return self.upright(direction_of(self.grad, self.momentum, self.group).flatten(1))

    def upright(self, update: Tensor) -> Tensor:
        """O(u) with the rows and columns of the matrix, from one with ``rows <= columns``; or the other way round."""
        return update.mT if self.shape[0] > self.shape[1] else update

    def step(self, update: Tensor) -> None:
        """Step the matrix by O(u)."""
        _decay_and_add_(self.param, self.upright(update), self.group, self.scale * self.factor)

    @property
    def scale(self) -> float:
        """s."""
        rows, columns = self.shape
        if self.group["adjust_lr_fn"] == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1, rows / columns))


@dataclass(frozen=True, eq=False)
class Divided:
    """A parameter of one step of which this rank has a shard, and which is orthogonalized as a whole."""

    param: Any
    direction: Tensor  # u of the shard
    group: Group
    dtype: torch.dtype  # of the products
    shards: list[tuple[dist.ProcessGroup, int]]  # as of :func:`~ddpcore.optim.shards.divided`

    def matrices(self, whole: Tensor | None = None) -> list[Matrix]:
        """The matrices of the whole u, which need no other tensor: ``lerp`` of u and u is u. None: without values."""
        whole = torch.empty(self.param.shape, device="meta") if whole is None else whole
        return [Matrix(part, part, part, self.group, self.dtype) for part in parts_of(whole, self.group)]

    def step(self, update: Tensor) -> None:
        """Step this rank's shard. The update has the scale of the first matrix."""
        _decay_and_add_(local(self.param), update, self.group, self.matrices()[0].scale)


def parts_of(tensor: Tensor, group: Group) -> Sequence[Tensor]:
    """The matrices in a parameter of a group."""
    if group["batched"]:
        return tensor.unbind()
    split = group["split"]
    return tensor.chunk(split) if isinstance(split, int) else tensor.split(split)


def direction_of(grad: Tensor, momentum: Tensor, group: Group) -> Tensor:
    """u."""
    return grad.lerp(momentum, float(group["momentum"])) if group["nesterov"] else momentum


def _decay_and_add_(weights: Tensor, update: Tensor, group: Group, scale: float) -> None:
    """Decay the weights of a matrix, or of a part of it, and subtract the scaled update."""
    lr = float(group["lr"])
    weights.mul_(1 - lr * float(group["weight_decay"]))
    weights.add_(update.reshape(weights.shape), alpha=-lr * scale)


def results_of(members: Sequence[Divided], numbers: Sequence[int], wholes: Sequence[Tensor]) -> list[Tensor]:
    """O(u) of the whole members of these numbers. Matrices of other scales than the first have the ratio of scales."""
    found = [members[number].matrices(whole) for number, whole in zip(numbers, wholes, strict=True)]
    updates = iter(orthogonal([matrix for matrices in found for matrix in matrices]))
    return [
        torch.cat([(m.upright(next(updates)) * (m.scale / matrices[0].scale)).flatten() for m in matrices]).view_as(u)
        for matrices, u in zip(found, wholes, strict=True)
    ]


def orthogonal(matrices: list[Matrix]) -> list[Tensor]:
    """O(u) of each matrix, in batches of one shape."""
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for index, matrix in enumerate(matrices):
        kinds.setdefault(matrix.kind, []).append(index)
    updates: dict[int, Tensor] = {}
    for members in kinds.values():
        first = matrices[members[0]]
        size = max(1, MAX_BATCH // first.param.numel())
        for begin in range(0, len(members), size):
            part = members[begin : begin + size]
            with torch.autocast(first.param.device.type, enabled=False):  # which would change the dtype of the stack
                directions = torch.stack([matrices[index].direction() for index in part])
            steps, coefficients, eps = (first.group[name] for name in ("ns_steps", "ns_coefficients", "eps"))
            result = orthogonalize(directions, steps=steps, coefficients=coefficients, eps=eps, dtype=first.dtype)
            updates.update(zip(part, result.to(first.stored), strict=True))
    return [updates[index] for index in range(len(matrices))]


def places_in(matrices: Sequence[Matrix], row: Tensor) -> Iterator[tuple[Matrix, Tensor]]:
    """The matrices, each with its part of a row in which they lie one after another."""
    sizes = [matrix.param.numel() for matrix in matrices]
    for matrix, part in zip(matrices, row[: sum(sizes)].split(sizes), strict=True):
        yield matrix, part.view(matrix.wide)
