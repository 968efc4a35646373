"""Sums and means of rows, in a fixed dtype and order, and the bytes that they send."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ddpcore import ops
from ddpcore.ops.library import is_narrow, wide

CHUNK = 2**15  # elements that a CPU adds at a time: 128 KiB in fp32, which stay in cache until they are written
_ALIGNMENT = 64  # elements: the shares of two ranks have no cache line in common


def sum_of(rows: Sequence[Tensor] | Tensor) -> Tensor:
    """The sum of the rows, added in ascending order in the dtype :func:`~ddpcore.ops.library.wide`."""
    total = rows[0].to(wide(rows[0].dtype), copy=True)
    for row in rows[1:]:
        total += row
    return total


def chunk_of(row: Tensor) -> int:
    """Elements of a row that are added at a time: all of them on a GPU, where each piece costs kernel launches."""
    return CHUNK if row.device.type == "cpu" else max(1, len(row))


@torch.no_grad()
def average_half_(own: Tensor, partner: Tensor, *, lower: bool) -> None:
    """Overwrite the lower or the upper half of both rows ``[P]`` with their mean. The partner averages the other half.

    Each of the two moves 8 bytes a parameter in fp32. A snapshot and a mix move 20.
    """
    middle = own.numel() // 2 // _ALIGNMENT * _ALIGNMENT
    begin, end = (0, middle) if lower else (middle, own.numel())
    for mine, theirs in zip(*(row[begin:end].split(chunk_of(row)) for row in (own, partner)), strict=True):
        average_pair_(mine, theirs)
        theirs.copy_(mine)


def average_pair_(own: Tensor, other: Tensor) -> None:
    """Overwrite ``own`` with the mean of both. Both branches give the same bits, except for subnormal numbers."""
    if own.is_cuda or is_narrow(own.dtype):  # one pass over memory; 16 bits are added in fp32
        ops.mix_(own, [other], 0.5, [0.5])
    else:  # in cache the squared distances of mix_ take most of its time
        own.mul_(0.5).add_(other, alpha=0.5)


@torch.inference_mode()  # works for tensors of both modes, also in a thread, which begins outside of it
def average_share_(columns: Sequence[Tensor], rank: int) -> None:
    """Overwrite share ``rank`` of n rows of one shape with the mean of the rows, added in ascending order."""
    num_rows, numel = len(columns), len(columns[0])
    begin, end = (min(numel, -(-numel * one // num_rows // _ALIGNMENT) * _ALIGNMENT) for one in (rank, rank + 1))
    ops.average_([row[begin:end] for row in columns], num_rows)


# gloo's all-reduce goes around the ring of ranks twice, an all-gather once. For small messages the number of rounds
# costs more time than the number of bytes. After an all-gather each rank can add the rows in ascending order, so that
# the sum has the same bits as with virtual learners.
GATHER_BYTES = 2**20  # the largest number of bytes that one learner receives in an all-gather


def is_gathered(row: Tensor, num_learners: int) -> bool:
    """Whether gloo ranks gather a row of this size to average it."""
    return row.nbytes * (num_learners - 1) <= GATHER_BYTES


def average_bytes(row: Tensor, num_learners: int) -> int:
    """Bytes that each of n learners sends to average a row: n-1 rows in a gather, 2(n-1)/n rows in an all-reduce."""
    if is_gathered(row, num_learners):
        return row.nbytes * (num_learners - 1)
    return all_reduce_bytes(row.nbytes, num_learners)


def all_reduce_bytes(num_bytes: int, num_learners: int) -> int:
    """Bytes that each of n learners sends in a bandwidth-optimal all-reduce of ``num_bytes``: 2(n-1)/n of them."""
    return 2 * (num_learners - 1) * num_bytes // num_learners
