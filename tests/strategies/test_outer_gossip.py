"""Outer steps that average with neighbours, against their equations in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddpcore
from ddpcore import GASLoC, LocalSGD, NoLoCo
from helpers import training

N, PERIOD, LR = 4, 3, 0.01
PAIRS = ddpcore.RandomPair(seed=4)


class Run:
    """Learners on least squares with data of their own. ``local_step`` is the equation's."""

    def __init__(self, strategy: ddpcore.Strategy, learners: int = N) -> None:
        torch.manual_seed(0)
        self.inputs, self.targets = torch.randn(learners, 6, 4), torch.randn(learners, 6, 2)
        self.model = nn.Linear(4, 2, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.handle = ddpcore.distribute(self.model, self.optimizer, strategy, learners=learners, vectorize=False)
        self.w = self.weights()

    def weights(self) -> Tensor:
        return training.rows_of(self.handle, "weight").double()

    def step(self) -> None:
        self.optimizer.zero_grad()
        (0.5 * (self.handle.model(self.inputs) - self.targets).square()).sum().backward()
        self.optimizer.step()

    def local_step(self) -> None:
        x, y = self.inputs.double(), self.targets.double()
        self.w = self.w - LR * torch.einsum("jbo,jbi->joi", torch.einsum("jbi,joi->jbo", x, self.w) - y, x)


def mixed(rows: Tensor, topology: ddpcore.Topology, round_: int) -> Tensor:
    return torch.einsum("jk,k...->j...", torch.from_numpy(topology.mixing_matrix(round_, len(rows)).dense()), rows)


@pytest.mark.parametrize("topology", [PAIRS, ddpcore.OnePeerExponential(), ddpcore.Ring()], ids=str)
def test_noloco(topology: ddpcore.Topology) -> None:
    """Each round averages by the next W, whatever the period."""
    run = Run(NoLoCo(topology, period=PERIOD, outer_lr=0.7, outer_momentum=0.5))
    phi, momentum = run.w, torch.zeros_like(run.w)
    for step in range(1, 4 * PERIOD + 1):
        run.local_step()
        run.step()
        if step % PERIOD == 0:
            momentum = 0.5 * momentum + 0.7 * (mixed(run.w, topology, step // PERIOD - 1) - phi)
            phi = run.w = phi + momentum
        torch.testing.assert_close(run.weights(), run.w, rtol=1e-5, atol=1e-5)
    assert run.handle.consensus_distance() > 1e-3


def test_noloco_of_all_is_diloco_with_heavy_ball_momentum() -> None:
    strategies = (
        NoLoCo(ddpcore.Complete(), period=PERIOD, outer_lr=0.7, outer_momentum=0.5),
        LocalSGD(PERIOD, outer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.5)),
    )
    runs = [Run(strategy) for strategy in strategies]
    for _ in range(4 * PERIOD):
        for run in runs:
            run.step()
    torch.testing.assert_close(runs[0].weights(), runs[1].weights(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("topology", [PAIRS, ddpcore.Ring(), ddpcore.Complete()], ids=str)
def test_gasloc(topology: ddpcore.Topology) -> None:
    run = Run(GASLoC(topology, period=PERIOD, outer_lr=0.7, outer_momentum=0.6))
    phi = before = run.w
    mean_phi, mean_momentum = run.w.mean(0), torch.zeros_like(run.w[0])
    for step in range(1, 5 * PERIOD + 1):
        run.local_step()
        run.step()
        if step % PERIOD == 0:
            way = (phi - run.w).mean(0)  # DiLoCo's pseudo-gradient
            mean_momentum = 0.6 * mean_momentum + way
            mean_phi = mean_phi - 0.7 * (way + 0.6 * mean_momentum)
            z = phi + 0.7 * (run.w - phi)
            phi = run.w = mixed(z, topology, step // PERIOD - 1) + 0.6 * (z - before)
            before = z
            torch.testing.assert_close(phi.mean(0), mean_phi, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(run.weights(), run.w, rtol=1e-5, atol=1e-5)
    assert run.handle.consensus_distance() > 1e-3  # on a complete graph, too: the momentum is not averaged


def test_gasloc_of_all_without_momentum_is_local_sgd() -> None:
    strategies = GASLoC(ddpcore.Complete(), period=PERIOD, outer_lr=1.0, outer_momentum=0.0), LocalSGD(PERIOD)
    runs = [Run(strategy) for strategy in strategies]
    for _ in range(4 * PERIOD):
        for run in runs:
            run.step()
    torch.testing.assert_close(runs[0].weights(), runs[1].weights(), rtol=1e-5, atol=1e-6)


def test_gasloc_of_one_learner_is_nesterov_momentum() -> None:
    outer = LocalSGD(PERIOD, outer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.6, nesterov=True))
    with pytest.warns(UserWarning, match="nothing is averaged"):
        runs = [Run(GASLoC(period=PERIOD, outer_lr=0.7, outer_momentum=0.6), 1), Run(outer, 1)]
    for _ in range(4 * PERIOD):
        for run in runs:
            run.step()
    torch.testing.assert_close(runs[0].weights(), runs[1].weights(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("overlap", [0, 1])
def test_two_mixes_a_round(overlap: int) -> None:
    """The outer step along the first average, of ``overlap`` steps before the end, and then the second average."""
    first, then = PAIRS, ddpcore.Ring()
    run = Run(LocalSGD(PERIOD, topology=first, outer=heavy_ball, overlap=overlap, alpha=0.2, then=then))
    phi, momentum, sent = run.w, torch.zeros_like(run.w), run.w
    for step in range(1, 5 * PERIOD + 1):
        run.local_step()
        run.step()
        if (step + overlap) % PERIOD == 0:
            sent = run.w
        if step % PERIOD == 0:
            momentum = 0.5 * momentum + phi - mixed(sent, first, step // PERIOD - 1)
            phi = mixed(phi - 0.7 * momentum, then, step // PERIOD - 1)
            run.w = phi + 0.2 * (run.w - phi)
        torch.testing.assert_close(run.weights(), run.w, rtol=1e-5, atol=1e-5)
    assert run.handle.consensus_distance() > 1e-4


def heavy_ball(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.5)


def two_mixes(then: ddpcore.Topology, **options: Any) -> LocalSGD:
    return LocalSGD(PERIOD, topology=ddpcore.Ring(), then=then, **options)


LAZY = ddpcore.Ring(self_weight=0.5)
SAME = {
    "gasloc": (two_mixes(LAZY), GASLoC(
        ddpcore.FromMatrix(LAZY.matrix(0, N) @ ddpcore.Ring().matrix(0, N)),
        period=PERIOD, outer_lr=1.0, outer_momentum=0.0,
    )),
    "diloco": (two_mixes(ddpcore.Complete(), outer=heavy_ball), LocalSGD(PERIOD, outer=heavy_ball)),
    "noloco": (LocalSGD(PERIOD, topology=PAIRS, outer=heavy_ball), NoLoCo(PAIRS, period=PERIOD)),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_cases_of_two_mixes(name: str) -> None:
    """Two mixes are one with their product; a second one of all gives DiLoCo; without it NoLoCo is left."""
    runs = [Run(strategy) for strategy in SAME[name]]
    for _ in range(4 * PERIOD):
        for run in runs:
            run.step()
    torch.testing.assert_close(runs[0].weights(), runs[1].weights(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("topology", [None, PAIRS], ids=str)
def test_restart_of_the_outer_momentum(topology: ddpcore.Topology | None) -> None:
    """Rounds count from the first one, also after steps that average gradients."""
    for switch in (0, PERIOD, PERIOD + 1):
        run = Run(LocalSGD(PERIOD, topology=topology, outer=heavy_ball, restart=2, switch_step=switch))
        for _ in range(switch):
            run.step()
        phi = run.w = run.weights()
        momentum = torch.zeros_like(run.w)
        for step in range(1, 6 * PERIOD + 1):
            run.local_step()
            run.step()
            if step % PERIOD == 0:
                average = run.w.mean(0) if topology is None else mixed(run.w, topology, step // PERIOD - 1)
                momentum = 0.5 * momentum + phi - average
                phi = run.w = phi - 0.7 * momentum
                momentum = momentum * (step // PERIOD % 2)  # forgotten after rounds 2, 4, 6
            torch.testing.assert_close(run.weights(), run.w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("inner", ["adamw", "muon"])
@pytest.mark.parametrize("make", [NoLoCo, GASLoC])
def test_other_optimizers_inside(make: Any, inner: str) -> None:
    """The loss of the average falls, although the learners stay apart."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    inputs = torch.randn(N, 32, 4)
    targets = torch.stack((inputs[..., 0] * inputs[..., 1], inputs[..., 2]), dim=-1)
    rule = ddpcore.optim.FusedAdamW(model.parameters(), lr=0.02)
    if inner == "muon":
        rule = ddpcore.optim.Muon(ddpcore.optim.param_groups(model, weight_decay=0.0, rule="muon"), lr=0.02)
    handle = ddpcore.distribute(model, rule, make(PAIRS, period=4), learners=N)

    def loss() -> float:
        averaged = handle.evaluation_model()
        with torch.no_grad():
            return (averaged(inputs.flatten(0, 1)) - targets.flatten(0, 1)).square().mean().item()

    before = loss()
    for _ in range(60):
        rule.zero_grad()
        (handle.model(inputs) - targets).square().mean(dim=(1, 2)).sum().backward()
        rule.step()
    assert loss() < 0.6 * before
    assert handle.consensus_distance() > 1e-3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NoLoCo(period=0), "noloco: period is 0"),
        (lambda: NoLoCo(outer_lr=0.0), "noloco: outer_lr is 0"),
        (lambda: NoLoCo(outer_momentum=1.0), "noloco: outer_momentum is 1"),
        (lambda: NoLoCo("random_pair"), "noloco: topology is 'random_pair': pass an instance"),
        (lambda: GASLoC(period=0), "gasloc: period is 0"),
        (lambda: GASLoC(outer_lr=-1.0), "gasloc: outer_lr is -1"),
        (lambda: GASLoC(outer_momentum=1.5), "gasloc: outer_momentum is 1.5"),
        (lambda: GASLoC("ring"), "gasloc: topology is 'ring': pass an instance"),
        (lambda: LocalSGD(topology=PAIRS, then="ring"), "local_sgd: then: topology is 'ring': pass an instance"),
        (lambda: LocalSGD(then=PAIRS), "local_sgd: then averages once more what topology has averaged: pass topology"),
        (lambda: LocalSGD(restart=2), "local_sgd: restart is 2 and there is no outer optimizer: pass outer"),
        (lambda: LocalSGD(outer=heavy_ball, restart=-1), "local_sgd: restart is -1: it must be at least 0"),
        (lambda: LocalSGD(4, outer=heavy_ball, restart=2, warmup_steps=8), "restart needs a period that does not grow"),
    ],
)
def test_impossible_options(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("make", [NoLoCo, GASLoC])
def test_what_they_refuse(make: Any) -> None:
    narrow = nn.Linear(2, 2).bfloat16()
    with pytest.raises(ValueError, match=r"16 bits: keep parameters in float32"):
        ddpcore.distribute(narrow, torch.optim.SGD(narrow.parameters(), lr=0.1), make(), learners=2)
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"on_failure='(raise|shrink)'"):
        ddpcore.distribute(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            make(),
            learners=4,
            connection=ddpcore.Connection(on_failure="shrink"),
        )
