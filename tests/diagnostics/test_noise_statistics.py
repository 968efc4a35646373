"""Statistics beside training: they change no bit of it, and say the same of real ranks and virtual learners."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import ddpcore
from ddpcore.comm.membership import Change
from ddpcore.diagnostics import HessianStatistics, NoiseStatistics
from ddpcore.optim import FusedSGD
from helpers import noise_training as training
from helpers import ranks

TOGETHER = ("ssgd", "noisy_ssgd", "noisy_ssgd_apart")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("optimizer_class", [FusedSGD, torch.optim.SGD])
@pytest.mark.parametrize("strategy", training.STRATEGIES)
def test_training_has_the_same_bits(strategy, optimizer_class):
    """With dropout, batch normalisation, momentum and exchanges under way; measured in four of twelve steps."""
    watched = training.train(strategy, watched=True, optimizer_class=optimizer_class)
    plain = training.train(strategy, watched=False, optimizer_class=optimizer_class)
    for name in ("weights", "buffers", "random"):
        assert torch.equal(watched[name], plain[name]), name
    assert watched["bytes_sent"] == plain["bytes_sent"]
    assert [record["step"] for record in watched["records"]] == [3, 6, 9, 12]
    assert all(record["valid"] for record in watched["records"])


@pytest.fixture(scope="module")
def real() -> list[dict[Any, Any]]:
    return ranks.run("noise_training", training.NUM_LEARNERS)


def assert_close(ours: Any, theirs: Any, where: str, size: float) -> None:
    """Every number of a record but those of time, and but ratios, whose denominators are tested, to fp32's rounding.

    Weights of real ranks have the bits of virtual learners; gradients of the further passes, added up in another order,
    differ in the last places, some 1e-6 of the largest square, which is the trace.
    """
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            if key not in ("seconds", "share", "noise_scale", "interval", "gain", "efficiency"):
                assert_close(ours[key], theirs[key], f"{where}.{key}", size)
    elif isinstance(theirs, float | list):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6 * size), where
    else:
        assert ours == theirs, where


@functools.cache
def virtual_learners(strategy: str) -> dict[str, Any]:
    return training.train(strategy, watched=True, dropout=False)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["pg", "shm"])
@pytest.mark.parametrize("strategy", training.STRATEGIES)
def test_real_ranks_say_what_virtual_learners_say(strategy, transport, real):
    virtual = virtual_learners(strategy)
    for rank, seen in enumerate(real):
        watched, plain = seen[strategy, transport, True], seen[strategy, transport, False]
        assert torch.equal(watched["weights"], plain["weights"]) and torch.equal(watched["buffers"], plain["buffers"])
        assert torch.equal(watched["weights"][0], virtual["weights"][rank])
        assert watched["bytes_sent"] == plain["bytes_sent"]
        assert len(watched["records"]) == len(virtual["records"]) == 4
        for ours, theirs, rank_0 in zip(
            watched["records"], virtual["records"], real[0][strategy, transport, True]["records"], strict=True
        ):
            size = theirs["whole"]["trace"]
            assert_close(ours, theirs, f"step {theirs['step']}", max(1.0, size))
            assert ours["whole"] == rank_0["whole"], "all ranks must come to the same numbers"
            if strategy in TOGETHER:
                assert ours["whole"] == theirs["whole"], "sums of the same bits, in the same order"


class Crossed(nn.Module):
    """Used in another order than registered, so that the flat buffer is laid out anew after the first backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(4, 2), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


def small(strategy: Any, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any, NoiseStatistics]:
    model = nn.Linear(3, 2) if model is None else model
    optimizer = options.pop("optimizer_class", torch.optim.SGD)(model.parameters(), lr=0.1)
    on_nonfinite = options.pop("on_nonfinite", "raise")
    handle = ddpcore.distribute(model, optimizer, strategy, learners=4, on_nonfinite=on_nonfinite)
    return handle, optimizer, NoiseStatistics(handle, optimizer, **options)


def squares_of(gradients: list[Tensor]) -> tuple[float, float]:
    """s and l of the learners' gradients, in float64."""
    rows = torch.cat([g.double().flatten(1) for g in gradients], dim=1)
    return rows.square().sum(1).mean().item(), rows.mean(0).square().sum().item()


