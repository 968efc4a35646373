"""AD-PSGD on virtual learners, against a replay that follows a clock and knows no steps of a training loop."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddpcore
from ddpcore import ADPSGD, Complete, OnePeerExponential, RandomPair, Ring
from ddpcore.diagnostics import HessianStatistics, NoiseStatistics
from ddpcore.distributed.saved import load_run_state, run_state
from ddpcore.optim import FusedAdamW, FusedSGD
from ddpcore.strategies.base import check_deaths
from ddpcore.testing import check_strategy
from ddpcore.training import TrainConfig
from helpers.adpsgd_runs import (
    CURVATURES,
    MINIMA,
    MOMENTUM,
    RATE,
    SGD,
    SIZE,
    SPEEDS,
    STEPS,
    N,
    Quadratic,
    Run,
    expect_refusal,
    replayed_events,
)
from helpers.training import assert_near, mlp, weights_of_learners


@pytest.mark.parametrize("topology", [Complete(), Ring(), RandomPair(3), OnePeerExponential()], ids=repr)
@pytest.mark.parametrize("speeds", SPEEDS.values(), ids=SPEEDS)
def test_events_follow_a_clock(speeds: Any, topology: Any) -> None:
    strategy = ADPSGD(topology, speeds=speeds, seed=5)
    events = [tuple(event) for step in range(40) for event in strategy.events(step, N)]
    assert events == replayed_events(strategy, speeds, 40)
    assert len(events) == sum(int(40 * Fraction(speed).limit_denominator(1000)) for speed in speeds)


def test_events_of_one_time_are_in_random_order() -> None:
    orders = {tuple(event.learner for event in ADPSGD(seed=1).events(step, N)) for step in range(200)}
    assert len(orders) == 24
    peers = {(event.learner, event.peer) for step in range(200) for event in ADPSGD(seed=1).events(step, N)}
    assert peers == {(i, j) for i in range(N) for j in range(N) if i != j}
    assert ADPSGD(seed=1).events(0, N) == ADPSGD(seed=1).events(0, N)
    assert [ADPSGD(seed=1).events(s, N) for s in range(9)] != [ADPSGD(seed=2).events(s, N) for s in range(9)]


def test_a_partner_of_a_random_pair_is_the_peer() -> None:
    for step in range(20):
        for _, learner, peer in ADPSGD(RandomPair(seed=2), seed=1).events(step, 5):
            assert (peer,) == (RandomPair(seed=2).round(step, learner, 5).sources or (learner,))


@pytest.mark.parametrize("topology", [Complete(), Ring(), RandomPair(3)], ids=repr)
@pytest.mark.parametrize("speeds", SPEEDS.values(), ids=SPEEDS)
def test_weights_against_a_replay(speeds: Any, topology: Any) -> None:
    """The gradient is that of the weights at the job's start, and momentum moves once a job."""
    strategy = ADPSGD(topology, speeds=speeds, seed=3)
    run, events = Run(strategy), replayed_events(strategy, speeds, STEPS)
    weights, momentum, updates = np.zeros((3, N, SIZE))

    def begin(learner: int, now: Fraction) -> None:
        batch = math.ceil(now)  # the next one that the loop hands out
        if batch < STEPS:
            gradient = CURVATURES[learner] * (weights[learner] - MINIMA[batch, learner])
            momentum[learner] = MOMENTUM * momentum[learner] + gradient
            updates[learner] = -RATE * momentum[learner]

    for learner in range(N):
        begin(learner, Fraction(0))
    for step in range(STEPS):
        while events and events[0][0] <= step + 1:
            now, i, j = events.pop(0)
            weights[i] = weights[j] = (weights[i] + weights[j]) / 2
            weights[i] = weights[i] + updates[i]
            begin(i, now)
        torch.testing.assert_close(run.step(), torch.from_numpy(weights), rtol=0, atol=2e-6)


@pytest.mark.parametrize("speeds", SPEEDS.values(), ids=SPEEDS)
def test_averages_do_not_move_the_mean(speeds: Any) -> None:
    """At rate 0: only by rounding, at most half a unit of the last place in each average. Learners agree."""
    run = Run(ADPSGD(speeds=speeds), lambda p: torch.optim.SGD(p, lr=0.0))
    start = run.start_apart()
    end = run.step(60)
    error = 60 * N * torch.finfo(torch.float32).eps * start.abs().max()
    assert (end.mean(0) - start.mean(0)).abs().max() <= error
    assert (start - start.mean(0)).abs().max() > 1
    assert (end - end.mean(0)).abs().max() < 1e-3


