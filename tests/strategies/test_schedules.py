"""Periods, topologies and shares of averages that change over a run, against their equations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddpcore
from ddpcore import (
    DPSGD,
    Complete,
    GASLoC,
    Hierarchical,
    LocalSGD,
    Milestones,
    NoLoCo,
    RandomPair,
    Ring,
    Scheduled,
    Weighted,
)
from ddpcore.optim.schedules import cosine
from ddpcore.strategies.base import check_run
from ddpcore.testing import check_strategy, check_topology
from ddpcore.topology.registry import TOPOLOGIES
from ddpcore.training import TrainConfig
from ddpcore.training.build import build_batches, check_parts, read_dataset
from helpers import training

N = 4
LATE = [[0, 6], [6, 2], [10, 1]]  # averages after 6, 8, 10, 11 and 12 steps
DUE = [6, 8, 10, 11, 12]


class Run:
    """Learners that add numbers of their own to their weights in each step."""

    def __init__(self, strategy: ddpcore.Strategy) -> None:
        self.model = nn.Linear(3, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.handle = ddpcore.distribute(self.model, self.optimizer, strategy, learners=N)
        self.w, self.steps = self.weights(), torch.randn(12, N, 1, 3, dtype=torch.float64)

    def weights(self) -> Tensor:
        return training.rows_of(self.handle, "weight").double()

    def step(self, number: int) -> None:
        """Call step ``number``, counted from 0, and its equation without an average."""
        self.optimizer.zero_grad()
        self.handle.model(-self.steps[number].float()).sum().backward()
        self.optimizer.step()
        self.w = self.w + self.steps[number]


def mixed(rows: Tensor, topology: ddpcore.Topology, step: int) -> Tensor:
    return torch.einsum("jk,k...->j...", torch.from_numpy(topology.matrix(step, N)), rows)


@pytest.mark.parametrize("as_function", [False, True])
@pytest.mark.parametrize("make", [LocalSGD, GASLoC, NoLoCo])
def test_period(make: Any, as_function: bool) -> None:
    """The length of a round is that of the step at which it begins; the r-th average is by W(r)."""
    topology = ddpcore.OnePeerExponential()
    options: dict[str, Any] = {"topology": topology}
    if make is not LocalSGD:
        options |= {"outer_lr": 1.0, "outer_momentum": 0.0}
    schedule: Any = Milestones(LATE) if as_function else LATE
    run = Run(make(period=(lambda step: schedule(step)) if as_function else schedule, **options))
    for step in range(12):
        assert run.handle.strategy.plan(step).weights == (step + 1 in DUE)
        run.step(step)
        if step + 1 in DUE:
            run.w = mixed(run.w, topology, DUE.index(step + 1))
        torch.testing.assert_close(run.weights(), run.w, rtol=1e-5, atol=1e-5)


def test_period_after_a_switch_and_with_overlap() -> None:
    run = Run(LocalSGD([[0, 5], [7, 3]], switch_step=2, overlap=1))  # rounds of steps 2 to 6, 7 to 9, 10 to 12
    for step in range(12):
        run.step(step)
        if step < 2:
            run.w = run.w - run.steps[step] + run.steps[step].mean(0)
        if step + 1 in (7, 10):
            run.w = (run.w - run.steps[step]).mean(0).expand_as(run.w)  # of the weights of the step before
        torch.testing.assert_close(run.weights(), run.w, rtol=1e-5, atol=1e-5)


def test_alpha() -> None:
    """The share of the own weights that an average leaves."""
    run = Run(LocalSGD(2, alpha=[[0, 0.75], [6, 0.25]]))
    for step in range(12):
        run.step(step)
        if step % 2:
            alpha = 0.75 if step < 6 else 0.25
            run.w = alpha * run.w + (1 - alpha) * run.w.mean(0)
        torch.testing.assert_close(run.weights(), run.w, rtol=1e-5, atol=1e-5)


def test_share_of_gossip() -> None:
    topology, share = Ring(), cosine(1.0, 24)
    run = Run(DPSGD(topology, order="adapt_then_combine", consensus=share))
    for step in range(12):
        run.step(step)
        run.w = (1 - share(step)) * run.w + share(step) * mixed(run.w, topology, step)
        torch.testing.assert_close(run.weights(), run.w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [DPSGD, GASLoC])
def test_topology(make: Any) -> None:
    """Milestones are steps, also where a round of the topology is several steps."""
    parts = RandomPair(seed=3), Complete()
    topology = Scheduled(((0, parts[0]), (6, parts[1])))
    options = {"order": "adapt_then_combine"} if make is DPSGD else {"period": 2, "outer_lr": 1.0, "outer_momentum": 0}
    run = Run(make(topology, **options))
    period = 1 if make is DPSGD else 2
    for step in range(12):
        run.step(step)
        if (step + 1) % period == 0:
            run.w = mixed(run.w, parts[step >= 6], step // period)
        torch.testing.assert_close(run.weights(), run.w, rtol=1e-5, atol=1e-5)
    assert run.handle.consensus_distance() < 1e-5


@pytest.mark.parametrize("make", [LocalSGD, GASLoC])
def test_a_schedule_inside_of_another_topology(make: Any) -> None:
    """Its milestones are steps too; they were rounds."""
    options = {} if make is LocalSGD else {"outer_lr": 1.0, "outer_momentum": 0.0}
    for wrap in (partial(Weighted, weights=(1.0, 2.0, 3.0, 4.0)), partial(Hierarchical, 1)):
        parts = [wrap(Ring()), wrap(Complete())]
        run = Run(make(period=2, topology=wrap(Scheduled([(0, Ring()), (6, Complete())])), **options))
        for step in range(12):
            run.step(step)
            if step % 2:
                run.w = mixed(run.w, parts[step >= 6], step // 2)
            torch.testing.assert_close(run.weights(), run.w, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("forked_ranks")
def test_ranks() -> None:
    """Real ranks over both transports, accumulation, and a run from a saved state have the bits of virtual learners."""
    topology = Scheduled([(0, Ring()), (3, Complete())])
    check_topology(topology)
    check_strategy(partial(GASLoC, topology, period=[[0, 2], [2, 1]]), num_learners=(2,))
    check_strategy(partial(LocalSGD, [[0, 3], [3, 1]], alpha=[[0, 0.5], [3, 0.1]]), num_learners=(2,))


def test_settings_of_a_file() -> None:
    named = TOPOLOGIES.build("scheduled", stages=[[0, "ring"], [5, {"name": "random_pair", "num_partners": 2}]], seed=7)
    assert named == Scheduled(((0, Ring()), (5, RandomPair(seed=7, num_partners=2))))
    assert named.spectral_gap(N) == RandomPair(seed=7, num_partners=2).spectral_gap(N)
    config = run_config(
        name="gasloc", period=LATE, topology={"name": "scheduled", "stages": [[0, "ring"], [5, "star"]]}
    )
    check_parts(config, read_dataset(config, first=True))
    assert config.checked_strategy.period == Milestones(LATE)
    assert "period=Milestones(stages=((0, 6), (6, 2), (10, 1)))" in repr(config.checked_strategy)
    assert TrainConfig.from_dict(config.to_dict()).difference(config.to_dict()) == []
    names = [repr(make(period=lambda step: 3)) for make in (LocalSGD, GASLoC, NoLoCo)]
    assert not any("0x" in name for name in names), "a checkpoint is loaded into a strategy with the same text"


def run_config(**strategy: Any) -> TrainConfig:
    return TrainConfig.from_dict(
        {"model": "mlp", "data": {"name": "digits", "batch_size": 40}, "run": {"steps": 12}}
        | {"strategy": {"learners": N, **strategy}}
    )


MAKERS: dict[str, tuple[Callable[[], Any], str]] = {
    "zero": (lambda: LocalSGD([[0, 4], [8, 0]]), "local_sgd: period at step 8 is 0: it must be at least 1"),
    "zero of a function": (lambda: GASLoC(period=lambda step: 0), "gasloc: period at step 0 is 0: it must be at least"),
    "overlap": (lambda: LocalSGD([[0, 4], [8, 2]], overlap=2), "period at step 8 is 2: it must be at least 3"),
    "not whole": (lambda: NoLoCo(period=[[0, 2.5]]), "noloco: period is 2.5: it must be a whole number"),
    "fragments": (lambda: LocalSGD([[0, 4]], fragments=2), "fragments is 2: it must be at least 1 and at most 1"),
    "warm-up": (lambda: LocalSGD([[0, 4]], warmup_steps=2), "local_sgd: period needs a period that does not grow"),
    "late": (lambda: LocalSGD([[1, 4]]), r"period is \[\[1, 4\]\]: it must be pairs of a step and a value"),
    "descending": (lambda: Milestones([[0, 4], [3, 2], [3, 1]]), "ascending order from step 0"),
    "pairs": (lambda: Milestones([0, 4]), "it must be pairs"),
    "none": (lambda: Milestones([]), "it must be pairs"),
    "share": (lambda: DPSGD(consensus=[[0, 0.5], [4, 0.0]]), "dpsgd: consensus at step 4 is 0.0: it must be above 0"),
    "alpha": (lambda: LocalSGD(alpha=[[0, 1.5]]), "alpha at step 0 is 1.5: it must be at least 0 and at most"),
    "stale": (lambda: DPSGD(consensus=[[0, 0.5]], staleness=1), "take staleness 0"),
    "topology": (lambda: Scheduled([(0, "ring")]), "Scheduled: a stage has 'ring': pass an instance"),
    "name": (lambda: TOPOLOGIES.build("scheduled", stages=[[0, "rnig"]]), "did you mean 'ring'"),
}  # fmt: skip


@pytest.mark.parametrize("case", MAKERS)
def test_schedules_that_cannot_be(case: str) -> None:
    make, message = MAKERS[case]
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            {"name": "gasloc", "period": [[0, 4], [12, 1]]},
            "gasloc: period has the step 12: the run ends after 12 steps",
        ),
        ({"name": "local_sgd", "alpha": [[0, 0.5], [40, 0.1]]}, "alpha has the step 40: the run ends after 12 steps"),
        ({"name": "dpsgd", "consensus": [[0, 0.5], [12, 0.1]]}, "consensus has the step 12: the run ends after 12"),
        (
            {"name": "dpsgd", "topology": {"name": "scheduled", "stages": [[0, "ring"], [12, "star"]]}},
            "strategy.topology has the step 12: the run ends after 12 steps",
        ),
    ],
)
def test_schedules_past_the_run(strategy: dict[str, Any], message: str) -> None:
    config = run_config(**strategy)
    with pytest.raises(ValueError, match=message):
        check_parts(config, read_dataset(config, first=True))


def test_local_sgd_of_a_file_gossips_by_names() -> None:
    options = {"name": "local_sgd", "period": 3, "outer": {"lr": 0.7}, "gossip": "ring"}
    config = run_config(**options, then={"name": "random_pair", "seed": 3})
    made = config.make_strategy()
    assert isinstance(made, LocalSGD)
    assert (made.topology, made.then) == (Ring(), RandomPair(3))
    paired = run_config(name="local_sgd", gossip="random_pair")
    assert paired.make_strategy().topology == RandomPair(paired.run.seed)
    assert run_config(name="local_sgd").make_strategy().topology is None
    with pytest.raises(ValueError, match="local_sgd: then averages once more what gossip has averaged: name its"):
        run_config(name="local_sgd", then="ring").make_strategy()
    with pytest.raises(ValueError, match="unknown topology 'rng': did you mean 'ring'"):
        run_config(name="local_sgd", gossip="rng").make_strategy()


def test_functions_are_checked_over_the_whole_run() -> None:
    config = run_config(name="local_sgd")
    assert build_batches(config, read_dataset(config, first=True)).num_learners == N
    for strategy in (LocalSGD(period=lambda step: 9 - step), GASLoC(period=lambda step: 9 - step)):
        check_run(strategy, 9)
        with pytest.raises(ValueError, match="period at step 9 is 0: it must be at least 1"):
            check_run(strategy, 10)
