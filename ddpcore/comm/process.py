"""Learners on real ranks, over a ``torch.distributed`` process group (NCCL or gloo): one on each, or several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ddpcore.comm.base import Communicator, Done, Exchange, PeerExchange, Work
from ddpcore.comm.errors import Call, at, size_of
from ddpcore.comm.reductions import sum_of
from ddpcore.comm.traffic import average_bytes, is_gathered, sum_bytes
from ddpcore.ops import StackedMixture, WeightAverage
from ddpcore.ops.dtypes import wide
from ddpcore.topology.base import Topology
from ddpcore.topology.rounds import Round


def default_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or the default one.

    Raises:
        ValueError: torch.distributed is not initialised.
    """
    if not dist.is_initialized():
        raise ValueError(
            "torch.distributed is not initialised: start the script with torchrun and call "
            "torch.distributed.init_process_group(), or pass learners= for virtual learners"
        )
    chosen = dist.group.WORLD if group is None else group
    assert chosen is not None
    return chosen


class ProcessGroupCommunicator(Communicator):
    """Rank r of the group holds learners r L to (r + 1) L - 1. Rows travel once to each rank that needs them.

    Args:
        group: a process group; None is the default one, which must be initialised.
        num_rows: L, learners of each rank. More than one are virtual learners.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, num_rows: int = 1) -> None:
        if num_rows < 1:
            raise ValueError(f"learners is {num_rows}: it must be at least 1")
        self.group = default_group(group)
        self.rank, self.num_ranks, self.num_rows = dist.get_rank(self.group), dist.get_world_size(self.group), num_rows
        self.num_learners = num_rows * self.num_ranks
        self.learners = range(self.rank * num_rows, (self.rank + 1) * num_rows)
        backend = dist.get_backend(self.group)
        virtual = f"{num_rows} virtual learners on each of {self.num_ranks} ranks, {backend}"
        self.description = f"torch.distributed, {backend}" if num_rows == 1 else virtual
        self._is_gloo = backend == "gloo"
        self._buffers: dict[tuple[int, int, int, torch.dtype, torch.device], Tensor] = {}
        self._busy: set[int] = set()  # sets of receive buffers that a transfer in progress writes to

    @override
    def broadcast_(self, rows: Tensor) -> None:
        first = rows[0].contiguous()
        with Call(self.group, f"the broadcast of {size_of(first)}"):
            dist.broadcast(first, group=self.group, group_src=0)
        if self.num_rows > 1 or first.data_ptr() != rows.data_ptr():
            rows.copy_(first.expand_as(rows))

    @override
    def average_(self, rows: Tensor, step: int | None = None) -> Work:
        """A sum, divided afterwards: not every gloo offers the average.

        An all-reduce carries rows of 16 bits as fp32, because it rounds at every hop. Gathered rows are added in
        ascending order, as those of virtual learners are.
        """
        if self.num_learners == 1:
            return Done()
        self.bytes_sent += (average_bytes if self._is_gloo else sum_bytes)(rows[0], self.num_learners)
        call = Call(self.group, f"an average of {size_of(rows[0])}{at(step)}")
        if self._is_gloo and is_gathered(rows[0], self.num_learners):
            everyone = rows.new_empty((self.num_ranks, self.num_rows, rows.shape[1]))
            with call:
                work = dist.all_gather(list(everyone), rows.contiguous(), group=self.group, async_op=True)
            return _Average(work, call, rows, everyone.flatten(0, 1), self.num_learners)
        # One fp32 row is summed where it lies: columns of a single row are one contiguous piece.
        total = rows[0].to(wide(rows.dtype)) if self.num_rows == 1 else sum_of(rows)
        with call:
            work = dist.all_reduce(total, group=self.group, async_op=True)
        return _Average(work, call, rows, total[None], self.num_learners)

    @override
    def exchange(self, weights_LP: Tensor, topology: Topology, step: int) -> Exchange:
        """Sends read the weights where they lie; one receive buffer a neighbour is kept."""
        rounds = {learner: topology.round(step, learner, self.num_learners) for learner in self.learners}
        slot = next(number for number in count() if number not in self._busy)
        self._busy.add(slot)
        readers = ((reader, row) for row, round_ in enumerate(rounds.values()) for reader in round_.destinations)
        sends = sorted({(reader // self.num_rows, row) for reader, row in readers if reader not in self.learners})
        sources = {source for round_ in rounds.values() for source in round_.sources if source not in self.learners}
        received = {source: self._buffer(slot, number, weights_LP[0]) for number, source in enumerate(sorted(sources))}
        # One order on both sides of every pair of ranks: sends before receives, each by ascending learner.
        transfers = [dist.P2POp(dist.isend, weights_LP[row], group=self.group, group_peer=to) for to, row in sends]
        transfers += [
            dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=source // self.num_rows)
            for source, buffer in received.items()
        ]
        peers = [to for to, _ in sends] + [source // self.num_rows for source in received]
        call = Call(self.group, f"the exchange of {size_of(weights_LP[0])} at step {step}", peers)
        with call:
            works = dist.batch_isend_irecv(transfers) if transfers else []
        self.bytes_sent += len(sends) * weights_LP[0].nbytes // self.num_rows
        return _RankExchange(works, call, rounds, received, weights_LP.device, lambda: self._busy.discard(slot))

    @override
    def gather(self, values: Tensor) -> Tensor:
        result = values.new_empty((self.num_learners, *values.shape[1:]))
        with Call(self.group, f"the gathering of {size_of(values)}"):
            dist.all_gather(list(result.split(self.num_rows)), values.contiguous(), group=self.group)
        return result

    def _buffer(self, slot: int, number: int, like: Tensor) -> Tensor:
        """Kept for each size: weights, and what a policy averages beside them, take turns."""
        key = (slot, number, like.numel(), like.dtype, like.device)
        if key not in self._buffers:
            self._buffers[key] = torch.empty_like(like)
        return self._buffers[key]


class _Average(Work):
    def __init__(self, work: dist.Work, call: Call, rows: Tensor, terms: Tensor, num_learners: int) -> None:
        self._work, self._call, self._rows, self._terms, self._num_learners = work, call, rows, terms, num_learners

    @override
    def wait(self) -> None:
        with self._call:
            self._work.wait()
        if len(self._terms) == 1:  # a sum already, often in the place of the row
            mean = self._terms[0].div_(self._num_learners)
        else:
            mean = sum_of(self._terms).div_(self._num_learners)
        if mean.data_ptr() != self._rows.data_ptr():
            self._rows.copy_(mean)


class _RankExchange(PeerExchange):
    def __init__(
        self,
        works: Sequence[dist.Work],
        call: Call,
        rounds: Mapping[int, Round],
        buffers: Mapping[int, Tensor],
        device: torch.device,
        free: Callable[[], None],
    ) -> None:
        super().__init__(tuple(rounds), rounds.__getitem__)
        self._device = device
        self._works, self._call, self._buffers, self._free = works, call, buffers, free

    @override
    def received(self) -> Mapping[int, Tensor]:
        with self._call:
            for work in self._works:
                work.wait()
        self._free()
        return self._buffers

    @override
    def mixture(self) -> WeightAverage:
        if len(self.learners) == 1:
            return super().mixture()
        others = self.received()
        column_of = {learner: column for column, learner in enumerate([*self.learners, *others])}
        offsets, columns, values = [0], [], []
        for learner in self.learners:
            round_ = self.round_of(learner)
            columns += [column_of[learner], *(column_of[source] for source in round_.sources)]
            values += [round_.self_weight, *round_.weights]
            offsets.append(len(columns))
        weights = torch.tensor(values, dtype=torch.float32, device=self._device)
        offsets_, columns_ = (torch.tensor(numbers, device=self._device) for numbers in (offsets, columns))
        return StackedMixture(list(others.values()), offsets_, columns_, weights)

    @override
    def abandon(self) -> None:
        self.received()
