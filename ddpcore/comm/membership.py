"""Who takes part in a run whose learners may die and join: the members, and how they changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ddpcore.topology.base import Topology
from ddpcore.topology.redraw import of_members, redrawn
from ddpcore.topology.rounds import Round

ON_FAILURE = ("raise", "shrink")
"""Values of ``distribute(on_failure=)``; the first is the default."""
NUM_TO_JOIN = 2  # operations by which a new member gets its state
LEAST = 2  # members that a run needs to go on


def check_on_failure(value: str) -> str:
    """Return the value of ``on_failure``. ValueError: there is no such value."""
    if value not in ON_FAILURE:
        raise ValueError(f"on_failure is {value!r}: choose from {', '.join(ON_FAILURE)}")
    return value


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
    """The members of a run, and the topology over them. It is replaced as a whole, never in parts.

    Attributes:
        members: ids, ascending. A learner's position among them is its number in a topology.
        first: the number of learners that each topology was chosen for; 0: those of now.
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
        """Take other members from an operation on. No change if they are the same.

        Raises:
            TooFewLeft: fewer than two are left.
        """
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

    def topology(self, topology: Topology, num_members: int | None = None) -> Topology:
        """The topology over the members, see :func:`~ddpcore.topology.redraw.redrawn`."""
        num = len(self.members) if num_members is None else num_members
        if num == self.first:
            return topology
        key = id(topology), num
        if key not in self._known:
            push_sum = redrawn(topology, self.first) is not topology  # only its columns sum to one
            self._known[key] = topology, redrawn(topology, num, push_sum=push_sum)
        return self._known[key][1]

    def round(self, topology: Topology, step: int, member: int, members: tuple[int, ...] | None = None) -> Round:
        """The round of a member by ids. One that is no member is idle."""
        members = self.members if members is None else members
        if member not in members:
            return Round(1.0, (), (), ())
        drawn = self.topology(topology, len(members))
        return of_members(drawn.round(step, members.index(member), len(members)), members)
