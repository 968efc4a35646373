"""Bytes that collective operations send, and the size below which gloo gathers rows instead of reducing them."""

from __future__ import annotations

from torch import Tensor

# gloo's all-reduce goes around the ring of ranks twice, an all-gather once. For small messages the number of rounds
# costs more time than the number of bytes. After an all-gather each rank can add the rows in ascending order, so that
# the sum has the same bits as that of virtual learners.
GATHER_BYTES = 2**20  # the largest number of bytes that one learner receives in an all-gather


def is_gathered(row: Tensor, num_learners: int) -> bool:
    """Whether gloo ranks gather a row of this size to average it."""
    return row.nbytes * (num_learners - 1) <= GATHER_BYTES


def average_bytes(row: Tensor, num_learners: int) -> int:
    """Bytes that each of n learners sends to average a row: n-1 rows in a gather, 2(n-1)/n rows in an all-reduce."""
    if is_gathered(row, num_learners):
        return row.nbytes * (num_learners - 1)
    return sum_bytes(row, num_learners)


def sum_bytes(row: Tensor, num_learners: int) -> int:
    """Bytes that each of n learners sends in an all-reduce of a row."""
    return all_reduce_bytes(row.nbytes, num_learners)


def all_reduce_bytes(num_bytes: int, num_learners: int) -> int:
    """Bytes that each of n learners sends in a bandwidth-optimal all-reduce of ``num_bytes``: 2(n-1)/n of them."""
    return 2 * (num_learners - 1) * num_bytes // num_learners
