"""An emulated link: the arrival times of messages, on clocks that only a test advances."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import ddpcore
from ddpcore import Complete, RandomPair, Ring, Topology
from ddpcore.comm import Communicator, LearnerClock, Link, LinkedCommunicator, VirtualCommunicator, Work
from ddpcore.comm.base import Exchange
from helpers import link_ranks as helper
from helpers import ranks

sys.path.insert(0, str(ranks.HERE))

N, NUM_BYTES = 4, 400
LINK = Link(bits_per_second=8 * 1000, delay=0.25)  # a byte takes a millisecond; an exchange of 100 floats 0.4 s


class Cpu:
    """Seconds that a learner computed."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Rank(Communicator):
    """Learner ``rank`` of four, without the others: ``others`` holds the values that they gather."""

    def __init__(self, rank: int) -> None:
        self.num_learners, self.learners, self.description = N, (rank,), "nobody"
        self.others: dict[int, float] = {}
        self.cpu = Cpu()

    def broadcast_(self, rows: Tensor) -> None:
        raise NotImplementedError

    def average_(self, rows: Tensor, step: int | None = None, size: int | None = None) -> Work:
        self.bytes_sent += 1  # the time of an average does not depend on this count
        return Work()

    def exchange(self, weights_LP: Tensor, topology: Topology, step: int, *, in_place: bool = False) -> Exchange:
        plan = topology.round(step, self.learners[0], N)
        self.bytes_sent += len(plan.destinations) * weights_LP.numel() * weights_LP.element_size()
        return VirtualCommunicator(1).exchange(weights_LP, Complete(), step)

    def gather(self, values: Tensor) -> Tensor:
        self.cpu.seconds += 100.0  # the emulation's own work takes no time
        return torch.tensor([self.others.get(rank, values.item()) for rank in range(N)], dtype=values.dtype)


def joined(rank: int = 1, link: Link = LINK) -> tuple[LinkedCommunicator, LearnerClock, Rank]:
    inner = Rank(rank)
    comm = LinkedCommunicator(inner, link, inner.cpu)
    return comm, comm.clock, inner


