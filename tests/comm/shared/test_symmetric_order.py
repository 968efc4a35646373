"""The signals of ``symmetric.py`` in every order in which streams can run, for drawn calls of several ranks.

The package lists the events of each stream; nothing runs. One stream puts into a mailbox and one takes, so which
put a take gets does not depend on the order in which streams run. One pass with vector clocks then finds which events
come before which in every order. A row is safe if each read comes after its write and before the next write in all.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ddpcore import Ring
from ddpcore.comm.shared import symmetric as package
from helpers.symmetric_ranks_cuda import Drawn

NUM_CALLS = 60
Event = tuple[str, Any, Any]  # what, where, and the number of the exchange to which it belongs


class Row:
    """The row of a rank in a snapshot."""

    def __init__(self, rank: Recorder, where: tuple[int, int]) -> None:
        self.rank, self.where = rank, where

    def view(self, dtype: torch.dtype) -> Row:
        return self

    def copy_(self, weights: object) -> None:
        self.rank.note("write", self.where, self.rank.number)


class Recorder:
    """One rank: the events of its main stream and of the one beside it, from the code of a module."""

    def __init__(self, module: ModuleType, rank: int, num_ranks: int) -> None:
        self.streams: list[list[Event]] = [[], []]
        self.number = self.current = self.num_rows = self.num_averages = 0
        self.number_of: dict[int, int] = {}  # of the exchange that a snapshot has, by its first channel
        self.taking: int | None = None
        self.unread: list[tuple[Row, int]] = []
        self.rank, self.num_ranks, self.first = rank, num_ranks, module.FIRST
        comm: Any = module.SymmetricCommunicator.__new__(module.SymmetricCommunicator)
        comm.rank, comm.num_ranks, comm.num_learners, comm.learners = rank, num_ranks, num_ranks, (rank,)
        comm._milliseconds, comm._num_channels, comm._next_channel, comm.bytes_sent = 1, 1000, module.FIRST, 0
        comm._snapshots, comm._num_exchanges, comm._signals, comm._side = {}, 0, self, self
        comm._meet = lambda num_bytes: (None, None)
        comm._views = self.new_rows
        comm._shared = SimpleNamespace(find=lambda rows: ("", dict.fromkeys(range(num_ranks))))
        self.comm = comm

    def note(self, what: str, where: Any, number: Any = None) -> None:
        self.streams[self.current].append((what, where, number))

    def new_rows(self, *words: object) -> dict[int, Row]:
        self.num_rows += 1
        return {rank: Row(self, (rank, self.num_rows)) for rank in range(self.num_ranks)}

    def put_signal(self, dst: int, channel: int, timeout_ms: int) -> None:
        is_ready = (channel - self.first) % 2 == 0
        self.note("put", (self.rank, dst, channel), self.number if is_ready else self.number_of.get(channel - 1))

    def wait_signal(self, src: int, channel: int, timeout_ms: int) -> None:
        number = self.taking if self.taking is not None else self.number_of.get(channel - 1)
        self.note("take", (src, self.rank, channel), number)

    def barrier(self, channel: int, timeout_ms: int) -> None:
        others = [rank for rank in range(self.num_ranks) if rank != self.rank]
        for other in others:
            self.note("put", (self.rank, other, channel))
        for other in others:
            self.note("take", (other, self.rank, channel))

    def run(self, work: Callable[[], None]) -> Callable[[], None]:
        """As ``_Side``: the side stream waits for the main one, which waits for the end when it joins."""
        self.num_averages += 1
        begin, end = (f"{what} {self.num_averages} of {self.rank}" for what in ("begin", "end"))
        self.note("tell", begin)
        self.current = 1
        self.note("hear", begin)
        work()
        self.note("tell", end)
        self.current = 0
        return lambda: self.note("hear", end)

    def exchange(self, numel: int, topology: Any, step: int) -> tuple[Any, int]:
        self.read()
        self.number += 1
        weights = SimpleNamespace(numel=lambda: numel, dtype=torch.float32, nbytes=4 * numel)
        made = self.comm.exchange([weights], topology, step)
        self.number_of[made._snapshot.ready] = self.number
        return made, self.number

    def end(self, exchange: Any, number: int, how: str) -> None:
        self.taking = number
        rows = exchange.received()
        self.taking = None
        if how == "mixture":
            self.unread += [(row, number) for row in rows.values()]

    def read(self) -> None:
        """The average reads as late as it may: just before the next exchange."""
        for row, number in self.unread:
            self.note("read", row.where, number)
        self.unread = []


def recorded(module: ModuleType, rank: int, num_ranks: int, seed: int) -> list[list[Event]]:
    """Drawn calls, the same on all ranks: exchanges that overlap, are abandoned, have no neighbours; averages."""
    drawn, one = random.Random(seed), Recorder(module, rank, num_ranks)
    exchanges: list[tuple[Any, int]] = []
    averages: list[Any] = []
    most, rows = drawn.choice((1, 2, 3)), SimpleNamespace(dtype=torch.float32, nbytes=4)
    for call in range(NUM_CALLS):
        kind = drawn.choice(("exchange", "end", "average", "wait"))
        how = drawn.choice(("mixture", "mixture", "abandon"))
        numel, which, topology = drawn.choice((3, 3, 4)), drawn.random(), drawn.choice((Drawn(), Drawn(), Ring()))
        if kind == "exchange" and len(exchanges) < most:
            exchanges.append(one.exchange(numel, topology, NUM_CALLS * seed + call))
        elif kind == "end" and exchanges:
            one.end(*exchanges.pop(int(which * len(exchanges))), how)
        elif kind == "average" and len(averages) < 2:
            averages.append(one.comm.average_(rows, call))
        elif kind == "wait" and averages:
            averages.pop(int(which * len(averages))).wait()
    while exchanges:
        one.end(*exchanges.pop(), "mixture")
    one.read()
    return one.streams


class Order:
    """Runs events in one order and says what may go wrong in any. Mailboxes hold one signal."""

    def __init__(self, streams: list[list[Event]]) -> None:
        self.streams, self.wrong = streams, set[str]()
        self.clocks = [[0] * len(streams) for _ in streams]
        self.boxes: dict[Any, tuple[Any, list[int]]] = {}
        self.taken: dict[Any, tuple[int, int]] = {}  # stream and time
        self.told: dict[str, list[int]] = {}
        self.written: dict[Any, tuple[Any, tuple[int, int]]] = {}
        self.reads: dict[Any, list[tuple[int, int]]] = {}

    def run(self) -> set[str]:
        places, goes_on = [0] * len(self.streams), True
        while goes_on:
            goes_on = False
            for stream, events in enumerate(self.streams):
                while places[stream] < len(events) and self._step(stream, *events[places[stream]]):
                    places[stream] += 1
                    goes_on = True
        if any(place < len(events) for place, events in zip(places, self.streams, strict=True)):
            self.wrong.add("ranks wait for ever")
        return self.wrong

    def _is_before(self, event: tuple[int, int], stream: int) -> bool:
        return self.clocks[stream][event[0]] >= event[1]

    def _step(self, stream: int, what: str, where: Any, number: Any) -> bool:
        """Whether the event can happen now. It then has."""
        clock = self.clocks[stream]
        if (what == "put" and where in self.boxes) or (what == "take" and where not in self.boxes):
            return False
        if what == "hear" and where not in self.told:
            return False
        clock[stream] += 1
        now = stream, clock[stream]
        heard: list[int] = []
        if what == "put":
            if where[2] != package.BARRIER and where in self.taken and not self._is_before(self.taken[where], stream):
                self.wrong.add("a put may find a full mailbox")
            self.boxes[where] = number, list(clock)
        elif what == "take":
            put, heard = self.boxes.pop(where)
            self.taken[where] = now
            if put != number:
                self.wrong.add("a signal is taken for another exchange")
        elif what == "hear":
            heard = self.told[where]
        elif what == "tell":
            self.told[where] = list(clock)
        elif what == "write":
            if not all(self._is_before(read, stream) for read in self.reads.pop(where, [])):
                self.wrong.add("a row may be overwritten while it is read")
            self.written[where] = number, now
        elif what == "read":
            found, when = self.written.get(where, (None, now))
            if found != number or not self._is_before(when, stream):
                self.wrong.add("a row may be read before it is written")
            self.reads.setdefault(where, []).append(now)
        clock[:] = map(max, clock, heard or clock)
        return True


def found(module: Any, num_ranks: int, seeds: range) -> set[str]:
    module._is_capturing = lambda: False
    module.average_share_ = lambda columns, rank: None
    wrong = set()
    for seed in seeds:
        wrong |= Order([each for rank in range(num_ranks) for each in recorded(module, rank, num_ranks, seed)]).run()
    return wrong


def changed(monkeypatch: pytest.MonkeyPatch, line: str, by: str) -> ModuleType:
    """The module with a line replaced."""
    source = inspect.getsource(package)
    assert source.count(line) == 1
    module = ModuleType("ddpcore.comm.shared.changed")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look for names
    exec(source.replace(line, by), module.__dict__)
    return module


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_no_order_is_wrong(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = changed(monkeypatch, "MAX_RANKS = 32", "MAX_RANKS = 31")
    assert found(module, num_ranks, range(40)) == set()


@pytest.mark.parametrize(
    ("line", "by"),
    [
        ("for reader in snapshot.readers:", "for reader in ():"),
        ("for reader in snapshot.readers:", "for reader in round_.destinations:"),
        ("in snapshot.sources:\n                self", "in snapshot.sources[1:]:\n                self"),
        ("in snapshot.sources:\n            comm", "in snapshot.sources[1:]:\n            comm"),
        ("round_.sources, math.inf", "round_.sources, 0.0"),
        ("self._next_channel, self._next_channel + 1", "self._next_channel, self._next_channel"),
        ("self._next_channel += 2", "self._next_channel += 0"),
        ("snapshot.is_handed_out = True\n", "snapshot.is_handed_out = True; comm._note_read()\n"),
        ("self._is_over = snapshot.is_handed_out = True", "self._is_over, snapshot.used = True, comm._num_exchanges"),
    ],
)
def test_a_wrong_line_is_found(line: str, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(changed(monkeypatch, line, by), 3, range(10))
