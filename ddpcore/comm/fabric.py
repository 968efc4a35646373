"""Transports between ranks that may die, the record of who is left, and how a rank joins.

Every rank has a thread that answers roll calls. A rank that sees an error opens the next *generation* in the store and
calls all ranks: who is dead does not answer. When all that answer have come too, the first of them writes the list of
members of the generation; the store takes the first list only. The store orders, and no single rank must live.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from ddpcore.comm.agreement import first_difference
from ddpcore.comm.groups import Fact, gather_objects, own_client
from ddpcore.comm.membership import Membership
from ddpcore.topology.rounds import Round

ANSWER_SECONDS = 1.0  # a rank that does not answer for so long is dead; ranks look for calls 20 times in this time
_POLL_SECONDS = ANSWER_SECONDS / 20


_RUN_KEY = "ddpcore/elastic run"


def new_run(group: dist.ProcessGroup, timeout: float) -> dist.Store:
    """The place of a new run in the store of a group. Collective."""
    store = own_client(c10d._get_process_group_store(group))
    token = gather_objects(group, secrets.token_hex(8), "the start of the membership", timeout)[0]
    if dist.get_rank(group) == 0:
        store.set(_RUN_KEY, token)  # where a rank that joins later looks
    return dist.PrefixStore(f"ddpcore/{token}", store)


def last_run(store: dist.Store, timeout: float) -> dist.Store:
    """The place of the last run that was begun in a store. RuntimeError: there is none."""
    store = own_client(store)
    deadline = time.monotonic() + timeout
    while not store.check([_RUN_KEY]):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the store has no run with on_failure='shrink' after {timeout:g} s: start that first")
        time.sleep(_POLL_SECONDS)
    return dist.PrefixStore(f"ddpcore/{bytes(store.get(_RUN_KEY)).decode()}", store)


class GenerationStore:
    """The record of generations in a store that all ranks reach, and that outlives each of them.

    Args:
        store: under a prefix that no other run uses.
        rank: the id of this rank.
        timeout: seconds that a living rank may let the others wait.
    """

    def __init__(self, store: dist.Store, rank: int, timeout: float) -> None:
        self._store, self._rank, self.timeout = store, rank, timeout
        self.generation = 0
        self.asked = 0  # how many ranks have asked to join so far, as far as this rank knows
        self._opened = 0  # the last generation that a rank has opened, as far as this rank knows
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True, name="ddpcore-roll-call")
        self._thread.start()

    def enter(self, rank: int) -> None:
        """Take part from now on, as a rank that has joined."""
        self._rank = rank

    def close(self) -> None:
        """Answer no more. The others then see this rank as gone."""
        self._is_closed.set()

    @property
    def is_called(self) -> bool:
        """Whether a rank has opened the next generation."""
        return self._opened > self.generation

    def _answer(self) -> None:
        answered: tuple[int, int] = 0, 0
        while not self._is_closed.wait(_POLL_SECONDS):
            generation = self.generation + 1
            try:
                self.asked = self._store.add("joins", 0)
                call = self._store.add(f"{generation}/call", 0)
                if call and self._rank >= 0 and (generation, call) != answered:
                    self._store.set(f"{generation}/alive/{self._rank}", str(call))
                    answered = generation, call
                    self._opened = generation
            except RuntimeError:  # the store is gone: a wait of this rank says so
                return

    def next_generation(self, members: tuple[int, ...], state: int) -> tuple[tuple[int, ...], list[int]]:
        """Open or join the next generation. Returns its members, on each of them the same, and the state of each.

        Args:
            members: of this generation.
            state: a number that the others must know.

        Raises:
            RuntimeError: a living member does not come in time, the store is gone, or this rank is not a member.
        """
        try:
            agreed = self._agree(members, state)
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            raise RuntimeError(
                f"the store of the process group is gone ({str(error).partition(chr(10))[0]}): keep it outside of the "
                "ranks, by torchrun's agent or a FileStore"
            ) from error
        if self._rank not in agreed:
            raise RuntimeError(f"the others went on without rank {self._rank}, which did not answer: start it again")
        number = self.generation + 1
        states = [int(self._store.get(f"{number}/ready/{one}")) for one in agreed]
        self.generation = number
        return agreed, states

    def write_once(self, key: str, value: object) -> Any:
        """Write a value as JSON unless there is one already. Returns the one that is there."""
        return json.loads(bytes(self._store.compare_set(key, "", json.dumps(value))))

    def write(self, key: str, value: object) -> None:
        """Write a value as JSON."""
        self._store.set(key, json.dumps(value))

    def read(self, key: str) -> Any:
        """The value of a key, or None."""
        return json.loads(bytes(self._store.get(key))) if self._store.check([key]) else None

    def wait_for(self, key: str) -> Any:
        """The value of a key, waiting for it. RuntimeError: it does not come in time.

        It looks again after 1/50 of the time that it has waited so far, because the rank that writes the value may wait
        for this one.
        """
        began = time.monotonic()
        while (value := self.read(key)) is None:
            waited = time.monotonic() - began
            if waited > self.timeout:
                raise RuntimeError(f"no rank of the run answered within {self.timeout:g} s: is it still training?")
            time.sleep(min(max(waited / 50, 0.001), _POLL_SECONDS))
        return value

    def ask(self) -> int:
        """Ask to join. Returns the number of the request, from 1."""
        return int(self._store.add("joins", 1))

    def group_store(self) -> dist.Store:
        """Where the members of this generation connect."""
        return dist.PrefixStore(f"{self.generation}/group", self._store)

    def _agree(self, members: tuple[int, ...], state: int) -> tuple[int, ...]:
        number, store = self.generation + 1, self._store
        list_key = f"{number}/members"
        store.set(f"{number}/ready/{self._rank}", str(state))
        deadline = time.monotonic() + self.timeout
        while not store.check([list_key]):
            call = store.add(f"{number}/call", 1)
            asked = time.monotonic()
            left = self._left(number, members, call, asked + ANSWER_SECONDS)
            waiting = [one for one in left if not store.check([f"{number}/ready/{one}"])]
            if not waiting:
                return self._decided(store.compare_set(list_key, "", json.dumps(left)))
            if time.monotonic() > deadline:
                raise RuntimeError(f"ranks {waiting} live and did not come within {self.timeout:g} s after a failure")
        return self._decided(store.get(list_key))

    def _left(self, number: int, members: tuple[int, ...], call: int, until: float) -> list[int]:
        """The members that are ready or answer the call; it returns at once when all do."""
        left: list[int] = []
        while True:
            left = [one for one in members if self._is_left(number, one, call)]
            if len(left) == len(members) or time.monotonic() > until:
                return left
            time.sleep(_POLL_SECONDS / 5)

    def _is_left(self, number: int, one: int, call: int) -> bool:
        key = f"{number}/alive/{one}"
        return self._store.check([f"{number}/ready/{one}"]) or (
            self._store.check([key]) and int(self._store.get(key)) >= call
        )

    @staticmethod
    def _decided(value: Any) -> tuple[int, ...]:
        return tuple(json.loads(bytes(value)))


Members = tuple[int, ...]


@dataclass(kw_only=True)
class Operation:
    """One operation in progress.

    Attributes:
        number: counted from 0 since the start of the run.
        what: the same text on all ranks.
        step: of training, or None.
        row: this rank's row ``[x]``. It does not change before the operation ends.
        members: the members when it began.
        round_of: whom this rank reads from and who reads from it, by ids, if these are the members.
        in_place: whether readers read ``row`` itself.
        place: what the transport keeps.
    """

    number: int
    what: str
    step: int | None
    row: Tensor
    members: Members
    round_of: Callable[[Members], Round]
    in_place: bool = False
    place: Any = None


class Fabric(ABC):
    """Carries the rows of operations between ranks, and finds out which ranks are left.

    Attributes:
        rank: the id of this rank.
        members: ids of the ranks that it connects at first.
        description: the transport, as text for people.
    """

    rank: int
    members: Members
    description: str
    kind: str  # shm, or the backend of the process group
    roll: GenerationStore
    address: Any = None  # plain values by which another rank finds this one

    @property
    @abstractmethod
    def position(self) -> int:
        """A number that a rank which joins now must know."""

    @abstractmethod
    def admit(self, one: int, address: Any, members: Members) -> None:
        """Connect a rank that joins, between two operations. It may have died."""

    @abstractmethod
    def join(self, rank: int, members: Members, position: int) -> None:
        """Become a rank of a run, with these members, itself among them."""

    @abstractmethod
    def begin(self, operation: Operation) -> None:
        """Publish the row. It returns without waiting for other ranks, except to allocate memory."""

    @abstractmethod
    def agree(self, operation: Operation) -> Members:
        """Wait until all members have published their rows or are dead. Returns those that have, on every rank alike.

        Raises:
            RuntimeError: a member lives and does not come in time, or calls another operation.
        """

    @abstractmethod
    def rows(self, operation: Operation, members: Sequence[int]) -> dict[int, Tensor]:
        """The rows of other members, which they have published. Valid until :meth:`done`."""

    @abstractmethod
    def done(self, operation: Operation) -> None:
        """This rank has read the rows, or will have read them before it begins the next operation."""

    def next_row(self, operation: Operation) -> Tensor | None:
        """Where an operation in place writes the new row; None: into the row itself."""
        return None

    @property
    def waited(self) -> Mapping[int, float]:
        """See :attr:`Communicator.waited`."""
        return {}


class JoinProtocol:
    """Lets ranks in, one at a time, in the order in which they asked.

    Args:
        fabric: the connection of the members.

    Attributes:
        facts: what all members train; a rank that trains something else is refused. None: no rank can join.
        why_closed: why no rank can join, as text; empty if one can.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self.facts: list[Fact] | None = None
        self.why_closed = ""
        self.num_handled = 0
        self._seen = -1  # operations that were over at the last look

    def announce(self, facts: list[Fact], first: int) -> None:
        """From now on ranks may ask. ``first`` is the number of learners that the run began with."""
        self.facts = facts
        self._fabric.roll.write("run", {"kind": self._fabric.kind, "first": first})

    def announce_again(self, facts: list[Fact], num_handled: int) -> None:
        """In a rank that has joined itself: let in further ones."""
        self.facts, self.num_handled = facts, num_handled

    def open(self, membership: Membership, num_operations: int, num_agreed: int) -> int | None:
        """Let in the rank whose turn it is, if the operation after which it comes is over. Returns its id."""
        if self.facts is None or num_agreed == self._seen:
            return None  # nothing was agreed on since the last look, so others may not see the same
        self._seen = num_agreed
        number, roll = self.num_handled + 1, self._fabric.roll
        try:
            plan = roll.read(f"plan/{number}")
            if plan is None:
                self._plan(membership, number, num_operations)
                return None
        except RuntimeError:  # the store is gone: nobody can join any more
            self.facts = None
            return None
        return None if num_agreed <= plan["after"] else self._answer(membership, number, num_operations, num_agreed)

    def _plan(self, membership: Membership, number: int, num_operations: int) -> None:
        """Only the first member plans. The next operation has not begun: who finishes it will read the plan."""
        roll = self._fabric.roll
        is_first = self._fabric.rank == membership.members[0]
        if is_first and roll.asked >= number and roll.read(f"request/{number}") is not None:
            roll.write_once(f"plan/{number}", {"after": num_operations})

    def _answer(self, membership: Membership, number: int, num_operations: int, num_agreed: int) -> int | None:
        roll, members = self._fabric.roll, membership.members
        request = roll.read(f"request/{number}")
        self.num_handled = number
        why = self._why_not(request, num_operations, num_agreed)
        if why:
            roll.write_once(f"answer/{number}", {"why": why})
            return None
        new = next(one for one in range(len(members) + 1) if one not in members)
        with_new = sorted((*members, new))
        roll.write_once(
            f"answer/{number}",
            {
                "rank": new,
                "members": with_new,
                "operation": num_operations,
                "position": self._fabric.position,
                "handled": number,
            },
        )
        self._fabric.admit(new, request["address"], tuple(with_new))
        return new

    def _why_not(self, request: Any, num_operations: int, num_agreed: int) -> str:
        assert self.facts is not None
        if self.why_closed or num_operations != num_agreed:
            return self.why_closed or "an exchange is in progress at the end of each step, as with staleness 1"
        difference = first_difference(self.facts, [(name, value) for name, value in request["facts"]])
        if difference is None:
            return ""
        what, here, there = difference
        return f"{what} is {there} here and {here} in the run"


def run_in(store: dist.Store, timeout: float) -> tuple[GenerationStore, str, int]:
    """Find the run of a store. Returns its record, the kind of its fabric, and how many learners it began with."""
    roll = GenerationStore(last_run(store, timeout), -1, timeout)
    run = roll.wait_for("run")
    return roll, run["kind"], run["first"]


def ask(fabric: Fabric, facts: list[Fact]) -> Any:
    """Ask to join, and wait for the answer of the members. ValueError: they refuse."""
    number = fabric.roll.ask()
    fabric.roll.write(f"request/{number}", {"facts": facts, "address": fabric.address})
    answer = fabric.roll.wait_for(f"answer/{number}")
    if "why" in answer:
        raise ValueError(f"the run does not let this rank join: {answer['why']}")
    fabric.join(answer["rank"], tuple(answer["members"]), answer["position"])
    return answer