@pytest.mark.parametrize("topology", [Complete(), Ring(), RandomPair(3)], ids=repr)
def test_the_mean_moves_by_the_gradients_alone(topology: Any) -> None:
    """By those of the jobs that have ended, as the models' gradients show them."""
    speeds = SPEEDS["odd"]
    strategy = ADPSGD(topology, speeds=speeds, seed=1)
    run = Run(strategy, lambda p: torch.optim.SGD(p, lr=RATE))
    start = run.start_apart()
    total, begun = torch.zeros(SIZE).double(), torch.zeros(N, SIZE).double()
    largest = start.abs().max()
    for step in range(40):
        begins = [strategy.begins(step, learner) for learner in range(N)]
        largest = max(largest, run.step().abs().max())
        for learner, model in enumerate(run.handle.models):
            assert (model.weight.grad is not None) == begins[learner]
            if begins[learner]:
                begun[learner] = -RATE * model.weight.grad.double()
        for event in strategy.events(step, N):
            total += begun[event.learner]
    moved = run.weights().mean(0) - start.mean(0)
    error = 3 * 40 * N * torch.finfo(torch.float32).eps * largest  # an average, a step, and that step's own rounding
    assert (moved - total / N).abs().max() <= error
    assert moved.abs().max() > 1000 * error


@pytest.mark.parametrize("at", [1, 4, 5])
@pytest.mark.parametrize("speeds", [None, SPEEDS["odd"]], ids=["equal", "odd"])
def test_a_resumed_run_has_the_same_bits(speeds: Any, at: int) -> None:
    make = partial(ADPSGD, speeds=speeds, seed=2)
    run, resumed, whole = Run(make()), Run(make()), Run(make())
    run.step(at)
    saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict(), run.handle.state_dict()))
    for part, state in zip((resumed.model, resumed.optimizer, resumed.handle), saved, strict=True):
        part.load_state_dict(state)
    resumed.num_steps = at
    resumed.loss().backward()  # the models hold v, and the state is loaded again
    for part, state in zip((resumed.model, resumed.optimizer, resumed.handle), saved, strict=True):
        part.load_state_dict(state)
    assert torch.equal(resumed.step(6), whole.step(at + 6))


@pytest.mark.parametrize("factory", [ADPSGD, partial(ADPSGD, Ring(), seed=3)], ids=["complete", "ring"])
def test_virtual_learners(factory: Any) -> None:
    check_strategy(factory, num_learners=(1, 2, 3), transports=())


def test_virtual_learners_of_different_speeds() -> None:
    check_strategy(partial(ADPSGD, speeds=(0.4, 1, 0.5)), num_learners=(3,), transports=())


def test_reading_the_weights_changes_nothing() -> None:
    """Also between a backward pass and the step. What is read are w, not v."""
    run, plain = (Run(ADPSGD(speeds=SPEEDS["half"])) for _ in range(2))
    for _ in range(6):
        mean = run.weights().mean(0)
        run.optimizer.zero_grad()
        run.loss().backward()
        assert run.num_steps == 0 or (weights_of_learners(run.handle).double().mean(0) - mean).abs().max() > 1e-3
        torch.testing.assert_close(run.handle.evaluation_model().weight.double(), mean, rtol=0, atol=1e-6)
        run.handle.consensus_distance()
        run.optimizer.step()
        run.num_steps += 1
        run.handle.evaluation_model()
        assert torch.equal(run.weights(), plain.step())


