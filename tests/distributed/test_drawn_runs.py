"""Promises of equal bits of a training run, for drawn models, optimizers and strategies."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm

from ddpcore.diagnostics import DataLoss, Hessian, HessianStatistics, NoiseStatistics
from helpers import drawn_runs, ranks
from helpers.drawn_runs import NUM_FAST, OPTIMIZERS, SEEDS, STEPS, STRATEGIES, Drawn, L
from helpers.each import each

pytestmark = pytest.mark.usefixtures("one_thread")
Change = Callable[[Drawn], Any]
NOT_MEASURED = {"noise": ("push", "grouped"), "hessian": ("push",)}  # refused


def trained(seed: int, at_start: Change = bool, in_the_middle: Change = bool, **options: Any) -> list[list[Tensor]]:
    run = Drawn(seed, **options)
    held = at_start(run)  # statistics live as long as the program holds them
    for step in range(STEPS):
        if step == STEPS // 2:
            in_the_middle(run)
        run.step(step)
    del held
    return run.state()


def assert_same(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> None:
    """Weights, buffers and gradients of all learners."""
    for learner, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        for index, (one, two) in enumerate(zip(left, right, strict=True)):
            assert torch.equal(one, two), f"learner {learner}, tensor {index} of {tuple(one.shape)}"


@pytest.fixture(scope="module")
def real(request: pytest.FixtureRequest) -> list[dict[Any, Any]]:
    """Of all seeds, or of the fast ones, as they are selected."""
    num = len(SEEDS) if ranks.has_slow_items(request) else NUM_FAST
    return ranks.run("drawn_runs", L, more=[[num]] * L)


@functools.cache
def usual(seed: int) -> list[list[Tensor]]:
    """The state that all properties of a run are compared with."""
    return trained(seed)


@each("seed", SEEDS, num_fast=NUM_FAST)
def test_ranks_have_the_bits_of_virtual_learners(seed: int, real: list[dict[Any, Any]]) -> None:
    """``docs/glossary.md``, ``docs/strategies.md`` and ``README.md``."""
    assert_same([rank[seed] for rank in real], usual(seed))


def test_ranks_train_each_strategy_over_each_transport() -> None:
    pairs = {(seed % len(STRATEGIES), drawn_runs.transport_of(seed)) for seed in SEEDS}
    assert len(pairs) == 2 * len(STRATEGIES)
    assert {Drawn(seed).make for seed in SEEDS} == {*OPTIMIZERS}


@each("seed", range(40), num_fast=NUM_FAST)
def test_a_resumed_run_has_the_bits_of_one_without_a_stop(seed: int) -> None:
    """``docs/resume.md``, ``docs/bits.md``."""
    assert_same(trained(seed, in_the_middle=Drawn.resume), usual(seed))


@each("seed", range(30), num_fast=NUM_FAST)
def test_learners_one_after_the_other_have_the_same_bits(seed: int) -> None:
    """``handle.split``."""
    assert_same(trained(seed, lambda run: setattr(run, "splits", True)), usual(seed))


def _full_loss(run: Drawn) -> Any:
    """With constant vectors of spectral norms: Hessians refuse those that follow the weights."""
    norms = [module for module in run.handle.model.modules() if isinstance(module, _SpectralNorm) and module.training]
    for norm in norms:
        norm.eval()
    try:
        return run.loss(77)
    finally:
        for norm in norms:
            norm.train()


def _noise(run: Drawn) -> Any:
    more = {"loss": lambda: run.loss(run.number), "full_loss": lambda: _full_loss(run), "hessian": True}
    return NoiseStatistics(run.handle, run.optimizer, 2, batch_size=3, directions=2, **more)


def _hessian(run: Drawn) -> Any:
    return HessianStatistics(run.handle, lambda: _full_loss(run), every=3, top=1, max_products=3, tolerance=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "statistics"), [("noise", _noise), ("hessian", _hessian)])
@each("seed", SEEDS, num_fast=NUM_FAST)
def test_statistics_change_no_bit(seed: int, what: str, statistics: Change) -> None:
    """``docs/noise_statistics.md``, ``docs/bits.md``, ``docs/curvature.md``."""
    if Drawn(seed).name not in NOT_MEASURED[what]:
        assert_same(trained(seed, statistics), usual(seed))


GROUPS = [(seed, strategy) for seed in range(400, 415) for strategy in ("grouped", "ssgd")]


@each(("seed", "strategy"), GROUPS, num_fast=14)
def test_learners_of_a_group_hold_the_same_bits_after_each_step(seed: int, strategy: str) -> None:
    """Weights, states and gradients (``docs/strategies.md``, "Groups")."""
    run, size = Drawn(seed, strategy=strategy), 2 if strategy == "grouped" else L
    for step in range(STEPS):
        run.step(step)
        found = []
        for model in run.handle.models:
            params = [param for param in model.parameters() if param.grad is not None]
            states = [value for param in params for value in run.optimizer.state[param].values()]
            found.append([tensor.clone() for tensor in [*params, *(param.grad for param in params), *states]])
        for learner, own in enumerate(found):
            assert_same([own], [found[learner // size * size]])


@each("seed", range(500, 530), num_fast=8)
def test_learners_that_never_average_have_the_bits_of_plain_loops(seed: int) -> None:
    """ "L virtual learners and L optimizers" (``docs/optimizers.md``)."""
    run = Drawn(seed, strategy="never")
    models = [copy.deepcopy(one) for one in run.handle.models]
    assert run.make in OPTIMIZERS
    optimizers = [run.make(model, run.clips) for model in models]
    for step in range(STEPS):
        run.step(step)
        for learner, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            for part in range(run.accumulation):
                number = 2 * step + 1 if part == run.accumulation - 1 else 2 * step + part
                loss = nn.functional.cross_entropy(model(run.inputs(number)[learner]), run.labels(number)[learner])
                (loss / run.accumulation).backward()
            optimizer.step()
    for ours, model in zip(run.state(), models, strict=True):
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        assert_same([ours], [[*model.state_dict().values(), *grads]])


@each("seed", range(600, 621), num_fast=7)
def test_a_hessian_has_the_same_bits_in_each_run(seed: int) -> None:
    """``docs/curvature.md``."""
    ends = []
    for _ in range(2):
        run = Drawn(seed, strategy="ssgd")
        data = DataLoss(run.model, nn.functional.cross_entropy, [(run.inputs(0)[0], run.labels(0)[0])])
        hessian = Hessian(run.model.eval(), data)
        products = hessian.product(torch.randn(2, hessian.numel, generator=torch.Generator().manual_seed(5)))
        found = hessian.eigenvalues(1, 1, tolerance=0.1)
        trace = hessian.trace(num_products=6)
        ends.append([products, torch.from_numpy(found.values), found.vectors, torch.tensor([trace.value])])
    assert_same(*([one] for one in ends))
