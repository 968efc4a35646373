"""How a rank joins a run: it asks through the store, and all members let it in after the same operation."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ddpcore.comm.agreement import first_difference
from ddpcore.comm.base import Fact
from ddpcore.comm.fabric import Fabric
from ddpcore.comm.membership import Membership
from ddpcore.comm.roll_call import RollCall, last_run


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


def run_in(store: dist.Store, timeout: float) -> tuple[RollCall, str, int]:
    """Find the run of a store. Returns its record, the kind of its fabric, and how many learners it began with."""
    roll = RollCall(last_run(store, timeout), -1, timeout)
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
