"""Learners on real ranks that may die: each operation is done by the members that are left, and the run goes on.

Every operation between ranks is one step of one protocol: a member publishes a row, waits until every other member has
published its own or is dead, and reads the rows that it needs. Nothing of a member changes before that. So the members
of an operation are those that published, all of them see the same ones, and an operation that a death interrupts is
done again by the members that are left, from the same rows.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ddpcore.comm.agreement import first_difference
from ddpcore.comm.base import Communicator, Exchange, Work
from ddpcore.comm.fabric import Fabric, Members, Operation
from ddpcore.comm.groups import Fact, at, bytes_of, check_has_average, size_of
from ddpcore.comm.membership import Change, Membership
from ddpcore.comm.reductions import CHUNK, sum_of
from ddpcore.topology.base import Topology
from ddpcore.topology.rounds import Round


class ElasticCommunicator(Communicator):
    """Connects the ranks that are left. Learner j is member j, in the order of ids.

    A death costs nothing that the living hold: the operation that it interrupts is done again without the dead. Each
    operation waits for all members, not only for neighbours: that is how all of them agree on who is left.

    Averages add the rows of all members on each rank, in ascending order, so they have the bits of virtual learners.
    """

    membership: Membership

    def __init__(self, fabric: Fabric, *, first: int = 0) -> None:
        self._fabric = fabric
        self.membership = Membership(fabric.members, first=first)
        self.num_operations = self.num_agreed = 0  # that began, and whose rows were used
        self._waiting: list[Operation] = []  # that began, and whose members are not known yet
        self._facts: list[Fact] | None = None  # what all members train; None: no rank can join
        self._num_requests = 0  # that were answered
        self._seen = -1  # operations that were over at the last look for a request

    def enter(self, facts: list[Fact]) -> None:
        """As a new rank: ask to join, and wait until the members let it in. They wait from then on.

        ValueError: the run trains something else, or cannot take another rank. RuntimeError: it does not answer.
        """
        roll = self._fabric.roll
        number = int(roll.store.add("joins", 1))  # of the request, from 1
        roll.write(f"request/{number}", {"facts": facts, "address": self._fabric.address})
        answer = roll.wait_for(f"answer/{number}")
        if "why" in answer:
            raise ValueError(f"the run does not let this rank join: {answer['why']}")
        ids = ("members", "lost", "joined")  # JSON has no tuples
        changes = [Change(**{**one, **{name: tuple(one[name]) for name in ids}}) for one in answer["changes"]]
        members = changes[-1].members
        self._fabric.join(answer["rank"], members, answer["position"])
        self.membership = Membership(members, first=self.membership.first, changes=changes)
        self.num_operations = self.num_agreed = answer["operation"]
        self._facts, self._num_requests = facts, number  # lets in further ranks

    @property
    def num_learners(self) -> int:  # type: ignore[override]
        """How many members are left."""
        return len(self.membership.members)

    @property
    def learners(self) -> Sequence[int]:  # type: ignore[override]
        """The position of this rank among the members."""
        return (self.membership.members.index(self._fabric.rank),)

    @property
    def description(self) -> str:  # type: ignore[override]
        """The transport, as text for people."""
        return f"{self._fabric.description}, goes on if ranks die"

    @property
    @override
    def member(self) -> int:
        return self._fabric.rank

    @property
    @override
    def waited(self) -> Mapping[int, float]:
        return self._fabric.waited

    @override
    def announce(self, facts: Sequence[Fact], first: int) -> None:
        self._facts = list(facts)
        self._fabric.roll.write("run", {"kind": self._fabric.kind, "first": first})

    @override
    def admit(self, step: int) -> int | None:
        """Ranks come in the order in which they asked, one at a time. All members take the same decision: the first of
        them writes into the store after which operation a rank joins, before it begins that operation, so all others
        read it when the operation is over.
        """
        if self._facts is None or self.num_agreed == self._seen:
            return None  # nothing was agreed on since the last look, so others may not see the same
        self._seen = self.num_agreed
        number, roll = self._num_requests + 1, self._fabric.roll
        try:
            after = roll.read(f"plan/{number}")
            is_first = self._fabric.rank == self.membership.members[0]
            if after is None and is_first and roll.asked >= number and roll.read(f"request/{number}") is not None:
                roll.write_once(f"plan/{number}", self.num_operations)
        except RuntimeError:  # the store is gone: nobody can join any more
            self._facts = None
            return None
        return None if after is None or self.num_agreed <= after else self._answer(number, step)

    def _answer(self, number: int, step: int) -> int | None:
        """Answer a request to join, on all members alike. Returns the id of the rank, or None for a refusal."""
        roll, members = self._fabric.roll, self.membership.members
        self._num_requests = number
        request, why = roll.read(f"request/{number}"), ""
        assert self._facts is not None
        if self.num_operations != self.num_agreed:
            why = "an exchange is in progress at the end of each step, as with staleness 1"
        elif dict(self._facts).get("scaler", "None") != "None":  # update() is still to come in this step
            why = "the scale of the gradient scaler may change before the next step, and the new rank has another one"
        elif difference := first_difference(self._facts, [(name, value) for name, value in request["facts"]]):
            what, here, there = difference
            why = f"{what} is {there} here and {here} in the run"
        if why:
            roll.write_once(f"answer/{number}", {"why": why})
            return None
        new = next(one for one in range(len(members) + 1) if one not in members)
        with_new = tuple(sorted((*members, new)))
        self.membership.change(with_new, self.num_operations, step)
        changes = [asdict(change) for change in self.membership.changes]
        places = {"operation": self.num_operations, "position": self._fabric.position()}
        roll.write_once(f"answer/{number}", {"rank": new, "changes": changes, **places})
        self._fabric.admit(new, request["address"], with_new)
        return new

    @override
    def hand_over(self, new: int, make: Callable[[], Tensor]) -> Tensor | None:
        while True:  # again if one dies meanwhile, because the state depends on who is left
            begun_with, source = self.membership.members, self.membership.source_for(new)
            blob = make() if self._fabric.rank == source else torch.empty(0, dtype=torch.uint8, device="cpu")
            sizes = self.gather(torch.tensor([[len(blob)]], device="cpu"))
            if self.membership.members != begun_with:
                continue
            if self._fabric.rank != source:
                blob = torch.zeros(int(sizes.sum()), dtype=torch.uint8, device="cpu")

            def round_of(members: Members, source: int = source) -> Round:
                sources = (source,) if source in members and self._fabric.rank == new else ()
                readers = (new,) if new in members and self._fabric.rank == source else ()
                return Round(0.0, sources, (0.0,) * len(sources), readers)

            operation = self._begin(f"the state of learner {source} for learner {new}", blob, None, round_of=round_of)
            self._agree(operation)
            is_whole, takes = self.membership.members == begun_with, self._fabric.rank == new
            result = self._fabric.rows(operation, [source])[source].clone() if is_whole and takes else None
            self._fabric.done(operation)
            if is_whole:
                return result

    def _begin(self, what: str, row: Tensor, step: int | None, **more: Any) -> Operation:
        members, more = self.membership.members, {"round_of": self._round_of_all, **more}
        operation = Operation(number=self.num_operations, what=what, step=step, row=row, members=members, **more)
        self.num_operations += 1
        self._fabric.begin(operation)
        self._waiting.append(operation)
        return operation

    def _agree(self, operation: Operation) -> Members:
        """Wait for all members, and take note of those that are gone, in the first operation without them."""
        while operation.come is None:
            first = self._waiting.pop(0)  # perhaps one that began before, and is used later
            first.come = self._fabric.agree(first)
            left = tuple(one for one in self.membership.members if one in first.come)
            if left != self.membership.members:
                self.membership.change(left, first.number, first.step)
                if self._fabric.rank == left[0]:
                    print(f"ddpcore: {self.membership.changes[-1]}", file=sys.stderr, flush=True)
        self.num_agreed += 1
        return operation.come

    def _round_of_all(self, members: Members) -> Round:
        others = tuple(one for one in members if one != self._fabric.rank)
        return Round(0.0, others, (0.0,) * len(others), others)

    def _rows_of(self, operation: Operation) -> list[Tensor]:
        """The rows of all members, in order, this rank's own among them."""
        members = self._agree(operation)
        rows = self._fabric.rows(operation, [one for one in members if one != self._fabric.rank])
        return [operation.row if one == self._fabric.rank else rows[one] for one in members]

    @override
    def exchange(self, weights_LP: Tensor, topology: Topology, step: int, *, in_place: bool = False) -> Exchange:
        row, rank = weights_LP[0], self._fabric.rank

        def round_of(members: Members) -> Round:
            return self.membership.round(topology, step, rank, members)

        what = f"the exchange of {size_of(row)} at step {step}"
        operation = self._begin(what, row, step, round_of=round_of, in_place=in_place)
        self.bytes_sent += len(round_of(operation.members).destinations) * row.nbytes
        return _ElasticExchange(self, operation)

    @override
    def average_(self, rows: Tensor, step: int | None = None, size: int | None = None) -> Work:
        if size is not None:
            self.form_groups(size)  # refuses
        check_has_average(rows)
        self.bytes_sent += (self.num_learners - 1) * rows.nbytes
        operation = self._begin(f"an average of {size_of(rows)}{at(step)}", rows[0], step)

        def end() -> None:
            members = self._rows_of(operation)
            for begin in range(0, rows.shape[1], CHUNK):
                columns = [row[begin : begin + CHUNK] for row in members]
                rows[0, begin : begin + CHUNK].copy_(sum_of(columns).div_(len(members)))
            self._fabric.done(operation)

        return Work(end)

    @override
    def broadcast_(self, rows: Tensor) -> None:
        operation = self._begin(f"the broadcast of {size_of(rows)}", bytes_of(rows), None)
        first = self._rows_of(operation)[0]
        if first is not operation.row:
            bytes_of(rows).copy_(first)
        self._fabric.done(operation)

    @override
    def gather(self, values: Tensor, step: int | None = None) -> Tensor:
        values = values.contiguous()
        operation = self._begin(f"the gathering of {size_of(values)}", bytes_of(values), None)
        gathered = torch.stack(self._rows_of(operation))
        self._fabric.done(operation)
        return gathered.view(-1).view(values.dtype).view(len(gathered), *values.shape[1:])


class _ElasticExchange(Exchange):
    def __init__(self, comm: ElasticCommunicator, operation: Operation) -> None:
        super().__init__((comm._fabric.rank,), lambda _: self._round)
        self._comm, self._operation = comm, operation
        self._round = Round(1.0, (), (), ())  # until the members are known

    @override
    def received(self) -> Mapping[int, Tensor]:
        self._round = self._operation.round_of(self._comm._agree(self._operation))
        rows = self._comm._fabric.rows(self._operation, self._round.sources)
        self._comm._fabric.done(self._operation)
        return rows

    @override
    def new_row(self) -> Tensor | None:
        return self._comm._fabric.next_row(self._operation)
