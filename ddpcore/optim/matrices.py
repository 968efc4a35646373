"""The matrices of Muon: the parameters of a step, or the parts of them, that are orthogonalized."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpcore.optim.checks import Group
from ddpcore.optim.newton_schulz import direct_products, gram_products, orthogonalize, takes_gram
from ddpcore.optim.shards import divided
from ddpcore.parameters.shards import is_dtensor, local, mesh_of, placements_of

MAX_BATCH = 2**26  # elements of the matrices that are orthogonalized together


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter of one step, or this rank's part of it."""

    param: Any
    part: Tensor
    grad: Tensor
    momentum: Tensor
    group: Group
    dtype: torch.dtype  # of the products
    is_block: bool  # whether this rank's part is stepped alone

    @property
    def shards(self) -> list[tuple[dist.ProcessGroup, int]]:
        """The ranks that have its shards, and the dimension that they divide, for each such dimension of the mesh."""
        return divided(self.param) if is_dtensor(self.param) else []

    @property
    def num_divided(self) -> int:
        """The dimensions of the mesh that divide what this step takes as a whole."""
        return 0 if self.is_block else len(self.shards)

    @property
    def scale(self) -> float:
        """Of its first matrix."""
        return self.on(torch.empty(self.param.shape, device="meta"))[0].scale

    def matrices(self) -> Iterator[Matrix]:
        """Its matrices, or those of this rank's part alone."""
        factor = self.group["block_lr"] if self.is_block and self.shards else 1.0
        parts = (self._parts(tensor) for tensor in (self.part, self.grad, self.momentum) if self.part.numel())
        for weights, grad, momentum in zip(*parts, strict=True):
            yield Matrix(weights, grad, momentum, self.group, self.dtype, factor)

    def gathered(self) -> Tensor:
        """The whole u. Collective over all ranks of the mesh."""
        given = self.param.detach()
        given._local_tensor = self.direction()
        whole: Tensor = given.full_tensor()
        return whole

    def shard_of(self, whole: Tensor) -> Tensor:
        """This rank's shard of a tensor of the parameter's shape."""
        from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415  it takes a second to import

        return local(distribute_tensor(whole, mesh_of(self.param), placements_of(self.param), src_data_rank=None))

    def on(self, direction: Tensor) -> list[Matrix]:
        """The matrices of a whole u, which need no other tensor: ``lerp`` of u and u is u."""
        return [Matrix(part, part, part, self.group, self.dtype) for part in self._parts(direction)]

    def direction(self) -> Tensor:
        """u of this rank's part."""
        return direction_of(self.grad, self.momentum, self.group)

    def _parts(self, tensor: Tensor) -> Sequence[Tensor]:
        if self.group["batched"]:
            return tensor.unbind()
        split = self.group["split"]
        return tensor.chunk(split) if isinstance(split, int) else tensor.split(split)


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
        form = gram_products if is_gram else direct_products
        return form(*self.wide, self.group["ns_steps"])

    @property
    def kind(self) -> tuple[Any, ...]:
        """Matrices that are equal in this can be one batch."""
        options = tuple(self.group["ns_coefficients"]), self.group["eps"], self.group["ns_steps"]
        return self.wide, self.dtype, self.param.dtype, self.param.device, options

    def direction(self) -> Tensor:
        """u, with ``rows <= columns``."""
        matrix = direction_of(self.grad, self.momentum, self.group).flatten(1)
        return matrix.mT if self.shape[0] > self.shape[1] else matrix

    def upright(self, update: Tensor) -> Tensor:
        """O(u) with the rows and columns of the matrix."""
        rows, columns = self.shape
        return update.mT if rows > columns else update

    @property
    def scale(self) -> float:
        """s."""
        rows, columns = self.shape
        if self.group["adjust_lr_fn"] == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1, rows / columns))


def direction_of(grad: Tensor, momentum: Tensor, group: Group) -> Tensor:
    """u."""
    return grad.lerp(momentum, float(group["momentum"])) if group["nesterov"] else momentum


def decay_and_add_(weights: Tensor, update: Tensor, group: Group, scale: float) -> None:
    """Decay the weights of a matrix, or of a part of it, and subtract the scaled update."""
    lr = float(group["lr"])
    weights.mul_(1 - lr * float(group["weight_decay"]))
    weights.add_(update.reshape(weights.shape), alpha=-lr * scale)


def results_of(members: Sequence[Member], wholes: Sequence[Tensor]) -> list[Tensor]:
    """O(u) of whole parameters, where matrices of other scales than the first have the ratio of the scales."""
    found = [member.on(whole) for member, whole in zip(members, wholes, strict=True)]
    updates = iter(orthogonal([matrix for matrices in found for matrix in matrices]))
    return [
        torch.cat([(m.upright(next(updates)) * (m.scale / matrices[0].scale)).flatten() for m in matrices]).view(like)
        for matrices, like in zip(found, (whole.shape for whole in wholes), strict=True)
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
            result = orthogonalize(
                directions,
                steps=first.group["ns_steps"],
                coefficients=first.group["ns_coefficients"],
                eps=first.group["eps"],
                dtype=first.dtype,
            )
            updates.update(zip(part, result.to(first.stored), strict=True))
    return [updates[index] for index in range(len(matrices))]


def places_in(matrices: Sequence[Matrix], row: Tensor) -> Iterator[tuple[Matrix, Tensor]]:
    """The matrices, each with its part of a row in which they lie one after another."""
    begin = 0
    for matrix in matrices:
        end = begin + matrix.param.numel()
        yield matrix, row[begin:end].view(matrix.wide)
        begin = end
