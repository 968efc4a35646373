"""Waits for the store: short enough for the ranks that wait for the answer, and not endless."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from ddpcore.comm import membership
from ddpcore.comm.membership import Roll


class Clock:
    """A clock that sleeps at once, and writes a key into a store when its time has come."""

    def __init__(self, store: dist.Store, key: str, when: float) -> None:
        self.store, self.key, self.when = store, key, when
        self.now, self.num_sleeps = 0.0, 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now, self.num_sleeps = self.now + seconds, self.num_sleeps + 1
        if self.now >= self.when:
            self.store.set(self.key, '"here"')


@pytest.mark.parametrize("when", [0.02, 0.15, 1.0, 20.0])
def test_a_value_is_seen_soon_and_without_many_questions(when: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members of a run wait for the rank that joins: a late look would cost each of them that time."""
    store = dist.HashStore()
    clock = Clock(store, "answer", when)
    roll = Roll(store, timeout=60.0)
    monkeypatch.setattr(membership, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep))
    assert roll.wait_for("answer") == "here"
    roll.close()
    assert when <= clock.now <= max(1.03 * when, when + 0.0015)
    assert clock.num_sleeps <= 250 + 20 * clock.now


def test_a_value_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    clock = Clock(store, "other", 0.0)
    roll = Roll(store, timeout=3.0)
    monkeypatch.setattr(membership, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep))
    with pytest.raises(RuntimeError, match="no rank of the run answered within 3 s"):
        roll.wait_for("answer")
    roll.close()
    assert 3 < clock.now < 3.1
