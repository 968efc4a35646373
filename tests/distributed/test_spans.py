"""The seconds of the calls of a strategy, with a clock that the test sets."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from ddpcore.distributed.phases import PhaseClock

CALLS = [  # name, beginning and end in seconds, bytes sent in the call
    ("before_forward", 1.0, 1.5, 0),
    ("bucket_ready", 3.0, 3.25, 8),
    ("bucket_ready", 4.0, 4.25, 8),
    ("after_backward", 6.0, 8.0, 0),
    ("before_step", 8.5, 8.75, 0),
    ("after_step", 9.0, 10.0, 8),  # starts an average and waits for it
    ("before_step", 12.0, 12.25, 0),
]


def test_exposed_and_overlapped_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlapped: from 3.25 to 6.0 without the second bucket's 0.25."""
    comm: Any = SimpleNamespace(bytes_sent=0, learners=range(1), num_learners=2)
    spans, now = PhaseClock(comm), [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for name, began, ended, sent in CALLS:
        now[0] = began
        with spans(name):
            comm.bytes_sent += sent
            now[0] = ended
    assert spans.waiting == 0.5 + 0.25 + 0.25 + 2.0 + 0.25 + 1.0 + 0.25
    assert spans.overlapped == 2.5
    with spans("before_step"), spans("after_step"):
        now[0] += 1.0
    assert spans.waiting == 4.5 + 1.0  # a range inside another one counts once


def test_inside_one_process_nothing_overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    comm: Any = SimpleNamespace(bytes_sent=0, learners=range(2), num_learners=2)
    spans = PhaseClock(comm)
    with spans("before_forward"):
        comm.bytes_sent += 8
    with spans("before_step"):
        pass
    assert spans.overlapped == 0.0
