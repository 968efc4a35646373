"""Who takes part in a run whose learners may die and join: the members, how they changed, and the roll of real ranks.

Every rank has a thread that answers roll calls. A rank that sees an error opens the next *generation* in the store and
calls all ranks: who is dead does not answer. When all that answer have come too, the first of them writes the list of
members of the generation; the store takes the first list only. The store orders, and no single rank must live.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from ddpcore.topology.base import Topology
from ddpcore.topology.rounds import Round
from ddpcore.topology.wrapped import Damped, redrawn

ON_FAILURE = ("raise", "shrink")
"""Values of ``distribute(on_failure=)``; the first is the default."""
NUM_TO_JOIN = 2  # operations by which a new member gets its state
LEAST = 2  # members that a run needs to go on
ANSWER_SECONDS = 1.0  # a rank that does not answer for so long is dead; ranks look for calls 20 times in this time
POLL_SECONDS = ANSWER_SECONDS / 20


class TooFewLeft(RuntimeError):
    """Fewer than two learners are left, so nothing can be averaged."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of the members. The same on every rank, and enough to repeat the run with virtual learners.

    Attributes:
        operation: the number of the first operation between learners that the new members do. Operations are averages,
            exchanges, broadcasts and gathers, counted from 0 since the start of the run.
        step: of training in which it is, if known.
        members: ids of the members from that operation on, ascending.
        lost: ids that are no longer members.
        joined: ids that are new.
    """

    operation: int
    step: int | None
    members: tuple[int, ...]
    lost: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()

    def __str__(self) -> str:
        ids = " and ".join(map(str, self.lost or self.joined))
        what = f"learner {ids} is gone, and what it held is lost" if self.lost else f"learner {ids} has joined"
        at = "" if self.step is None else f" from step {self.step}"
        return f"{what}: {len(self.members)} learners go on{at}, operation {self.operation}: {list(self.members)}"


@dataclass
class Membership:
    """The members of a run, and the topology over them.

    Attributes:
        members: ids, ascending. A learner's position among them is its number in a topology.
        first: the number of learners that each topology was chosen for; 0: the present number.
        changes: all changes so far.
        on_change: called with each change and, for each member, its position before (None if it is new).
    """

    members: tuple[int, ...]
    first: int = 0
    changes: list[Change] = field(default_factory=list)
    on_change: list[Callable[[Change, Sequence[int | None]], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.first = self.first or len(self.members)
        self._known: dict[tuple[int, int], tuple[Topology, Topology]] = {}

    def change(self, members: tuple[int, ...], operation: int, step: int | None) -> None:
        """Take other members from an operation on. No change if they are the same. TooFewLeft: fewer than two are."""
        if members == self.members:
            return
        lost = tuple(sorted(set(self.members).difference(members)))
        joined = tuple(sorted(set(members).difference(self.members)))
        change = Change(operation=operation, step=step, members=members, lost=lost, joined=joined)
        before = [self.members.index(one) if one in self.members else None for one in members]
        self.members = members
        self.changes.append(change)
        if len(members) < LEAST:
            raise TooFewLeft(f"{change}: gossip needs at least {LEAST}, so start again from a checkpoint")
        for call in self.on_change:
            call(change, before)

    def source_for(self, new: int) -> int:
        """The member that gives its state to a new one: the next on a ring of ids."""
        others = [one for one in self.members if one != new]
        return min((one for one in others if one > new), default=others[0])

    def topology(self, topology: Topology, num: int) -> Topology:
        """The topology over so many members, see :func:`~ddpcore.topology.wrapped.redrawn`."""
        if num == self.first:
            return topology
        if isinstance(topology, Damped):  # perhaps a new one in each step
            return Damped(self.topology(topology.topology, num), topology.share)
        key = id(topology), num
        if key not in self._known:
            push_sum = redrawn(topology, self.first) is not topology  # only its columns sum to one
            self._known[key] = topology, redrawn(topology, num, push_sum=push_sum)
        return self._known[key][1]

    def round(self, topology: Topology, step: int, member: int, members: tuple[int, ...]) -> Round:
        """The round of a member by ids, over these members. One that is no member is idle."""
        if member not in members:
            return Round(1.0, (), (), ())
        turn = self.topology(topology, len(members)).round(step, members.index(member), len(members))
        sources, readers = (tuple(members[place] for place in places) for places in (turn.sources, turn.destinations))
        return Round(turn.self_weight, sources, turn.weights, readers)


class Roll:
    """The record of a run's generations, in a store that all ranks reach and that outlives each of them.

    The store is under a prefix that no other run uses. A living rank may let the others wait for ``timeout`` seconds.
    """

    def __init__(self, store: dist.Store, timeout: float) -> None:
        self.store, self.timeout = store, timeout
        self.rank = -1  # the id of this rank, when it takes part
        self.generation = 0  # the number of the list of members that holds now
        self.asked = 0  # how many ranks have asked to join so far, as far as this rank knows
        self._opened = 0  # the last generation that a rank has opened, as far as this rank knows
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True, name="ddpcore-roll-call")
        self._thread.start()

    def close(self) -> None:
        """Answer no more. The others then see this rank as gone."""
        self._is_closed.set()

    def is_called(self) -> bool:
        """Whether a rank has opened the next generation."""
        return self._opened > self.generation

    def _answer(self) -> None:
        answered: tuple[int, int] = 0, 0
        while not self._is_closed.wait(POLL_SECONDS):
            generation = self.generation + 1
            try:
                self.asked = self.store.add("joins", 0)
                call = self.store.add(f"{generation}/call", 0)
                if call and self.rank >= 0 and (generation, call) != answered:
                    self.store.set(f"{generation}/alive/{self.rank}", str(call))
                    answered = generation, call
                    self._opened = generation
            except RuntimeError:  # the store is gone: a wait of this rank says so
                return

    def next_generation(self, members: tuple[int, ...], state: int) -> tuple[tuple[int, ...], list[int]]:
        """Open or join the next generation. Returns its members, on each of them the same, and the state of each.

        RuntimeError: a living member does not come in time, the store is gone, or this rank is not a member.
        """
        try:
            agreed = self._agree(members, state)
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            what = f"the store of the process group is gone ({str(error).partition(chr(10))[0]})"
            raise RuntimeError(f"{what}: keep it outside of the ranks, by torchrun's agent or a FileStore") from error
        if self.rank not in agreed:
            raise RuntimeError(f"the others went on without rank {self.rank}, which did not answer: start it again")
        number = self.generation + 1
        states = [int(self.store.get(f"{number}/ready/{one}")) for one in agreed]
        self.generation = number
        return agreed, states

    def write_once(self, key: str, value: object) -> Any:
        """Write a value as JSON unless there is one already. Returns the one that is there."""
        return json.loads(bytes(self.store.compare_set(key, "", json.dumps(value))))

    def write(self, key: str, value: object) -> None:
        """Write a value as JSON."""
        self.store.set(key, json.dumps(value))

    def read(self, key: str) -> Any:
        """The value of a key, or None."""
        return json.loads(bytes(self.store.get(key))) if self.store.check([key]) else None

    def wait_for(self, key: str) -> Any:
        """The value of a key, waiting for it. RuntimeError: it does not come in time."""
        began = time.monotonic()
        while (value := self.read(key)) is None:
            waited = time.monotonic() - began
            if waited > self.timeout:
                raise RuntimeError(f"no rank of the run answered within {self.timeout:g} s: is it still training?")
            time.sleep(min(max(waited / 50, 0.001), POLL_SECONDS))  # who writes the value may wait for this rank
        return value

    def _agree(self, members: tuple[int, ...], state: int) -> tuple[int, ...]:
        number, store = self.generation + 1, self.store
        list_key = f"{number}/members"
        store.set(f"{number}/ready/{self.rank}", str(state))
        deadline = time.monotonic() + self.timeout
        while not store.check([list_key]):
            left = self._left(number, members, store.add(f"{number}/call", 1), time.monotonic() + ANSWER_SECONDS)
            if not (waiting := [one for one in left if not store.check([f"{number}/ready/{one}"])]):
                return tuple(self.write_once(list_key, left))
            if time.monotonic() > deadline:
                raise RuntimeError(f"ranks {waiting} live and did not come within {self.timeout:g} s after a failure")
        return tuple(self.read(list_key))

    def _left(self, number: int, members: tuple[int, ...], call: int, until: float) -> list[int]:
        """The members that are ready or answer the call; it returns at once when all do."""
        store = self.store

        def is_left(one: int) -> bool:
            key = f"{number}/alive/{one}"
            return store.check([f"{number}/ready/{one}"]) or (store.check([key]) and int(store.get(key)) >= call)

        while True:
            left = list(filter(is_left, members))
            if len(left) == len(members) or time.monotonic() > until:
                return left
            time.sleep(POLL_SECONDS / 5)
