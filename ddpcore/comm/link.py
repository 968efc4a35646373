"""An emulated network: real ranks exchange as usual, and clocks compute when each message would have arrived.

The emulation delays nothing. The clock of a learner adds the CPU time of its thread, as if the thread had its own core,
and the time that it would wait for messages. All results keep their bits.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ddpcore.comm.base import Communicator, Exchange, Work
from ddpcore.comm.reductions import all_reduce_bytes
from ddpcore.topology.base import Topology

_BITS = {"Gb/s": 1e9, "Mb/s": 1e6}
_SECONDS = {"us": 1e-6, "ms": 1e-3}
_NUMBER = r"(\d+(?:\.\d+)?)"
_TEXT = re.compile(rf"{_NUMBER}(Gb/s|Mb/s),{_NUMBER}(us|ms)(?:,slow={_NUMBER})?")


@dataclass(frozen=True, kw_only=True)
class Link:
    """The emulated connection of each learner to the network.

    Attributes:
        bits_per_second: bandwidth in each of the two directions, which a learner uses at the same time.
        delay: seconds from the last bit that leaves to the last bit that arrives.
        slow: factor of the computing time of learner 0, at least 1. ValueError: a number is out of its range.
    """

    bits_per_second: float
    delay: float
    slow: float = 1.0

    def __post_init__(self) -> None:
        if self.bits_per_second <= 0 or self.slow < 1:
            raise ValueError(f"link is {self}: its bandwidth must be above 0, and slow at least 1")

    @classmethod
    def parse(cls, text: str) -> "Link":
        """Parse ``10Gb/s,50us`` or ``10Gb/s,50us,slow=2``; Mb/s and ms are units too. ValueError: another form."""
        if (found := _TEXT.fullmatch(text)) is None:
            raise ValueError(f"link is {text!r}: write a bandwidth and a delay, 10Gb/s,50us or 10Gb/s,50us,slow=2")
        bandwidth, unit, delay, scale, slow = found.groups()
        bits, seconds = float(bandwidth) * _BITS[unit], float(delay) * _SECONDS[scale]
        return cls(bits_per_second=bits, delay=seconds, slow=float(slow or 1))

    def __str__(self) -> str:
        slow = f", learner 0 {self.slow:g} times slower" if self.slow > 1 else ""
        return f"{self.bits_per_second / 1e9:g} Gb/s, {self.delay * 1e6:g} us{slow}"


class LearnerClock:
    """The clock of one learner: ``slow`` times the CPU seconds of its thread, plus the seconds of its waiting."""

    def __init__(self, slow: float = 1.0, cpu: Callable[[], float] = time.thread_time) -> None:
        self._slow, self._cpu, self._waited = slow, cpu, 0.0

    def now(self) -> float:
        """Seconds since the start."""
        return self._slow * self._cpu() + self._waited

    def wait_until(self, when: float) -> None:
        """Advance the clock to a time. A time in the past changes nothing."""
        self._waited += max(0.0, when - self.now())

    def rewind(self, when: float) -> None:
        """Set the clock back to a time, so that what was computed since then does not count."""
        self._waited += when - self.now()


class LinkedCommunicator(Communicator):
    """Adds the times of a :class:`Link` to the messages of another connection, on the clocks of the learners.

    - A learner sends its messages one after the other. Each starts when it is ready and the message before has left.
    - An exchange sends one message to each neighbour. It arrives one delay after its last bit left.
    - An average is a ring all-reduce: each learner sends ``2(n-1)/n`` of the bytes, and the average ends ``2(n-1)``
      delays after the last bit of the last learner left. In a group, n is the number of its learners.
    - Clocks advance when a result is used (``wait``, ``mixture``, ``correction``), so earlier computation overlaps.

    A wait gathers the send times of all ranks, so a late learner delays only the learners that need its message.
    Broadcasts and gathers take no time, because no strategy calls them in a step. ``inner``, which sends the bytes, has
    one learner on each rank, whose clock is ``clock``; for ``cpu`` see :class:`LearnerClock`.
    """

    transport = "link"

    def __init__(self, inner: Communicator, link: Link, cpu: Callable[[], float] = time.thread_time) -> None:
        self._inner, self.link = inner, link
        self.num_learners, self.learners = inner.num_learners, inner.learners
        self.clock = LearnerClock(link.slow if inner.learners[0] == 0 else 1.0, cpu)
        self._free_at = 0.0  # when all earlier messages have left
        self.description = f"{inner.description}, seconds as over an emulated link of {link}"

    @override
    def now(self) -> float:
        """Set all clocks to the latest one, and return it."""
        return self.wait(self.clock.now(), range(self.num_learners), num_delays=0)

    def wait(self, left: float, sources: Sequence[int], num_delays: int) -> float:
        """Advance the clock until the messages of ``sources`` have arrived, and return that time. Collective.

        The last bit of this learner's message ``left`` at a time, and a message takes ``num_delays`` delays.
        """
        start = self.clock.now()
        left_n = self._inner.gather(torch.tensor([left], dtype=torch.float64, device="cpu")).tolist()
        self.clock.rewind(start)  # the gather is part of the emulation and takes no time
        arrived = max((left_n[source] + num_delays * self.link.delay for source in sources), default=start)
        self.clock.wait_until(arrived)
        return arrived

    @override
    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._inner.allocate(shape, dtype, device)

    @override
    def broadcast_(self, rows: Tensor) -> None:
        self._inner.broadcast_(rows)

    @override
    def gather(self, values: Tensor, step: int | None = None) -> Tensor:
        return self._inner.gather(values, step)

    @override
    def form_groups(self, size: int) -> None:
        self._inner.form_groups(size)

    @override
    def average_(self, rows: Tensor, step: int | None = None, size: int | None = None) -> Work:
        work, num = self._inner.average_(rows, step, size), size or self.num_learners
        first = self.learners[0] // num * num
        self._count_bytes()
        left = self._send(all_reduce_bytes(rows[0].nbytes, num))

        def end() -> None:
            work.wait()
            self.wait(left, range(first, first + num), num_delays=2 * (num - 1))

        return Work(end)

    @override
    def exchange(self, weights_LP: Tensor, topology: Topology, step: int, *, in_place: bool = False) -> Exchange:
        exchange = self._inner.exchange(weights_LP, topology, step, in_place=in_place)
        return _LinkedExchange(self, exchange, self._send(self._count_bytes()), self._sources(topology, step))

    @override
    def mix_(self, weights_LP: Tensor, topology: Topology, step: int) -> None:
        self._inner.mix_(weights_LP, topology, step)
        self.wait(self._send(self._count_bytes()), self._sources(topology, step), num_delays=1)

    def _sources(self, topology: Topology, step: int) -> Sequence[int]:
        return topology.round(step, self.learners[0], self.num_learners).sources

    def _count_bytes(self) -> int:
        """Bytes that were sent since the last call."""
        sent = self._inner.bytes_sent - self.bytes_sent
        self.bytes_sent = self._inner.bytes_sent
        return sent

    def _send(self, num_bytes: int) -> float:
        """Return the time at which the last bit leaves, of a message that is ready now."""
        self._free_at = max(self.clock.now(), self._free_at) + 8 * num_bytes / self.link.bits_per_second
        return self._free_at


class _LinkedExchange(Exchange):
    def __init__(self, comm: LinkedCommunicator, exchange: Exchange, left: float, sources: Sequence[int]) -> None:
        super().__init__(exchange.learners, exchange.round_of)
        self._comm, self._exchange, self._left, self._sources = comm, exchange, left, sources

    @override
    def received(self) -> Mapping[int, Tensor]:
        self._comm.wait(self._left, self._sources, num_delays=1)
        return self._exchange.received()

    @override
    def new_row(self) -> Tensor | None:
        return self._exchange.new_row()

    @override
    def abandon(self) -> None:
        self._exchange.abandon()
