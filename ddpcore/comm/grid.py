"""Several virtual learners on each of several real ranks: rows of one buffer here, a process group in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor

from ddpcore import ops
from ddpcore.comm.base import (
    Communicator,
    Decode,
    Done,
    Exchange,
    Work,
    at,
    average_bytes,
    correction,
    is_small,
    size_of,
)
from ddpcore.comm.process import Call, default_group
from ddpcore.comm.sums import sum_of
from ddpcore.ops import Mixture
from ddpcore.topology import Round, Topology


class GridCommunicator(Communicator):
    """Rank r holds learners r L to (r + 1) L - 1. Rows travel once to each rank that needs them.

    Args:
        num_rows: L, learners of each rank.
        group: a process group; None is the default one, which must be initialised.
    """

    def __init__(self, num_rows: int, group: dist.ProcessGroup | None = None) -> None:
        if num_rows < 1:
            raise ValueError(f"learners is {num_rows}: it must be at least 1")
        self.group = default_group(group)
        self.rank, self.num_ranks, self.num_rows = dist.get_rank(self.group), dist.get_world_size(self.group), num_rows
        self.num_learners = num_rows * self.num_ranks
        self.learners = range(self.rank * num_rows, (self.rank + 1) * num_rows)
        backend = dist.get_backend(self.group)
        self._is_gloo = backend == "gloo"
        self.description = f"{num_rows} virtual learners on each of {self.num_ranks} ranks, {backend}"
        self._received: dict[tuple[int, int, int, torch.dtype], Tensor] = {}
        self._places: set[int] = set()  # sets of receive buffers that a transfer under way writes to

    def broadcast_(self, rows: Tensor) -> None:
        """See :class:`Communicator`."""
        first = rows[0].contiguous()
        with Call(self.group, f"the broadcast of {size_of(first)}"):
            dist.broadcast(first, group=self.group, group_src=0)
        rows.copy_(first.expand_as(rows))

    def average_(self, rows: Tensor, step: int | None = None) -> Work:
        """See :class:`Communicator`. Small rows are gathered and added in ascending order, as all virtual ones are."""
        if self.num_learners == 1:
            return Done()
        self.bytes_sent += average_bytes(rows[0], self.num_learners)
        call = Call(self.group, f"an average of {size_of(rows[0])}{at(step)}")
        if self._is_gloo and is_small(rows[0], self.num_learners):
            everyone = rows.new_empty((self.num_ranks, self.num_rows, rows.shape[1]))
            with call:
                work = dist.all_gather(list(everyone), rows.contiguous(), group=self.group, async_op=True)
            return _Mean(work, call, rows, everyone.flatten(0, 1), self.num_learners)
        total = sum_of(rows)
        with call:
            work = dist.all_reduce(total, group=self.group, async_op=True)
        return _Mean(work, call, rows, total[None], self.num_learners)

    def exchange(self, weights_LP: Tensor, topology: Topology, step: int) -> Exchange:
        """See :class:`Communicator`."""
        plans = [topology.round(step, learner, self.num_learners) for learner in self.learners]
        place = next(number for number in count() if number not in self._places)
        self._places.add(place)
        sends = sorted(
            {
                (reader // self.num_rows, row)
                for row, plan in enumerate(plans)
                for reader in plan.destinations
                if reader not in self.learners
            }
        )
        sources = sorted({source for plan in plans for source in plan.sources if source not in self.learners})
        received = {source: self._buffer(place, slot, weights_LP[0]) for slot, source in enumerate(sources)}
        # One order on both sides of every pair of ranks: ascending learners.
        transfers = [dist.P2POp(dist.isend, weights_LP[row], group=self.group, group_peer=to) for to, row in sends]
        transfers += [
            dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=source // self.num_rows)
            for source, buffer in received.items()
        ]
        peers = [to for to, _ in sends] + [source // self.num_rows for source in received]
        call = Call(self.group, f"the exchange of {size_of(weights_LP[0])} at step {step}", peers)
        with call:
            works = dist.batch_isend_irecv(transfers) if transfers else []
        self.bytes_sent += len(sends) * weights_LP[0].numel() * weights_LP.element_size() // self.num_rows
        held = range(self.learners[0], self.learners[-1] + 1)
        return _GridExchange(works, call, weights_LP, held, plans, received, lambda: self._places.discard(place))

    def gather(self, values: Tensor) -> Tensor:
        """See :class:`Communicator`."""
        result = values.new_empty((self.num_learners, *values.shape[1:]))
        with Call(self.group, f"the gathering of {size_of(values)}"):
            dist.all_gather(list(result.split(self.num_rows)), values.contiguous(), group=self.group)
        return result

    def _buffer(self, place: int, slot: int, like: Tensor) -> Tensor:
        key = (place, slot, like.numel(), like.dtype)
        if key not in self._received:
            self._received[key] = torch.empty_like(like)
        return self._received[key]


class _Mean(Work):
    def __init__(self, work: dist.Work, call: Call, rows: Tensor, terms: Tensor, num_learners: int) -> None:
        self._work, self._call, self._rows, self._terms, self._num_learners = work, call, rows, terms, num_learners

    def wait(self) -> None:
        with self._call:
            self._work.wait()
        self._rows.copy_(sum_of(self._terms).div_(self._num_learners))


class _GridExchange(Exchange):
    def __init__(
        self,
        works: Sequence[dist.Work],
        call: Call,
        weights_LP: Tensor,
        held: range,
        plans: Sequence[Round],
        received: dict[int, Tensor],
        arrived: Callable[[], None],
    ) -> None:
        self._works, self._call, self._arrived = works, call, arrived
        self._weights_LP, self._held, self._plans, self._received = weights_LP, held, plans, received

    def mix_(self) -> Tensor:
        self._wait()
        column = {learner: row for row, learner in enumerate([*self._held, *self._received])}
        offsets, columns, values = [0], [], []
        for learner, plan in zip(self._held, self._plans, strict=True):
            columns += [column[learner], *(column[source] for source in plan.sources)]
            values += [plan.self_weight, *plan.weights]
            offsets.append(len(columns))
        device, others = self._weights_LP.device, list(self._received.values())
        rows = torch.tensor(offsets, device=device), torch.tensor(columns, device=device)
        weights = torch.tensor(values, dtype=torch.float32, device=device)
        return ops.mix_stacked_(self._weights_LP, others, *rows, weights)[:, None]

    def mixture(self) -> Mixture | None:
        return None

    def correct_(self, weights_LP: Tensor, published_LP: Tensor, factor: float, decode: Decode | None = None) -> None:
        self._wait()
        rows = {learner: published_LP[row] for row, learner in enumerate(self._held)}
        for learner, row in self._received.items():
            rows[learner] = row if decode is None else decode(learner, row)
        for weights, learner, plan in zip(weights_LP, self._held, self._plans, strict=True):
            mixture = correction(plan, rows[learner], [rows[source] for source in plan.sources], factor)
            ops.mix_(weights, mixture.peers, mixture.self_weight, mixture.peer_weights)

    def correction(self, published_LP: Tensor, factor: float, decode: Decode | None = None) -> Mixture | None:
        return None

    def abandon(self) -> None:
        self._wait()

    def _wait(self) -> None:
        with self._call:
            for work in self._works:
                work.wait()
        self._arrived()
