"""The mean of rows of 16 bits over a process group: sent in 16 bits, added in fp32, rounded once.

An all-reduce of a backend would round at every hop. Here all ranks send a share of their columns to each rank. It adds
the shares in fp32 by ascending rank, rounds the mean, and sends it to all: a reduce-scatter and an all-gather, in which
each rank sends 2(n-1)/n of the bytes of a row. Virtual learners add in the same order, so the bits are the same.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ddpcore.comm.base import Work
from ddpcore.comm.errors import Call
from ddpcore.comm.reductions import sum_of


class NarrowAverage(Work):
    """Starts the first half. :meth:`wait` does the second, so all ranks must wait for their averages in one order.

    Args:
        row: ``[P]``, bfloat16 or float16, of this rank; overwritten by :meth:`wait`.
        group: of n ranks, each of which has one row.
        call: names the operation in errors.
    """

    def __init__(self, row: Tensor, group: dist.ProcessGroup, call: Call) -> None:
        self._row, self._group, self._call = row, group, call
        self._num, numel = group.size(), row.numel()
        self._share = -(-numel // self._num)
        sizes = [min(self._share, max(0, numel - rank * self._share)) for rank in range(self._num)]
        self._own = sizes[group.rank()]
        self._received = row.new_empty(self._num * self._own)
        sent, width = row.contiguous(), row.itemsize
        with call:
            self._work = group.alltoall_base(
                _bytes(self._received), _bytes(sent), [self._own * width] * self._num, [size * width for size in sizes]
            )
        self._sent = sent  # until it has arrived

    @override
    def wait(self) -> None:
        self._call.wait(self._work)
        del self._sent
        mean = self._row.new_empty(self._share)  # the last share may be shorter, and the gathering takes equal ones
        mean[: self._own] = sum_of(self._received.view(self._num, self._own)).div_(self._num)
        everyone = self._row.new_empty(self._num * self._share)
        with self._call:
            work = self._group._allgather_base(_bytes(everyone), _bytes(mean))
        self._call.wait(work)
        self._row.copy_(everyone[: self._row.numel()])


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory: backends move bytes of every dtype."""
    return tensor.view(torch.uint8)
