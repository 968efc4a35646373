"""The interface of a transport between ranks that may die: operations, rows, and who is left."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ddpcore.comm.roll_call import RollCall
from ddpcore.topology.rounds import Round

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
    roll: RollCall
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
