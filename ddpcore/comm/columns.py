"""Gossip between groups whose learners hold the same rows: each learner exchanges a part of the columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ddpcore.comm.base import Communicator, Exchange
from ddpcore.ops import WeightAverage
from ddpcore.topology.base import Topology
from ddpcore.topology.wrapped import WithinGroups


def exchange_columns(comm: Communicator, rows_LX: Tensor, topology: Topology, size: int, step: int) -> Exchange:
    """Like ``comm.exchange``, where the learners of each group hold the same rows.

    The learner at place i of its group sends the i-th of ``size`` parts of the columns to the learners at this place of
    other groups. The members of a group then gather what each has averaged, so they hold the same bits. A size of 1 is
    ``comm.exchange``.
    """
    return comm.exchange(rows_LX, topology, step) if size == 1 else _ColumnExchange(comm, rows_LX, topology, size, step)


class _ColumnExchange(Exchange):
    """Parts have equal lengths, so the last one may overlap with the one before it: there both have the same bits."""

    def __init__(self, comm: Communicator, rows_LX: Tensor, topology: Topology, size: int, step: int) -> None:
        super().__init__(comm.learners, lambda learner: topology.round(step, learner, comm.num_learners))
        self._comm, self._size, self._step = comm, size, step
        num = rows_LX.shape[1]
        self._length = -(-num // size)
        self._begins = [min(place * self._length, num - self._length) for place in range(size)]
        begins = [self._begins[learner % size] for learner in comm.learners]
        parts = [row[begin : begin + self._length] for row, begin in zip(rows_LX, begins, strict=True)]
        self._parts_LY = torch.stack(parts)
        self._between = comm.exchange(self._parts_LY, topology, step)

    @override
    def received(self) -> Mapping[int, Tensor]:
        return self._between.received()  # parts of rows

    @override
    def mixture(self) -> WeightAverage:
        self._between.mixture().apply_(self._parts_LY)
        parts = self._comm.exchange(self._parts_LY, WithinGroups(self._size), self._step).rows(self._parts_LY)
        firsts = [learner - learner % self._size for learner in self.learners]
        return _Gathered([[(begin, parts[a + i]) for i, begin in enumerate(self._begins)] for a in firsts])


@dataclass(frozen=True)
class _Gathered(WeightAverage):
    """The averaged columns of each row, after their first column."""

    parts: list[list[tuple[int, Tensor]]]

    @override
    def apply_(self, weights_LP: Tensor) -> None:
        for row, parts in zip(weights_LP, self.parts, strict=True):
            for begin, part in parts:
                row[begin : begin + len(part)] = part
