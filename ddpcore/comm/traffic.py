"""How many bytes a collective operation sends, and which averages gloo gathers instead of reducing."""

from __future__ import annotations

from torch import Tensor

from ddpcore.ops.dtypes import wide

# gloo's all-reduce goes round its ring twice. For small messages the rounds cost more time than the bytes. Gathering
# everyone's rows goes round once. It also adds in ascending order, with the bits of virtual learners.
GATHER_BYTES = 2**20  # received by one learner


def is_gathered(row: Tensor, num_learners: int) -> bool:
    """Whether gloo ranks gather a row of this size to average it."""
    return row.nbytes * (num_learners - 1) <= GATHER_BYTES


def average_bytes(row: Tensor, num_learners: int) -> int:
    """Bytes that one of n learners sends to average a row: n-1 times a gathered one, 2(n-1)/n of a reduced one."""
    if is_gathered(row, num_learners):
        return row.nbytes * (num_learners - 1)
    return sum_bytes(row, num_learners)


def sum_bytes(row: Tensor, num_learners: int) -> int:
    """Bytes that each of n learners sends in an all-reduce of a row, which carries the wider dtype."""
    return all_reduce_bytes(row.numel() * wide(row.dtype).itemsize, num_learners)


def all_reduce_bytes(num_bytes: int, num_learners: int) -> int:
    """Bytes that each of n learners sends in a bandwidth-optimal all-reduce of ``num_bytes``: 2(n-1)/n of them."""
    return 2 * (num_learners - 1) * num_bytes // num_learners