def rows() -> Tensor:
    return torch.zeros(1, NUM_BYTES // 4)


def test_an_exchange_arrives_a_delay_after_it_has_left() -> None:
    comm, clock, _ = joined()
    exchange = comm.exchange(rows(), RandomPair(), 0)
    assert clock.now() == 0.0, "nothing waits before the weights are used"
    exchange.mixture()
    assert clock.now() == pytest.approx(0.4 + 0.25)
    assert comm.bytes_sent == NUM_BYTES


def test_computation_overlaps_an_exchange() -> None:
    comm, clock, inner = joined()
    exchange = comm.exchange(rows(), RandomPair(), 0)
    inner.cpu.seconds += 0.5
    exchange.mixture()
    assert clock.now() == pytest.approx(0.65)
    exchange = comm.exchange(rows(), RandomPair(), 1)
    inner.cpu.seconds += 3.0
    exchange.mixture()
    assert clock.now() == pytest.approx(3.65), "all of it was overlapped"


def test_two_neighbours_are_two_messages() -> None:
    comm, clock, _ = joined()
    comm.exchange(rows(), Ring(), 0).mixture().apply_(rows())
    assert clock.now() == pytest.approx(2 * 0.4 + 0.25)


def test_messages_leave_one_after_the_other() -> None:
    """Three averages at once: a ring sends 2 * 3 / 4 of the bytes, and takes six delays."""
    comm, clock, _ = joined()
    works = [comm.average_(rows()) for _ in range(3)]
    for number, work in enumerate(works, start=1):
        work.wait()
        assert clock.now() == pytest.approx(number * 0.6 + 6 * 0.25)
    clock.wait_until(100.0)
    comm.average_(rows()).wait()
    assert clock.now() == pytest.approx(102.1), "old messages delay no new one"


def test_a_late_learner_delays_only_those_who_need_it() -> None:
    topology = RandomPair()
    (partner,) = topology.round(0, 1, N).sources
    (stranger, *_) = {0, 2, 3} - {partner}
    comm, clock, inner = joined()
    inner.others = {stranger: 50.0}
    comm.exchange(rows(), topology, 0).mixture().apply_(rows())
    assert clock.now() == pytest.approx(0.65)
    inner.others = {partner: 50.0}
    comm.exchange(rows(), topology, 0).mixture().apply_(rows())
    assert clock.now() == pytest.approx(50.25)
    inner.others = {stranger: 60.0}
    comm.average_(rows()).wait()
    assert clock.now() == pytest.approx(60.0 + 6 * 0.25), "an average needs all"


@pytest.mark.parametrize("rank", [2, 3])
def test_an_average_of_a_group_is_a_ring_of_its_learners(rank: int) -> None:
    """Two of the four: each sends 2 * 1 / 2 of the bytes, two delays long, and waits for no other learner."""
    comm, clock, inner = joined(rank)
    inner.others = {0: 50.0, 1: 60.0}
    comm.average_(rows(), size=2).wait()
    assert clock.now() == pytest.approx(0.4 + 2 * 0.25)
    inner.others = {5 - rank: 50.0}
    comm.average_(rows(), size=2).wait()
    assert clock.now() == pytest.approx(50.0 + 2 * 0.25)


def test_mixing_without_overlap() -> None:
    comm, clock, _ = joined()
    comm.mix_(rows(), RandomPair(), 0)
    assert clock.now() == pytest.approx(0.65)


def test_now_is_the_latest_clock() -> None:
    comm, clock, inner = joined()
    inner.others = {2: 7.0}
    assert comm.now() == clock.now() == pytest.approx(7.0)
    inner.others = {2: 3.0}
    assert comm.now() == pytest.approx(7.0)


@pytest.mark.parametrize(("rank", "seconds"), [(0, 6.0), (1, 2.0)])
def test_a_slow_learner_computes_longer_and_waits_like_the_others(rank: int, seconds: float) -> None:
    comm, clock, inner = joined(rank, Link(bits_per_second=8e3, delay=0.25, slow=3.0))
    inner.cpu.seconds += 2.0
    assert clock.now() == pytest.approx(seconds)
    comm.exchange(rows(), RandomPair(), 0).mixture().apply_(rows())
    assert clock.now() == pytest.approx(seconds + 0.65)


@pytest.mark.parametrize(
    ("text", "values"),
    [("10Gb/s,50us", (1e10, 5e-5, 1.0)), ("0.5Mb/s,2ms", (5e5, 2e-3, 1.0)), ("1Gb/s,0us,slow=2.5", (1e9, 0.0, 2.5))],
)
def test_text(text: str, values: Sequence[float]) -> None:
    link = Link.parse(text)
    assert (link.bits_per_second, link.delay, link.slow) == pytest.approx(values)


@pytest.mark.parametrize(
    "text", ["10Gb/s", "10GB/s,50us", "-1Gb/s,50us", "1Gb/s,50us,2", "0Gb/s,50us", "1Gb/s,1us,slow=0.5"]
)
def test_no_link(text: str) -> None:
    with pytest.raises(ValueError, match="link is"):
        Link.parse(text)


def test_virtual_learners_and_baselines_have_no_link() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for strategy, learners in ((ddpcore.SSGD(), 2), (ddpcore.Single(), None)):
        with pytest.raises(ValueError, match=r"leave connection=Connection\(link=\) out"):
            ddpcore.distribute(model, optimizer, strategy, learners=learners, connection=ddpcore.Connection(link=LINK))


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return ranks.run("link_ranks", 3, timeout=900)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "pg"])
@pytest.mark.parametrize("name", helper.STRATEGIES)
def test_a_link_changes_no_bit(name: str, transport: str, seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        without, linked = rank[name, transport, None], rank[name, transport, helper.LINK]
        assert without["model"] == linked["model"]
        assert without["bytes_sent"] == linked["bytes_sent"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "pg"])
@pytest.mark.parametrize(("name", "delays"), [("ssgd", 4), ("ring", 1)])
def test_seconds_are_those_of_the_link(name: str, delays: int, transport: str, seen: list[dict[str, Any]]) -> None:
    """Each step takes at least the time of the link, and all ranks have the same clock."""
    everyone = [rank[name, transport, helper.LINK] for rank in seen]
    first = everyone[0]
    assert first["seconds"] > helper.NUM_STEPS * (8 * first["step_bytes"] / 1e6 + delays * 0.5)
    assert "an emulated link of 0.001 Gb/s" in first["communication"]
    assert [one["seconds"] for one in everyone] == [first["seconds"]] * 3
