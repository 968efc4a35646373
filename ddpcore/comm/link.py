"""An emulated network: real ranks exchange as they do, and a clock says when it would have arrived.

Nothing is made slower. Each learner has a clock of its own, on which it computes for as long as its thread had the CPU,
as if it had a core to itself, and waits for what others sent. What is computed keeps its bits.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ddpcore.comm.base import Communicator, Decode, Exchange, Work
from ddpcore.comm.traffic import sum_bytes
from ddpcore.ops import WeightAverage
from ddpcore.topology.base import Topology

_BITS = {"Gb/s": 1e9, "Mb/s": 1e6}
_SECONDS = {"us": 1e-6, "ms": 1e-3}
_NUMBER = r"(\d+(?:\.\d+)?)"
_TEXT = re.compile(rf"{_NUMBER}(Gb/s|Mb/s),{_NUMBER}(us|ms)(?:,slow={_NUMBER})?")


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins each learner to the network.

    Attributes:
        bits_per_second: that a learner sends; it receives as fast at the same time.
        delay: seconds from the last bit that leaves to the last bit that arrives.
        slow: learner 0 computes so many times as long.

    Raises:
        ValueError: a number is out of its range.
    """

    bits_per_second: float
    delay: float
    slow: float = 1.0

    def __post_init__(self) -> None:
        if self.bits_per_second <= 0 or self.slow < 1:
            raise ValueError(f"link is {self}: its bandwidth must be above 0, and slow at least 1")

    @classmethod
    def parse(cls, text: str) -> Link:
        """From ``10Gb/s,50us`` or, with a slow learner, ``10Gb/s,50us,slow=2``; also Mb/s and ms.

        Raises:
            ValueError: it is of another form.
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ValueError(f"link is {text!r}: write a bandwidth and a delay, 10Gb/s,50us or 10Gb/s,50us,slow=2")
        bandwidth, unit, delay, scale, slow = found.groups()
        return cls(
            bits_per_second=float(bandwidth) * _BITS[unit],
            delay=float(delay) * _SECONDS[scale],
            slow=float(slow or 1),
        )

    def __str__(self) -> str:
        slow = f", learner 0 {self.slow:g} times slower" if self.slow > 1 else ""
        return f"{self.bits_per_second / 1e9:g} Gb/s, {self.delay * 1e6:g} us{slow}"


class LearnerClock:
    """Seconds of one learner: what it computed, and what it waited.

    Args:
        slow: computing takes so many times as long.
        cpu: seconds that the thread computed so far; others that have the core meanwhile do not count.
    """

    def __init__(self, slow: float = 1.0, cpu: Callable[[], float] = time.thread_time) -> None:
        self._slow, self._cpu, self._waited = slow, cpu, 0.0

    def now(self) -> float:
        """Seconds."""
        return self._slow * self._cpu() + self._waited

    def wait_until(self, when: float) -> None:
        """Let the time pass; where it has passed already, nothing."""
        self._waited += max(0.0, when - self.now())

    def rewind(self, when: float) -> None:
        """What was computed since does not count."""
        self._waited += when - self.now()


class LinkedCommunicator(Communicator):
    """Ranks whose messages take their time on a :class:`Link`, by the clocks of the learners.

    - A learner sends one message after the other: each begins to leave when it is ready and the one before has left.
    - An exchange: one message a neighbour; what a neighbour sent is there a delay after its last bit left.
    - An average is a ring all-reduce: ``2(n-1)/n`` of the bytes leave each learner, it is over ``2(n-1)`` delays after
      the last learner's last bit left.
    - The time passes in ``wait`` (of an exchange: in what uses it), so what is computed before that is overlapped.

    Who waits asks all ranks when they sent, so that a learner that is late delays those who need it and no others.
    Broadcasts and gathers take no time: no strategy needs them at a step.

    Args:
        inner: what carries the bytes. It connects ranks of one learner each.
        link: to emulate.
        cpu: see :class:`LearnerClock`.

    Attributes:
        clock: of this learner.
    """

    def __init__(self, inner: Communicator, link: Link, cpu: Callable[[], float] = time.thread_time) -> None:
        self._inner, self.link = inner, link
        self.num_learners, self.learners = inner.num_learners, inner.learners
        self.clock = LearnerClock(link.slow if inner.learners[0] == 0 else 1.0, cpu)
        self._free_at = 0.0  # when all messages before have left
        self.description = f"{inner.description}, seconds as over an emulated link of {link}"

    @override
    def now(self) -> float:
        """The clock of the learner that is furthest, to which the others are set."""
        return self.wait(self.clock.now(), range(self.num_learners), num_delays=0)

    def wait(self, left: float, sources: Sequence[int], num_delays: int) -> float:
        """Let the time pass until what ``sources`` sent is here; returns when it was. Collective.

        Args:
            left: when the last bit of this learner's own message left.
            sources: learners.
            num_delays: that the messages take.
        """
        asked = self.clock.now()
        left_n = self._inner.gather(torch.tensor([left], dtype=torch.float64)).tolist()
        self.clock.rewind(asked)  # a network tells nobody when a message left
        here = max((left_n[source] + num_delays * self.link.delay for source in sources), default=asked)
        self.clock.wait_until(here)
        return here

    @override
    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._inner.allocate(shape, dtype, device)

    @override
    def broadcast_(self, rows: Tensor) -> None:
        self._inner.broadcast_(rows)

    @override
    def gather(self, values: Tensor) -> Tensor:
        return self._inner.gather(values)

    @override
    def average_(self, rows: Tensor, step: int | None = None) -> Work:
        work = self._inner.average_(rows, step)
        self._count_bytes()
        left = self._send(sum_bytes(rows[0], self.num_learners))
        return _LinkedWork(self, work, left)

    @override
    def exchange(self, weights_LP: Tensor, topology: Topology, step: int) -> Exchange:
        return self._linked(self._inner.exchange(weights_LP, topology, step), topology, step)

    @override
    def exchange_in_place(self, weights_LP: Tensor, topology: Topology, step: int) -> Exchange:
        return self._linked(self._inner.exchange_in_place(weights_LP, topology, step), topology, step)

    def _linked(self, exchange: Exchange, topology: Topology, step: int) -> Exchange:
        left = self._send(self._count_bytes())
        return _LinkedExchange(self, exchange, left, self._sources(topology, step))

    @override
    def mix_(self, weights_LP: Tensor, topology: Topology, step: int) -> None:
        self._inner.mix_(weights_LP, topology, step)
        self.wait(self._send(self._count_bytes()), self._sources(topology, step), num_delays=1)

    def _sources(self, topology: Topology, step: int) -> Sequence[int]:
        return topology.round(step, self.learners[0], self.num_learners).sources

    def _count_bytes(self) -> int:
        """Those that were sent since the last call."""
        sent = self._inner.bytes_sent - self.bytes_sent
        self.bytes_sent = self._inner.bytes_sent
        return sent

    def _send(self, num_bytes: int) -> float:
        """When the last bit of a message that is ready now leaves."""
        self._free_at = max(self.clock.now(), self._free_at) + 8 * num_bytes / self.link.bits_per_second
        return self._free_at


class _LinkedWork(Work):
    def __init__(self, comm: LinkedCommunicator, work: Work, left: float) -> None:
        self._comm, self._work, self._left = comm, work, left

    def wait(self) -> None:
        self._work.wait()
        n = self._comm.num_learners
        self._comm.wait(self._left, range(n), num_delays=2 * (n - 1))


class _LinkedExchange(Exchange):
    def __init__(self, comm: LinkedCommunicator, exchange: Exchange, left: float, sources: Sequence[int]) -> None:
        self._comm, self._exchange, self._left, self._sources = comm, exchange, left, sources

    @override
    def mixture(self) -> WeightAverage:
        self._arrive()
        return self._exchange.mixture()

    @override
    def correction(self, published_LP: Tensor, factor: float, decode: Decode | None = None) -> WeightAverage:
        self._arrive()
        return self._exchange.correction(published_LP, factor, decode)

    @override
    def abandon(self) -> None:
        self._exchange.abandon()

    def _arrive(self) -> None:
        self._comm.wait(self._left, self._sources, num_delays=1)
