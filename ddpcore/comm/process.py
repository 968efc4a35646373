"""Learners on real ranks, over a ``torch.distributed`` process group (NCCL or gloo): one or more on each rank."""

import secrets
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from typing_extensions import override

from ddpcore.comm import groups
from ddpcore.comm.base import Communicator, Exchange, LiveWeights, PairMean, Work
from ddpcore.comm.groups import Call, at, bytes_of, check_has_average, meet, size_of
from ddpcore.comm.reductions import all_reduce_bytes, average_bytes, is_gathered, sum_of
from ddpcore.comm.served import ServedLiveWeights
from ddpcore.comm.virtual import csr_of
from ddpcore.ops import StackedMixture, WeightAverage, average_
from ddpcore.ops.library import is_narrow
from ddpcore.runtime import launch
from ddpcore.topology.base import Topology
from ddpcore.topology.rounds import Round, mixing_matrix


def _average_by_shares(row: Tensor, group: dist.ProcessGroup, call: Call) -> Work:
    """Average a row ``[P]`` of 16 bits. The wait does the second half, so all ranks must wait in one order."""
    num, numel, width = group.size(), row.numel(), row.itemsize
    share = -(-numel // num)
    sizes = [min(share, max(0, numel - rank * share)) for rank in range(num)]
    own = sizes[group.rank()]
    received, sent = row.new_empty(num * own), row.contiguous()
    given = [size * width for size in sizes]
    with call:
        work = group.alltoall_base(bytes_of(received), bytes_of(sent), [own * width] * num, given)

    def end() -> None:
        nonlocal sent
        call.wait(work, row)
        del sent  # it was needed until it has arrived
        mean = row.new_empty(share)  # the last share may be shorter, and the gathering takes equal ones
        mean[:own] = sum_of(received.view(num, own)).div_(num)
        everyone = row.new_empty(num * share)
        with call:
            gathering = group._allgather_base(bytes_of(everyone), bytes_of(mean))
        call.wait(gathering, row)
        row.copy_(everyone[:numel])

    return Work(end)


_Transfers = dict[int, tuple[list[tuple[str, list[int], dist.Work]], list[Tensor]]]
# Exchanges that nothing has waited for, by group: their works, with words for errors and the peers, and the tensors
# that these use. A training loop may end in the middle of an exchange. If its works were freed then, gloo would read no
# further message of the peer. They go with the group, so nothing here refers to it.
_unfinished: weakref.WeakKeyDictionary[dist.ProcessGroup, _Transfers] = weakref.WeakKeyDictionary()
_numbers = count()


class ProcessGroupCommunicator(Communicator):
    """Connects the ranks of a process group. Rank r holds learners r L to (r + 1) L - 1.

    Args:
        group: a process group; None is the default group, which must be initialised.
        num_rows: L, learners of each rank. If it is above 1 they are virtual learners.
        timeout: seconds that a living rank may let the others wait.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, num_rows: int = 1, timeout: float = launch.TIMEOUT_SECONDS
    ) -> None:
        launch.check_timeout(timeout)
        launch.end_with_torchrun()
        if num_rows < 1:
            raise ValueError(f"learners is {num_rows}: it must be at least 1")
        self.group = groups.default_group(group)
        self.rank, self.num_ranks, self.num_rows = dist.get_rank(self.group), dist.get_world_size(self.group), num_rows
        self.num_learners, self.timeout = num_rows * self.num_ranks, timeout
        self.learners = range(self.rank * num_rows, (self.rank + 1) * num_rows)
        self.transport = "pg" if num_rows == 1 else "grid"
        self._backends = groups.backends_of(self.group)
        kind = f"{num_rows} virtual learners on each of {self.num_ranks} ranks" if num_rows > 1 else "torch.distributed"
        self.description = ", ".join((kind, *dict.fromkeys(self._backends.values())))
        self._buffers: dict[tuple[int, int, int, torch.dtype, torch.device], Tensor] = {}
        self._groups: dict[int, tuple[dist.ProcessGroup, range, str]] = {}  # of this rank by size, and ranks and words
        self._busy: set[int] = set()  # receive buffers of exchanges in progress, by slot
        if self.num_ranks > 1 and "gloo" in self._backends.values() and self.group not in groups.CHANNELS:
            devices = {device: backend for device, backend in self._backends.items() if backend == "gloo"}
            groups.CHANNELS[self.group] = self._own_group(range(self.num_ranks), devices, "the set-up of messages")
        self._own = groups.CHANNELS.get(self.group, self.group)
        self._unfinished = _unfinished.setdefault(self.group, {})
        for number in list(self._unfinished):  # of earlier distribute() calls; all ranks have begun these
            self._finish(number)

    def _finish(self, number: int) -> None:
        """Wait for an exchange, unless that was done: gloo would wait for a second message."""
        works, moved = self._unfinished.pop(number, ([], []))
        for what, peers, work in works:
            self._call(what, moved[0], peers).wait(work, moved[0])

    def _call(self, what: str, moved: Tensor, peers: Iterable[int] | None = None) -> Call:
        return Call(self._channel(moved), what, peers, self.timeout)

    def _channel(self, moved: Tensor) -> dist.ProcessGroup:
        """The group that moves a tensor."""
        return self._own if self._backends[moved.device.type] == "gloo" else self.group

    @override
    def broadcast_(self, rows: Tensor) -> None:
        first = rows[0].contiguous()
        with self._call(f"the broadcast of {size_of(first)}", first):
            self._channel(first).broadcast(bytes_of(first), 0).wait()
        if self.num_rows > 1 or first.data_ptr() != rows.data_ptr():
            rows.copy_(first.expand_as(rows))

    @override
    def form_groups(self, size: int) -> None:
        """Connect the ranks of this rank's group, if it has several ranks and not all of them."""
        if size == self.num_learners or self.num_rows % size == 0:
            return
        num = size // self.num_rows
        ranks = range(first := self.rank // num * num, first + num)
        group = self._own_group(ranks, self._backends, f"the set-up of groups of {size}")
        self._groups[size] = group, ranks, f" in a group of {size}"

    def _own_group(self, ranks: range, backends: Mapping[str, str], what: str) -> dist.ProcessGroup:
        """A new group of these ranks, with this rank. All ranks call it, each with the ranks of its own group."""
        token = groups.gather_objects(self.group, secrets.token_hex(8), what, self.timeout)[0]
        client = groups.own_client(c10d._get_process_group_store(self.group))
        store = dist.PrefixStore(f"ddpcore/{token}/{ranks[0]}", client)
        with Call(self.group, what, ranks, self.timeout):
            group = groups.own_group(backends, store, self.rank - ranks[0], len(ranks), self.timeout)
        group.set_timeout(timedelta(seconds=self.timeout))
        return group

    @override
    def live(self, weights_LP: Tensor, rule: PairMean | None = None) -> LiveWeights:
        """A thread of each rank answers the others, over a group of gloo."""
        if self.num_rows > 1 or self.num_ranks == 1:
            return super().live(weights_LP, rule)
        group = self._own_group(range(self.num_ranks), {"cpu": "gloo"}, "the set-up of weights that others change")
        return ServedLiveWeights(group, weights_LP, self.timeout, rule or PairMean())

    @override
    def average_(self, rows: Tensor, step: int | None = None, size: int | None = None) -> Work:
        """Sum over the ranks of a group and then divide, because gloo may lack the average.

        An all-reduce would round 16 bits at every hop. So one row of 16 bits is averaged by shares, and the sum of
        several rows is sent as fp32. Gathered rows are added in ascending order, as the rows of virtual learners are.
        """
        check_has_average(rows)
        if (num := size or self.num_learners) == 1:
            return Work()
        if num < self.num_learners and self.num_rows % num == 0:  # within a rank nothing is sent
            average_([rows], num)
            return Work()
        everyone = self._channel(rows), range(self.num_ranks), ""
        group, ranks, whose = everyone if num == self.num_learners else self._groups[num]
        call = self._call(f"an average{whose} of {size_of(rows[0])}{at(step)}", rows, ranks)
        if step is None:
            with call:
                meet(group, call.what)
        if self._backends[rows.device.type] == "gloo" and is_gathered(rows[0], num):
            gathered = rows.new_empty((len(ranks), self.num_rows, rows.shape[1]))
            self.bytes_sent += average_bytes(rows[0], num)
            with call:
                work = group.allgather([[_real(one) for one in gathered]], [_real(rows.contiguous())])
            terms = gathered.flatten(0, 1)
        else:
            # A single row is summed in place: its columns are contiguous.
            total = rows[0] if self.num_rows == 1 else sum_of(rows)
            self.bytes_sent += all_reduce_bytes(total.nbytes, num)
            if is_narrow(total.dtype):
                return _average_by_shares(total, group, call)
            with call:
                work = group.allreduce([_real(total)])
            terms = total[None]

        def end() -> None:
            call.wait(work, rows)
            mean = (terms[0] if len(terms) == 1 else sum_of(terms)).div_(num)  # one term is the sum already
            if mean.data_ptr() != rows.data_ptr():
                rows.copy_(mean)

        return Work(end)

    @override
    def exchange(self, weights_LP: Tensor, topology: Topology, step: int, *, in_place: bool = False) -> Exchange:
        """Send from ``weights_LP`` without a copy, and receive into one buffer for each neighbour, which is kept."""
        rounds = {learner: topology.round(step, learner, self.num_learners) for learner in self.learners}
        slot = next(number for number in count() if number not in self._busy)
        self._busy.add(slot)
        readers = ((reader, row) for row, round_ in enumerate(rounds.values()) for reader in round_.destinations)
        sends = sorted({(reader // self.num_rows, row) for reader, row in readers if reader not in self.learners})
        sources = {source for round_ in rounds.values() for source in round_.sources if source not in self.learners}
        received = {source: self._buffer(slot, number, weights_LP[0]) for number, source in enumerate(sorted(sources))}
        # Receives first: gloo begins to send when it hears of the other's receive, which would wait behind sent bytes.
        group, receives = self._channel(weights_LP), [(row, one // self.num_rows) for one, row in received.items()]
        sent = [(weights_LP[row], to) for to, row in sends]
        peers = [peer for _, peer in receives + sent]
        what = f"the exchange of {size_of(weights_LP[0])} at step {step}"
        with self._call(what, weights_LP, peers):
            if group is self.group and receives + sent:  # NCCL begins them together
                transfers = [dist.P2POp(dist.irecv, row, group=group, group_peer=peer) for row, peer in receives]
                transfers += [dist.P2POp(dist.isend, row, group=group, group_peer=peer) for row, peer in sent]
                works = dist.batch_isend_irecv(transfers)
            else:
                works = [group.recv([_real(row)], peer, 0) for row, peer in receives]
                works += [group.send([_real(row)], peer, 0) for row, peer in sent]
        # gloo has a work for each message, so its error names one peer; NCCL has one work for all.
        peers_of = [[peer] if len(works) == len(peers) else peers for peer in peers[: len(works)]]
        self.bytes_sent += len(sends) * weights_LP[0].nbytes // self.num_rows
        begun = [(what, whom, work) for whom, work in zip(peers_of, works, strict=True)]
        self._unfinished[number := next(_numbers)] = begun, [weights_LP, *received.values()]

        def wait() -> None:
            self._finish(number)
            self._busy.discard(slot)

        return _RankExchange(rounds, received, weights_LP.device, wait)

    @override
    def gather(self, values: Tensor, step: int | None = None) -> Tensor:
        result = values.new_empty((self.num_learners, *values.shape[1:]))
        sent, received = bytes_of(values.contiguous()), bytes_of(result).view(self.num_ranks, -1)
        with self._call(what := f"the gathering of {size_of(values)}{at(step)}", values):
            if step is None:
                meet(self._channel(values), what)
            self._channel(values).allgather([[*received]], [sent]).wait()
        return result

    def _buffer(self, slot: int, number: int, like: Tensor) -> Tensor:
        """One buffer for each size, because policies exchange other rows between two exchanges of weights."""
        key = (slot, number, like.numel(), like.dtype, like.device)
        if key not in self._buffers:
            self._buffers[key] = torch.empty_like(like)
        return self._buffers[key]


def _real(numbers: Tensor) -> Tensor:
    """The same memory, with a complex number as two real ones: backends add no others."""
    return torch.view_as_real(numbers) if numbers.is_complex() else numbers


class _RankExchange(Exchange):
    def __init__(
        self, rounds: Mapping[int, Round], buffers: Mapping[int, Tensor], device: torch.device, wait: Callable[[], None]
    ) -> None:
        super().__init__(tuple(rounds), rounds.__getitem__)
        self._buffers, self._device, self._wait = buffers, device, wait

    @override
    def received(self) -> Mapping[int, Tensor]:
        self._wait()
        return self._buffers

    @override
    def mixture(self) -> WeightAverage:
        if len(self.learners) == 1:
            return super().mixture()
        others = self.received()
        column_of = {learner: column for column, learner in enumerate([*self.learners, *others])}
        given = map(self.round_of, self.learners)
        rounds = [replace(one, sources=tuple(column_of[source] for source in one.sources)) for one in given]
        return StackedMixture(list(others.values()), *csr_of(mixing_matrix(rounds), self._device))
