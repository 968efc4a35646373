"""How rows are added: in which dtype, in which order, and in pieces that stay in cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddpcore import ops
from ddpcore.ops.dtypes import wide

CHUNK = 2**15  # elements that a CPU adds at a time, so that a sum stays in cache until it is written
_ALIGNMENT = 64  # elements: shares of two ranks do not meet in a cache line


def sum_of(rows: Sequence[Tensor] | Tensor) -> Tensor:
    """The sum, added in ascending order, in :func:`~ddpcore.ops.dtypes.wide`."""
    total = rows[0].to(wide(rows[0].dtype), copy=True)
    for row in rows[1:]:
        total += row
    return total


def _chunk(row: Tensor) -> int:
    """Elements of a row that are added at a time: on a GPU all, where each piece would be launches of its own."""
    return CHUNK if row.device.type == "cpu" else max(1, len(row))


@torch.no_grad()
def average_half_(own: Tensor, partner: Tensor, *, lower: bool) -> None:
    """Overwrite the lower or the upper half of both rows ``[P]`` with their mean; the partner does the other half.

    In pieces that stay in cache until both are written: 8 bytes a parameter for each of the two in fp32, where a
    snapshot and a mix take 20.
    """
    middle = own.numel() // 2 // _ALIGNMENT * _ALIGNMENT
    begin, end = (0, middle) if lower else (middle, own.numel())
    chunk = _chunk(own)
    for mine, theirs in zip(own[begin:end].split(chunk), partner[begin:end].split(chunk), strict=True):
        ops.mix_(mine, [theirs], 0.5, [0.5])
        theirs.copy_(mine)


@torch.no_grad()
def average_share_(columns: Sequence[Tensor], rank: int) -> None:
    """Overwrite one of n shares of ``columns``, n rows alike, with its mean, added in ascending order of the rows."""
    num_rows, numel = len(columns), len(columns[0])
    bounds = [min(numel, -(-numel * share // num_rows // _ALIGNMENT) * _ALIGNMENT) for share in (rank, rank + 1)]
    begin, end = bounds[0], numel if rank == num_rows - 1 else bounds[1]
    chunk = _chunk(columns[0])
    for first in range(begin, end, chunk):
        pieces = [row[first : min(first + chunk, end)] for row in columns]
        total = pieces[0].to(wide(pieces[0].dtype))  # the first row itself but for 16 bits
        for other in pieces[1:]:
            total += other
        total.div_(num_rows)
        for piece in pieces:
            if piece is not total:
                piece.copy_(total)
