"""Bytes that collective operations send, and the size below which gloo gathers rows instead of reducing them."""

from __future__ import annotations

from torch import Tensor

from ddpcore.ops.dtypes import wide

# gloo's all-reduce passes its ring twice. For small messages the passes cost more time than the bytes. An all-gather
# passes the ring once. Its rows can be added in ascending order, with the bits of virtual learners.
GATHER_BYTES = 2**20  # received by one learner


def is_gathered(row: Tensor, num_learners: int) -> bool:
    """Whether gloo ranks gather a row of this size to average it."""
    return row.nbytes * (num_learners - 1) <= GATHER_BYTES


def average_bytes(row: Tensor, num_learners: int) -> int:
    """Bytes that each of n learners sends to average a row: (n-1) rows if gathered, 2(n-1)/n of a row if reduced."""
    if is_gathered(row, num_learners):
        return row.nbytes * (num_learners - 1)
    return sum_bytes(row, num_learners)


def sum_bytes(row: Tensor, num_learners: int) -> int:
    """Bytes that each of n learners sends in an all-reduce of a row, which sends 16-bit rows as fp32."""
    return all_reduce_bytes(row.numel() * wide(row.dtype).itemsize, num_learners)


def all_reduce_bytes(num_bytes: int, num_learners: int) -> int:
    """Bytes that each of n learners sends in a bandwidth-optimal all-reduce of ``num_bytes``: 2(n-1)/n of them."""
    return 2 * (num_learners - 1) * num_bytes // num_learners
