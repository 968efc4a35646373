"""Real learners: one a process, over a ``torch.distributed`` process group (NCCL or gloo)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
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
    sum_bytes,
)
from ddpcore.comm.sums import sum_of
from ddpcore.dtypes import wide
from ddpcore.ops import Mixture
from ddpcore.topology import Round, Topology


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


class Call(AbstractContextManager[None]):
    """Gives errors of a process group a name: which call, on which rank, with whom. Can be entered several times.

    Args:
        group: the process group.
        what: the call, such as ``the exchange of 5000 float32 at step 3``.
        peers: ranks of the group that take part; None are all.
    """

    def __init__(self, group: dist.ProcessGroup, what: str, peers: Iterable[int] | None = None) -> None:
        self._rank = dist.get_rank(group)
        others = range(dist.get_world_size(group)) if peers is None else peers
        self._what, self._peers = what, sorted({rank for rank in others if rank != self._rank})

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            why = str(error).partition("\n")[0]
            raise RuntimeError(
                f"{self._what} failed on rank {self._rank}: a rank of {self._peers} died, left, or did not come in "
                f"time: see which rank failed first, and why ({why})"
            ) from error


class ProcessGroupCommunicator(Communicator):
    """Learner j is rank j of the group.

    Args:
        group: a process group; None is the default one, which must be initialised.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = default_group(group)
        self.rank = dist.get_rank(self.group)
        self.num_learners = dist.get_world_size(self.group)
        self.learners = (self.rank,)
        backend = dist.get_backend(self.group)
        self.description = f"torch.distributed, {backend}"
        self._is_gloo = backend == "gloo"
        self._received: dict[tuple[int, int, int, torch.dtype, torch.device], Tensor] = {}
        self._places: set[int] = set()  # sets of receive buffers that a transfer under way writes to

    def broadcast_(self, rows: Tensor) -> None:
        """See :class:`Communicator`."""
        if self.num_learners > 1:
            with Call(self.group, f"the broadcast of {size_of(rows)}"):
                dist.broadcast(rows, group=self.group, group_src=0)

    def average_(self, rows: Tensor, step: int | None = None) -> Work:
        """See :class:`Communicator`. A sum, divided afterwards: not every gloo knows the average.

        An all-reduce carries rows of 16 bits as fp32, for it rounds at every hop.
        """
        if self.num_learners == 1:
            return Done()
        call = Call(self.group, f"an average of {size_of(rows)}{at(step)}")
        row = rows[0]  # a learner has one, so columns of it are one contiguous run
        if self._is_gloo and is_small(row, self.num_learners):
            self.bytes_sent += average_bytes(row, self.num_learners)
            everyone = rows.new_empty((self.num_learners, len(row)))
            with call:
                work = dist.all_gather(list(everyone), row, group=self.group, async_op=True)
            return _SumOfAll(work, call, row, everyone)
        self.bytes_sent += sum_bytes(row, self.num_learners)
        total = row.to(wide(row.dtype))  # the row itself but for 16 bits
        with call:
            work = dist.all_reduce(total, group=self.group, async_op=True)
        return _Average(work, call, row, total, self.num_learners)

    def exchange(self, weights_LP: Tensor, topology: Topology, step: int) -> Exchange:
        """See :class:`Communicator`. Sends go straight from the weights; one receive buffer a neighbour is kept."""
        plan = topology.round(step, self.rank, self.num_learners)
        weights = weights_LP[0]
        place = next(number for number in count() if number not in self._places)
        self._places.add(place)
        peers = [self._buffer(place, slot, weights) for slot in range(len(plan.sources))]
        # One fixed order on every rank: sends before receives, each by ascending rank.
        sends = [dist.P2POp(dist.isend, weights, group=self.group, group_peer=peer) for peer in plan.destinations]
        receives = [
            dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=peer)
            for peer, buffer in zip(plan.sources, peers, strict=True)
        ]
        text = f"the exchange of {size_of(weights)} at step {step}"
        call = Call(self.group, text, [*plan.sources, *plan.destinations])
        with call:
            works = dist.batch_isend_irecv(sends + receives) if sends or receives else []
        self.bytes_sent += len(sends) * weights.numel() * weights.element_size()
        return _PeerExchange(works, call, weights, plan, peers, lambda: self._places.discard(place))

    def gather(self, values: Tensor) -> Tensor:
        """See :class:`Communicator`."""
        result = values.new_empty((self.num_learners, *values.shape[1:]))
        with Call(self.group, f"the gathering of {size_of(values)}"):
            dist.all_gather(list(result.split(1)), values.contiguous(), group=self.group)
        return result

    def _buffer(self, place: int, slot: int, like: Tensor) -> Tensor:
        """Kept for each size: weights and what a policy averages beside them take turns."""
        key = (place, slot, like.numel(), like.dtype, like.device)
        if key not in self._received:
            self._received[key] = torch.empty_like(like)
        return self._received[key]


class _Average(Work):
    def __init__(self, work: dist.Work, call: Call, row: Tensor, total: Tensor, num_learners: int) -> None:
        self._work, self._call, self._row, self._total, self._num_learners = work, call, row, total, num_learners

    def wait(self) -> None:
        with self._call:
            self._work.wait()
        self._total.div_(self._num_learners)
        if self._total is not self._row:
            self._row.copy_(self._total)


class _SumOfAll(Work):
    def __init__(self, work: dist.Work, call: Call, row: Tensor, everyone: Tensor) -> None:
        self._work, self._call, self._row, self._everyone = work, call, row, everyone

    def wait(self) -> None:
        with self._call:
            self._work.wait()
        self._row.copy_(sum_of(self._everyone).div_(len(self._everyone)))


class _PeerExchange(Exchange):
    def __init__(
        self,
        works: Sequence[dist.Work],
        call: Call,
        weights: Tensor,
        plan: Round,
        peers: Sequence[Tensor],
        arrived: Callable[[], None],
    ) -> None:
        self._works, self._call, self._arrived = works, call, arrived
        self._weights, self._plan, self._peers = weights, plan, peers

    def mix_(self) -> Tensor:
        mixture = self.mixture()
        return ops.mix_(self._weights, mixture.peers, mixture.self_weight, mixture.peer_weights)[None]

    def mixture(self) -> Mixture:
        self._wait()
        return Mixture(self._peers, self._plan.self_weight, self._plan.weights)

    def correct_(self, weights_LP: Tensor, published_LP: Tensor, factor: float, decode: Decode | None = None) -> None:
        mixture = self.correction(published_LP, factor, decode)
        ops.mix_(weights_LP[0], mixture.peers, mixture.self_weight, mixture.peer_weights)

    def correction(self, published_LP: Tensor, factor: float, decode: Decode | None = None) -> Mixture:
        self._wait()
        peers = self._peers
        if decode is not None:
            peers = [decode(source, peer) for source, peer in zip(self._plan.sources, peers, strict=True)]
        return correction(self._plan, published_LP[0], peers, factor)

    def abandon(self) -> None:
        self._wait()

    def _wait(self) -> None:
        with self._call:
            for work in self._works:
                work.wait()
        self._arrived()
