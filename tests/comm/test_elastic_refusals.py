"""What ``on_failure`` refuses, and virtual learners that die by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddpcore
from ddpcore.comm.membership import Change, Membership
from ddpcore.optim import FusedSGD, Muon
from ddpcore.strategies.compression import TopK
from ddpcore.strategies.dpsgd import ORDERS
from ddpcore.topology.wrapped import redrawn
from helpers import ranks
from helpers.connection import connected

LEFT = Membership((0, 1, 3), first=4)


def start(strategy: Any, **options: Any) -> Any:
    model = nn.Linear(3, 2)
    return ddpcore.distribute(model, FusedSGD(model.parameters(), lr=0.1), strategy, **connected(**options))


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        (ddpcore.SSGD(), {"learners": 4, "on_failure": "ignore"}, "on_failure is 'ignore': choose from raise, shrink"),
        (
            ddpcore.Single(),
            {"on_failure": "shrink"},
            r"single does not use these options: leave connection=Connection\(on_failure=\) out",
        ),
        (
            ddpcore.DDP(),
            {"on_failure": "shrink"},
            r"ddp does not use these options: leave connection=Connection\(on_failure=\) out",
        ),
        (ddpcore.SSGD(), {"learners": 2, "on_failure": "shrink"}, "needs 2 learners after a death and there are 2"),
        (ddpcore.SSGD(), {"learners": 3, "membership": LEFT}, "pass that, or leave membership= out"),
        (ddpcore.Single(), {"membership": LEFT}, "pass that, or leave membership= out"),
        (
            ddpcore.SSGD(),
            {"learners": 4, "on_failure": "shrink", "membership": LEFT},
            r"the run has 3 learners left, \[0, 1, 3\]: start as many ranks",
        ),
        (ddpcore.DPSGD(ddpcore.Ring(), compression=TopK()), {"learners": 4, "on_failure": "shrink"}, "topk sends diff"),
    ],
)
def test_refused_in_one_line(strategy: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        start(strategy, **options)
    assert "\n" not in str(error.value)


def test_an_optimizer_whose_group_keeps_the_dead_is_refused() -> None:
    model = nn.Linear(3, 2, bias=False)
    optimizer = Muon(model.parameters(), lr=0.1, process_group=object())  # type: ignore[arg-type]
    message = "Muon has a process_group, whose ranks must not die, and on_failure is 'shrink': leave process_group out"
    with pytest.raises(ValueError, match=message):
        ddpcore.distribute(model, optimizer, ddpcore.SSGD(), **connected(learners=4, on_failure="shrink"))
    with pytest.raises(ValueError, match=message):
        ddpcore.join(model, optimizer, ddpcore.SSGD(), dist.HashStore(), **connected(timeout=0.1))


def test_only_virtual_learners_that_may_die_are_lost_by_hand() -> None:
    with pytest.raises(ValueError, match="only virtual learners with on_failure='shrink'"):
        start(ddpcore.SSGD(), learners=4).lose(1)
    handle = start(ddpcore.DPSGD(), learners=4, on_failure="shrink")
    with pytest.raises(ValueError, match=r"learner 7 is not among those that are left, \[0, 1, 2, 3\]"):
        handle.lose(7)
    with pytest.raises(ValueError, match="operation 0 is over"):
        handle.play([Change(operation=0, step=0, members=(0, 1, 2), lost=(3,))])


def test_the_mass_of_push_sum_is_that_of_the_living() -> None:
    """What the dead learner held is lost, mixing keeps what is left, and averages weigh by it."""
    torch.manual_seed(0)
    graph = ddpcore.OnePeerExponential()
    handle = start(ddpcore.PushSum(graph), learners=4, on_failure="shrink")
    strategy = handle.strategy
    strategy._push_weights = handle.learner.shares = torch.tensor([0.5, 1.5, 0.75, 1.25], dtype=torch.float64)
    for step in range(3):
        if step == 1:
            held = strategy._push_weights[2].item()
            handle.lose(2)
        handle.model(torch.randn(4, 5, 3)).sum().backward()
        handle.learner.optimizer.step()
    shares = handle.learner.shares
    assert shares.shape == (3,)
    assert shares.sum().item() == pytest.approx(4 - held)
    rows = handle.learner.flat.param_LP[[0, 1, 3]].double()
    expected = (shares[:, None] * rows).sum(dim=0) / shares.sum()
    average = handle.learner.average_of(handle.learner.flat.param_LP)[0].double()
    torch.testing.assert_close(average, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("number", [1e20, float("nan")])
def test_nothing_reads_a_learner_that_is_gone(number: float) -> None:
    """Its weights become huge, or NaN, and all others stay small, also in evaluation."""
    torch.manual_seed(0)
    handle = start(ddpcore.DPSGD(ddpcore.Complete()), learners=5, on_failure="shrink")
    handle.lose(0)
    for step in range(4):
        with torch.no_grad():
            for parameter in handle.models[0].parameters() if step else ():  # it dies in the first exchange
                parameter.fill_(number)
        handle.model(torch.randn(5, 4, 3)).sum().backward()
        handle.learner.optimizer.step()
    assert handle.learner.flat.param_LP[1:].abs().max() < 1e3
    assert all(parameter.abs().max() < 1e3 for parameter in handle.evaluation_model().parameters())
    assert handle.consensus_distance() < 1e3
    assert [change.lost for change in handle.changes] == [(0,)]


@pytest.mark.parametrize(
    ("topology", "num", "expected"),
    [
        (ddpcore.RandomPair(seed=3), 5, ddpcore.RandomPair(seed=3)),
        (ddpcore.Hypercube(), 7, ddpcore.Ring()),
        (ddpcore.Hypercube(), 4, ddpcore.Hypercube()),
        (ddpcore.Ring(2), 4, ddpcore.Ring()),
        (ddpcore.Torus2D(), 7, ddpcore.Ring()),
    ],
)
def test_redrawn_topologies_are_doubly_stochastic(topology: Any, num: int, expected: Any) -> None:
    drawn = redrawn(topology, num)
    assert drawn == expected
    drawn.validate(num)


def averaged(strategy: Any, num_steps: int = 2) -> tuple[Any, torch.Tensor]:
    """The handle of eight learners with weights of their numbers, of which 5 dies; a weight of each that is left."""
    handle = start(strategy, learners=8, on_failure="shrink")
    handle.learner.optimizer.param_groups[0]["lr"] = 0.0
    for row, one in enumerate(handle.models):
        nn.init.constant_(one.weight, float(row))
    handle.lose(5)
    for _ in range(num_steps):
        handle.model(torch.ones(8, 1, 3)).sum().backward()
        handle.learner.optimizer.step()
    return handle, torch.stack([handle.models[one].weight[0, 0].detach() for one in LEFT_OF_8])


LEFT_OF_8 = (0, 1, 2, 3, 4, 6, 7)
RING_OF_7 = torch.from_numpy(ddpcore.Ring().mixing_matrix(0, 7).dense())


def test_codecs_of_weights_take_the_redrawn_topology() -> None:
    for order, topology in zip(ORDERS, (ddpcore.Hypercube(), ddpcore.Torus2D(), ddpcore.Hierarchical(2)), strict=True):
        for codec in ("bf16", "int8"):
            _, found = averaged(ddpcore.DPSGD(topology, order=order, compression=codec))
            expected = RING_OF_7 @ RING_OF_7 @ torch.tensor(LEFT_OF_8, dtype=torch.float64)
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.05)


def test_the_share_of_an_average_stays_when_the_topology_is_redrawn() -> None:
    """And one topology is kept, not one for each step."""
    for topology in (ddpcore.Ring(), ddpcore.Hypercube(), ddpcore.Torus2D(), ddpcore.Hierarchical(2)):
        handle, found = averaged(ddpcore.DPSGD(topology, consensus=lambda _: 0.1), num_steps=3)
        expected = torch.tensor(LEFT_OF_8, dtype=torch.float64)
        for _ in range(3):
            expected = 0.9 * expected + 0.1 * RING_OF_7 @ expected
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
        assert len(handle.comm.membership._known) == 1


def test_ranks_that_cannot_share_memory_take_the_process_group_unless_they_asked_for_memory() -> None:
    for found in ranks.run("unreachable_ranks", 3):
        assert found["auto"].startswith("torch.distributed, gloo")
        assert found["shm"] == "there is no memory that ranks share"