def test_free_statistics_against_the_gradients_themselves():
    """Of every step, one record for three of them; per layer and whole, against autograd in float64."""
    handle, optimizer, statistics = small(ddpcore.SSGD(), Crossed(), every=3, batch_size=8)
    layout = handle.learner.flat.segments
    expected: list[tuple[float, float]] = []
    by_name: dict[str, list[tuple[float, float]]] = {name: [] for name in handle.learner.flat.names}
    for _ in range(6):
        x = torch.randn(4, 8, 3)
        weights = [dict(model.named_parameters()) for model in handle.models]
        loss = handle.model(x).square().mean((1, 2)).sum()
        rows = [torch.autograd.grad(loss, list(own.values()), retain_graph=True) for own in weights]
        gradients = [torch.stack(learners) for learners in zip(*rows, strict=True)]
        expected.append(squares_of(gradients))
        for name, gradient in zip(weights[0], gradients, strict=True):
            by_name[name].append(squares_of([gradient]))
        optimizer.zero_grad()
        handle.model(x).square().mean((1, 2)).sum().backward()
        optimizer.step()
    assert [s.name for s in handle.learner.flat.segments] != [s.name for s in layout], "or nothing has moved"
    first, second = statistics.records
    assert (first.num_steps, second.num_steps, second.step, second.at_mean) == (3, 3, 6, True)
    for record, steps in ((first, slice(0, 3)), (second, slice(3, 6))):
        for scale, all_steps in ((record.whole, expected), *((record.segments[n], by_name[n]) for n in by_name)):
            own, mean = torch.tensor(all_steps[steps], dtype=torch.float64).mean(0).tolist()
            assert scale.grad_squared == pytest.approx((4 * mean - own) / 3, rel=1e-5, abs=1e-6 * own)
            assert scale.trace == pytest.approx(8 * 4 * (own - mean) / 3, rel=1e-5)