def test_bytes_sent_are_those_of_one_learner() -> None:
    """Its weights go to the peer and back, in each of its jobs; none if it has no peer."""
    for learners, num_jobs in ((N, 10), (1, 0)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that one learner averages nothing
            run = Run(ADPSGD(Ring()), learners=learners)
        problems = torch.ones(learners, 2, SIZE)
        for _ in range(10):
            run.handle.model(problems).sum().backward()
            run.optimizer.step()
        assert run.handle.comm.bytes_sent == num_jobs * 2 * run.handle.learner.flat.param_LP[0].nbytes


def test_a_change_by_the_program_is_part_of_the_job() -> None:
    run, plain = (Run(ADPSGD(), lambda p: torch.optim.SGD(p, lr=0.0)) for _ in range(2))
    for one in (run, plain):
        one.step(3)
    with torch.no_grad():
        run.handle.models[2].weight += 4
    change = run.step() - plain.step()
    torch.testing.assert_close(change.sum(0), torch.full((SIZE,), 4.0).double())


@pytest.mark.parametrize("kinds", [(FusedAdamW, torch.optim.AdamW), (FusedSGD, torch.optim.SGD)], ids=["adamw", "sgd"])
def test_fused_optimizers_equal_those_of_torch(kinds: Any) -> None:
    """Those of slow learners, too, whose states count their own jobs."""
    options = {"lr": 0.05, "weight_decay": 0.1} | ({"momentum": 0.9} if kinds[0] is FusedSGD else {})
    runs = [Run(ADPSGD(speeds=SPEEDS["odd"]), partial(kind, **options)) for kind in kinds]
    assert_near(runs[0].step(20), runs[1].step(20), ulps=64)
    if kinds[1] is torch.optim.AdamW:
        for run in runs:
            counts = [int(run.optimizer.state[model.weight]["step"]) for model in run.handle.models]
            assert counts == [1 + int(19 * Fraction(speed).limit_denominator(10)) for speed in (0.3, 1, 0.7)] + [5]


def test_a_gradient_that_is_not_finite_is_left_out() -> None:
    model = Quadratic()
    optimizer = SGD(model.parameters())
    handle = ddpcore.distribute(model, optimizer, ADPSGD(), learners=2, vectorize=False, on_nonfinite="skip")
    problems = torch.ones(2, 2, SIZE)
    problems[1] = torch.nan
    handle.model(problems).sum().backward()
    optimizer.step()
    assert [event.learner for event in handle.nonfinite] == [1]
    assert weights_of_learners(handle).isfinite().all()
    torch.testing.assert_close(weights_of_learners(handle).sum(0), torch.full((SIZE,), RATE))


def test_a_step_that_overflows_reaches_nobody() -> None:
    run = Run(ADPSGD(), lambda p: torch.optim.SGD(p, lr=1e38))
    run.start_apart()
    with pytest.raises(ddpcore.NonFiniteError, match=r"learner \d: the weights of weight are not finite"):
        run.step(4)


def test_vmap_takes_the_weights_at_the_start_of_the_job() -> None:
    ends = []
    for vectorize in (True, False):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = ddpcore.distribute(model, optimizer, ADPSGD(), learners=3, vectorize=vectorize)
        for step in range(5):
            inputs = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            handle.model(inputs).square().sum().backward()
            optimizer.step()
        ends.append(weights_of_learners(handle))
    assert_near(*ends, ulps=16)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ADPSGD("ring"), "adpsgd: topology is 'ring': pass an instance"),
        (lambda: ADPSGD(seed=-1), "adpsgd: seed is -1"),
        (lambda: ADPSGD(seed=0.5), "adpsgd: seed is 0.5: it must be a whole number"),
        (lambda: ADPSGD(speeds=0.5), "adpsgd: speeds is 0.5: it must be a list of numbers"),
        (lambda: ADPSGD(speeds=(1, 1, 1, 0)), r"adpsgd: speeds\[3\] is 0.0: it must be at least 0.001"),
        (lambda: ADPSGD(speeds=(1, 2, 1, 1)), r"adpsgd: speeds\[1\] is 2.0"),
        (lambda: ADPSGD(speeds=(1, math.nan, 1, 1)), "adpsgd: speeds is nan: it must be a finite number"),
        (lambda: ADPSGD(speeds=(0.5, 0.5, 0.5, 0.5)), "the fastest learner must have 1"),
        (lambda: ADPSGD(speeds=()), "the fastest learner must have 1"),
        (lambda: ADPSGD(speeds=(1, 1)), "speeds has 2 numbers and there are 4 learners: give 4 numbers"),
    ],
)
def test_refusals(make: Any, says: str) -> None:
    expect_refusal(make, says)


@pytest.mark.parametrize(("dtype", "says"), [(torch.bfloat16, "16 bits"), (torch.float64, "model.float")])
def test_dtypes_that_are_refused(dtype: torch.dtype, says: str) -> None:
    model = Quadratic().to(dtype)
    with pytest.raises(ValueError, match=says):
        ddpcore.distribute(model, SGD(model.parameters()), ADPSGD(), learners=N)