def test_scaled_gradients_are_unscaled():
    """Mixed precision: with a scaler the numbers are those of the true gradients."""

    def run(scaled: bool, strategy: Any) -> Any:
        torch.manual_seed(0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        model = nn.Linear(3, 2)
        optimizer = FusedSGD(model.parameters(), lr=0.1)
        handle = ddpcore.distribute(model, optimizer, strategy, learners=4, scaler=scaler)
        statistics = NoiseStatistics(handle, optimizer, 2, scaler=scaler)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(handle.model(torch.randn(4, 8, 3)).square().mean((1, 2)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return statistics.records[0].whole

    for strategy in (ddpcore.SSGD, lambda: ddpcore.LocalSGD(period=2)):
        scaled, plain = run(True, strategy()), run(False, strategy())
        assert scaled.grad_squared == pytest.approx(plain.grad_squared, rel=1e-5)
        assert scaled.trace == pytest.approx(plain.trace, rel=1e-5)


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("strategy", [ddpcore.SSGD, lambda: ddpcore.DPSGD(ddpcore.Ring()), lambda: ddpcore.LocalSGD(9)])
def test_gradients_are_measured_before_a_loop_clips_them(strategy, vectorize):
    """In every strategy, also where a scaler is unscaled first and gradients accumulate."""

    def run(clips: bool, scaled: bool) -> Any:
        torch.manual_seed(0)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)
        model = nn.Linear(3, 2)
        optimizer = FusedSGD(model.parameters(), lr=0.1)
        handle = ddpcore.distribute(model, optimizer, strategy(), learners=4, vectorize=vectorize, scaler=scaler)
        statistics = NoiseStatistics(handle, optimizer, 1, scaler=scaler)
        for micro in range(2):
            with contextlib.nullcontext() if micro else handle.no_sync():
                scaler.scale(handle.model(torch.randn(4, 8, 3)).square().mean((1, 2)).sum()).backward()
        if clips:
            scaler.unscale_(optimizer)
            handle.clip_grad_norm_(0.01)
        scaler.step(optimizer)
        return statistics.records[0].whole

    plain = run(clips=False, scaled=False)
    assert plain.trace > 0.01
    for clips, scaled in ((True, False), (False, True), (True, True)):
        found = run(clips, scaled)
        assert found.grad_squared == pytest.approx(plain.grad_squared, rel=1e-5)
        assert found.trace == pytest.approx(plain.trace, rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("strategy", [ddpcore.SSGD, lambda: ddpcore.LocalSGD(period=9)], ids=["ssgd", "local_sgd"])
def test_a_step_that_is_not_finite_is_left_out(strategy, bad):
    """One learner's batch is bad. The record of that step is not valid, and the next one is as if nothing had been."""
    handle, optimizer, statistics = small(strategy(), every=1, on_nonfinite="skip")
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(4, 8, 3)
        x[2, 0, 0] = bad if step == 1 else 1.0
        handle.model(x).square().mean((1, 2)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in handle.model.parameters():
                parameter.fill_(0.5)
    assert [record.valid for record in statistics.records] == [True, False, True]
    assert [record.num_skipped for record in statistics.records] == [0, 1, 0]
    assert "no step" in statistics.records[1].reason
    assert math.isfinite(statistics.records[2].whole.trace)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, sometimes: bool = False) -> Tensor:
        hidden = nn.functional.dropout(self.always(x), 0.5)
        return self.sometimes(hidden) if sometimes else hidden


def test_a_step_that_a_loop_leaves_out_counts_for_nothing():
    """No pass, no random state and no gradient of it: another batch follows, in which it has no second layer."""

    def run(strategy: Any, leaves_out: bool, dynamic: bool, way: str) -> list[Any]:
        torch.manual_seed(0)
        optimizer = FusedSGD((model := Branches()).parameters(), lr=0.1)
        handle = ddpcore.distribute(model, optimizer, strategy(), learners=4, vectorize=False)
        x = torch.randn(4, 8, 3)

        def loss(**how: Any) -> Tensor:
            if way == "each":
                return sum(one(own, **how).square().mean() for one, own in zip(handle.models, x, strict=True))
            return handle.model(x, **how).square().mean((1, 2)).sum()

        statistics = NoiseStatistics(handle, optimizer, 1, **({"loss": loss, "full_loss": loss} if dynamic else {}))
        for step in range(2):
            if leaves_out:
                with handle.no_sync() if way == "paused" else contextlib.nullcontext():
                    loss(sometimes=True).backward()
                optimizer.zero_grad()
            torch.manual_seed(step + 1)
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [[one.num_skipped, one.valid, one.whole, one.dynamics] for one in statistics.records]

    per_learner = lambda: ddpcore.NoisySSGD(0.1, where="per_learner")  # noqa: E731
    for strategy in (ddpcore.SSGD, lambda: ddpcore.LocalSGD(9), per_learner):
        for dynamic in (False, True):
            for way in ("together", "each", "paused"):
                case = strategy, dynamic, way
                assert run(strategy, True, *case[1:]) == run(strategy, False, *case[1:]), case


@pytest.mark.slow
def test_steps_before_a_death_do_not_count():
    """They do not compare with those after it. Learner 0 dies before a pass, or after one, and is then not run."""
    shrinks = ddpcore.Connection(on_failure="shrink")

    def full_loss(handle: Any) -> Tensor:
        return sum(handle.models[one](torch.ones(2, 3)).square().mean() for one in handle.comm.members)

    for strategy, after_pass, num_steps in (
        (ddpcore.SSGD(), False, 5),
        (ddpcore.SSGD(), True, 4),
        (ddpcore.DPSGD(ddpcore.Complete()), True, 1),
        (ddpcore.DPSGD(ddpcore.Complete()), False, 1),
    ):
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        handle = ddpcore.distribute(model, optimizer, strategy, learners=4, connection=shrinks)
        is_ssgd, expected = isinstance(strategy, ddpcore.SSGD), list[tuple[float, float]]()
        options = {"full_loss": functools.partial(full_loss, handle)} if is_ssgd else {}
        statistics = NoiseStatistics(handle, optimizer, 8, **options)
        for step in range(8):
            x = torch.randn(4, 8, 3)
            if step == 3 and not after_pass:
                handle.lose(0)
            optimizer.zero_grad()
            losses = handle.model(x).square().mean((1, 2))
            rows = [
                torch.autograd.grad(one, [*own.parameters()], retain_graph=True)
                for one, own in zip(losses, handle.models, strict=True)
            ]
            losses.sum().backward()
            if step == 3 and after_pass:
                handle.lose(0)
            expected.append(squares_of([torch.stack(each) for each in zip(*rows[1:], strict=True)]))
            optimizer.step()
        (record,) = statistics.records
        own, mean = torch.tensor(expected[-num_steps:], dtype=torch.float64).mean(0).tolist()
        assert (record.valid, record.num_learners, record.num_steps) == (True, 3, num_steps)
        assert record.num_skipped == (8 - num_steps if is_ssgd else 0)
        assert record.whole.trace == pytest.approx(3 * (own - mean) / 2, rel=1e-5)
        if is_ssgd:
            assert record.dynamics.full_loss == pytest.approx(full_loss(handle).item() / 3, rel=1e-5)


@pytest.mark.slow
def test_a_step_in_whose_measurement_a_learner_dies_is_not_valid():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    connection = ddpcore.Connection(on_failure="shrink")
    handle: Any = ddpcore.distribute(model, optimizer, ddpcore.DPSGD(), learners=4, connection=connection)
    statistics = NoiseStatistics(handle, optimizer, 1)
    for step in range(2):
        optimizer.zero_grad()
        handle.model(torch.randn(4, 8, 3)).square().mean((1, 2)).sum().backward()
        operation = handle.comm.num_operations + 2
        handle.play([Change(operation=operation, step=None, members=(0, 1, 3), lost=(2,))] if step == 0 else [])
        optimizer.step()
    died, after = statistics.records
    assert (died.valid, died.reason) == (False, "a learner died during this step")
    assert (after.valid, after.num_learners, after.num_steps) == (True, 3, 1)


def test_two_averaged_passes_in_a_step_are_left_out():
    """Each adds its mean to the last one's: what the buckets hold is no learner's gradient."""
    handle, optimizer, statistics = small(ddpcore.SSGD(), every=1)
    for num_passes in (2, 1):
        optimizer.zero_grad()
        for _ in range(num_passes):
            handle.model(torch.randn(4, 8, 3)).square().mean((1, 2)).sum().backward()
        optimizer.step()
    assert [record.valid for record in statistics.records] == [False, True]
    assert statistics.records[0].num_skipped == 1
    assert "but the last in handle.no_sync()" in statistics.records[0].reason


@pytest.mark.parametrize("strategy", [ddpcore.SSGD, lambda: ddpcore.LocalSGD(2), lambda: ddpcore.SlowMo(period=3)])
def test_gradients_of_a_closure_are_those_of_its_step(strategy):
    """The gradients do not exist before the step. An optimizer may call the closure again, which changes nothing."""
    records, noise, now = [], [], [torch.zeros(0)]
    for num_calls in (0, 1, 2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
        kind = type("Repeated", (torch.optim.SGD,), {"step": repeated}) if num_calls == 2 else torch.optim.SGD
        optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
        handle = ddpcore.distribute(model, optimizer, strategy(), learners=3)
        inputs = torch.randn(5, 3, 4, 6)

        def loss(x: Tensor, handle: Any = handle) -> Tensor:
            return handle.model(x).square().mean((1, 2)).sum()

        def closure(loss: Any = loss, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            (result := loss(now[0])).backward()
            return result

        full = functools.partial(loss, inputs.flatten(0, 1).view(3, 20, 6))
        statistics = NoiseStatistics(handle, optimizer, 2, batch_size=4, loss=lambda: loss(now[0]), full_loss=full)
        hessian = HessianStatistics(handle, full, every=2, top=1)
        for now[0] in inputs:
            if num_calls == 0:
                closure()
            optimizer.step(*[closure][:num_calls])
        noise.append([(record.largest, record.noise) for record in hessian.records])
        records.append([dataclasses.replace(record, seconds=0.0, share=0.0) for record in statistics.records])
    assert len(records[0]) == 2 and all(record.valid for record in records[0])
    assert records[1] == records[0] and records[2] == records[0]
    assert noise[1] == noise[0] and noise[2] == noise[0]


def repeated(self: torch.optim.Optimizer, closure: Any) -> Any:
    """A step of SGD that calls the closure twice."""
    with torch.enable_grad():
        closure()
    return torch.optim.SGD.step(self, closure)


def test_closing_ends_it():
    handle, optimizer, statistics = small(ddpcore.SSGD(), every=1)
    statistics.close()
    handle.model(torch.randn(4, 8, 3)).sum().backward()
    optimizer.step()
    assert statistics.records == [] and handle.observers == []


def test_bad_input():
    handle, optimizer, _ = small(ddpcore.LocalSGD(period=2))
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    loss = lambda: handle.model(torch.zeros(4, 1, 3)).sum()  # noqa: E731
    for arguments, message in (
        ({"every": 0}, "every is 0: it must be at least 1"),
        ({"every": -3}, "every is -3"),
        ({"every": 2.5}, "every is 2.5: it must be a whole number"),
        ({"every": True}, "every is True"),
        ({"every": "3"}, "every is .3."),
        ({"population": 1}, "population is 1"),
        ({"loss_divisor": 0.0}, "loss_divisor is 0.0: it must be above 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"directions": -1}, "directions is -1"),
        ({"hessian": True}, "pass full_loss="),
        ({"full_loss": loss}, "learners of local_sgd differ: pass loss="),
    ):
        with pytest.raises(ValueError, match=message):
            NoiseStatistics(handle, optimizer, **arguments)
    with pytest.raises(ValueError, match="not the one of this handle"):
        NoiseStatistics(handle, other)
    with pytest.raises(ValueError, match="is no loop"):
        NoiseStatistics("model", other)
    with pytest.raises(ValueError, match="no mean model"):
        NoiseStatistics(nn.Linear(1, 1), other, loss=loss)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pushed = ddpcore.distribute(model, optimizer, ddpcore.PushSum(ddpcore.Ring(1)), learners=4)
    with pytest.raises(ValueError, match="push_sum"):
        NoiseStatistics(pushed, optimizer)
    groups = nn.Linear(3, 2)
    optimizer = torch.optim.SGD([{"params": [groups.weight], "lr": 0.1}, {"params": [groups.bias], "lr": 0.2}])
    handle = ddpcore.distribute(groups, optimizer, ddpcore.SSGD(), learners=4)
    with pytest.raises(ValueError, match="give all parameter groups one learning rate"):
        NoiseStatistics(handle, optimizer, full_loss=loss)


def test_a_loss_without_a_graph_is_one_line():
    handle, optimizer, _ = small(ddpcore.LocalSGD(period=2))
    NoiseStatistics(handle, optimizer, 1, loss=lambda: 3.0)
    handle.model(torch.randn(4, 8, 3)).sum().backward()
    before = handle.learner.flat.param_LP.clone()
    with pytest.raises(ValueError, match="must return one number with a graph"):
        optimizer.step()
    assert torch.equal(handle.learner.flat.param_LP, before) and not handle.learner.hooks_paused


@pytest.mark.parametrize("make", [ddpcore.SSGD, lambda: ddpcore.LocalSGD(period=2)])
def test_a_state_in_memory_does_not_change_and_a_load_is_a_copy(make):
    """Also the sums of steps since the last record."""
    handle, optimizer, statistics = small(make(), Crossed(), every=3, batch_size=8)

    def train(num_steps: int) -> None:
        for _ in range(num_steps):
            optimizer.zero_grad()
            handle.model(torch.randn(4, 8, 3)).square().mean((1, 2)).sum().backward()
            optimizer.step()

    train(4)
    state = statistics.state_dict()
    then = copy.deepcopy(state)
    train(4)
    statistics.load_state_dict(state)
    train(5)
    for mine, theirs in zip(tree_leaves(state), tree_leaves(then), strict=True):
        assert torch.equal(mine, theirs) if isinstance(mine, Tensor) else mine == theirs