def test_what_else_is_refused() -> None:
    with pytest.raises(ValueError, match="take on_failure='raise', or dpsgd"):
        check_deaths(ADPSGD())
    run = Run(ADPSGD())
    with pytest.raises(ValueError, match="adpsgd computes gradients at older weights"):
        NoiseStatistics(run.handle, run.optimizer, every=5, batch_size=4)
    with pytest.raises(ValueError, match="adpsgd computes gradients at older weights"):
        HessianStatistics(run.handle, Mock())
    with pytest.raises(RuntimeError, match="adpsgd takes no closure"):
        run.optimizer.step(lambda: run.loss())
    with pytest.raises(ValueError, match="averages no weights of neighbours alone: take 'skip'"):
        ddpcore.distribute(*_parts(), ADPSGD(), learners=N, on_nonfinite="quarantine")


def test_ranks_of_several_learners_are_refused(tmp_path: Path) -> None:
    """Before the model is changed."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model, optimizer = _parts()
        with pytest.raises(ValueError, match="adpsgd does not run over several learners on each rank: take"):
            ddpcore.distribute(model, optimizer, ADPSGD(), learners=2, group=dist.group.WORLD)
        ddpcore.distribute(model, optimizer, ADPSGD(), learners=2)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("policies", [{"momentum": "average"}, {"batch_norm": "gossip"}, {"moments": {"exp_avg": 2}}])
def test_policies_that_wait_are_refused(policies: Any) -> None:
    model, optimizer = _parts()
    with pytest.raises(ValueError, match="policies that average wait for other learners and adpsgd does not"):
        ddpcore.distribute(model, optimizer, ADPSGD(), learners=N, policies=ddpcore.Policies(**policies))


def _parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Quadratic()
    return model, SGD(model.parameters())


def test_by_name() -> None:
    made = ddpcore.STRATEGIES.build("adpsgd", topology=Ring(), speeds=[1, 0.5], seed=4)
    assert repr(made) == repr(ADPSGD(Ring(), speeds=(1, 0.5), seed=4))
    assert (
        TrainConfig.from_dict({"strategy": {"name": "adpsgd", "learners": 2}, "run": {"steps": 1, "seed": 7}})
        .make_strategy()
        .seed
        == 7
    )


LEARNERS = pytest.mark.parametrize("options", [{}, {"speeds": (1.0, 0.5, 0.3)}, {"accelerated": True}], ids=str)


def _of_three(
    options: dict[str, Any], num_steps: int, model: Any = None, compiles: bool = False
) -> tuple[Any, Any, Callable[[int], None]]:
    """The model, the handle, and a function that trains by so many steps, after the first ones."""
    torch.manual_seed(0)
    model = model or nn.Linear(3, 1)
    model = torch.compile(model, backend="eager") if compiles else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ADPSGD(Complete(), **options), learners=3)

    def train(num_steps: int) -> None:
        for _ in range(num_steps):
            optimizer.zero_grad()
            handle.backward([one(torch.randn(4, 3)).square().mean() for one in handle.models])
            optimizer.step()

    train(num_steps)
    return model, handle, train


@LEARNERS
@pytest.mark.parametrize("resumes", [False, True])
def test_models_that_the_program_loads_are_evaluated(options: dict[str, Any], resumes: bool) -> None:
    """The weights that peers change are others, and follow in the next step."""
    _, handle, train = _of_three(options, 3)
    best = copy.deepcopy(handle.evaluation_model().state_dict())
    train(3)
    newest = handle.evaluation_model().state_dict()
    assert not torch.equal(best["weight"], newest["weight"])
    assert torch.equal(newest["weight"], handle.evaluation_model().weight), "nothing was loaded"
    if resumes:
        model, resumed, train = _of_three(options, 0)
        model.load_state_dict(handle.models[0].state_dict())
        resumed.load_state_dict(handle.state_dict())
        handle = resumed
    for one in handle.models:
        one.load_state_dict(best)
    for name, weight in handle.evaluation_model().named_parameters():
        torch.testing.assert_close(weight.detach(), best[name], rtol=0, atol=1e-7)
    assert handle.consensus_distance() < 1e-6
    train(1)
    assert not torch.equal(handle.evaluation_model().weight, best["weight"])


@LEARNERS
def test_models_that_are_loaded_before_the_first_step_are_evaluated(options: dict[str, Any]) -> None:
    """Also after a forward pass, which begins the weights that peers change."""
    _, handle, _ = _of_three(options, 0)
    for one in handle.models:
        one(torch.ones(2, 3))
    for one in handle.models:
        one.load_state_dict({"weight": torch.full((1, 3), 7.0), "bias": torch.ones(1)})
    assert torch.equal(handle.evaluation_model().weight, torch.full((1, 3), 7.0))


@LEARNERS
def test_one_weight_that_the_program_changes_leaves_the_others(options: dict[str, Any]) -> None:
    _, handle, _ = _of_three(options, 4)
    before = handle.evaluation_model().weight.detach()
    with torch.no_grad():
        handle.models[1].weight[0, 2] += 1e-3
    after = handle.evaluation_model().weight.detach()
    assert torch.equal(before[0, :2], after[0, :2])
    torch.testing.assert_close(after[0, 2], before[0, 2] + 1e-3 / 3, rtol=0, atol=1e-7)
    for one in handle.models:
        one.load_state_dict(handle.models[2].state_dict())
    torch.testing.assert_close(handle.evaluation_model().weight, handle.models[2].weight, rtol=0, atol=1e-7)


@LEARNERS
def test_parts_that_the_program_loads_are_evaluated(options: dict[str, Any]) -> None:
    """And no others, which keep the weights that peers change. A model may be inside of a compiled one."""
    for how in ("compiled", "parts", "first", "weight"):
        _, handle, train = _of_three(options, 3, nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), how == "compiled")
        before = handle.evaluation_model().state_dict()
        for one in handle.models:
            raw = getattr(one, "_orig_mod", one)
            sevens = {name: torch.full_like(value, 7.0) for name, value in raw.state_dict().items()}
            if how == "compiled":
                raw.load_state_dict(sevens)
            elif how == "weight":
                raw.load_state_dict({"0.weight": sevens["0.weight"]}, strict=False)
            else:
                for index in range(1 if how == "first" else 2):
                    raw[index].load_state_dict({key[2:]: sevens[key] for key in sevens if key[0] == str(index)})
        loaded = {"first": ("0.weight", "0.bias"), "weight": ("0.weight",)}.get(how, tuple(sevens))
        after = handle.evaluation_model().state_dict()
        if how != "compiled":
            resumed = _of_three(options, 0, nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)))[1]
            load_run_state(resumed, [run_state(handle)])
            for name, value in resumed.evaluation_model().state_dict().items():
                assert torch.equal(value, after[name])
        for name, value in after.items():
            is_loaded = name.removeprefix("_orig_mod.") in loaded
            assert torch.equal(value, torch.full_like(value, 7.0) if is_loaded else before[name]), (how, name)
        train(1)


@LEARNERS
@pytest.mark.parametrize("first", ["model", "handle"])
def test_a_resumed_run_evaluates_the_weights_that_peers_change(options: dict[str, Any], first: str) -> None:
    model, handle, _ = _of_three(options, 4)
    other, resumed, _ = _of_three(options, 0)
    states = {"model": (other, model.state_dict()), "handle": (resumed, handle.state_dict())}
    for name in sorted(states, key=lambda name: name != first):
        states[name][0].load_state_dict(states[name][1])
    assert torch.equal(resumed.evaluation_model().weight, handle.evaluation_model().weight)


@LEARNERS
@pytest.mark.parametrize("how", ["clamped", "loaded"])
def test_a_resumed_run_evaluates_what_the_program_has_changed(options: dict[str, Any], how: str) -> None:
    """The states of the models that it loads are not those that a program loads."""
    _, handle, _ = _of_three(options, 4)
    with torch.no_grad():
        for one in handle.models:
            one.weight.clamp_(-0.1, 0.1)
    if how == "loaded":
        handle.models[1].load_state_dict({"weight": torch.full((1, 3), 7.0), "bias": torch.ones(1)})
    _, resumed, _ = _of_three(options, 0)
    load_run_state(resumed, [run_state(handle)])
    assert torch.equal(resumed.evaluation_model().weight, handle.evaluation_model().weight)
    for one, other in zip(resumed.models, handle.models, strict=True):
        assert torch.equal(one.weight, other.weight)
