"""One device: the passes of a step are the batches."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ddpcore
from ddpcore.diagnostics import NoiseStatistics


def train(watched: bool, num_passes: int, *, every: int = 2, distributed: bool = False, nan_step: int = -1):
    """Four steps; also what the statistics must be of those that are measured."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = ddpcore.distribute(model, optimizer, ddpcore.Single()) if distributed else model
    statistics = NoiseStatistics(handle, optimizer, every, batch_size=6) if watched else None
    expected = []
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        rows = []
        for _ in range(num_passes):
            x = torch.randn(6, 4)
            if step == nan_step:
                x[0, 0] = float("nan")
            gradients = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
            rows.append(torch.cat([g.double().flatten() for g in gradients]))
            model(x).square().mean().backward()
        if step == nan_step:
            optimizer.zero_grad()
        optimizer.step()
        if (step + 1) % every == 0:
            stacked = torch.stack(rows)
            expected.append((stacked.square().sum(1).mean().item(), stacked.mean(0).square().sum().item()))
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return weights, statistics, expected


@pytest.mark.parametrize("distributed", [False, True])
def test_against_the_gradients_themselves(distributed):
    weights, statistics, expected = train(True, 3, distributed=distributed)
    plain, _, _ = train(False, 3)
    assert torch.equal(weights, plain)
    records = statistics.records
    assert [(r.step, r.num_learners, r.num_steps, r.valid) for r in records] == [(2, 3, 1, True), (4, 3, 2, True)]
    for count, record in enumerate(records, 1):
        own, mean = torch.tensor(expected[:count], dtype=torch.float64).mean(0).tolist()
        assert record.whole.trace == pytest.approx(6 * 3 * (own - mean) / 2, rel=1e-5)
        assert record.whole.grad_squared == pytest.approx((3 * mean - own) / 2, rel=1e-5, abs=1e-5 * own)
        assert sum(part.trace for part in record.segments.values()) == pytest.approx(record.whole.trace, rel=1e-10)


class Joined(nn.Module):
    """Parameters that one operation joins: their gradients share memory, though none is a view."""

    def __init__(self, join):
        super().__init__()
        self.parts = nn.ParameterList(torch.full((3,), 0.5 + index) for index in range(3))
        self.alone = nn.Parameter(torch.ones(9))
        self.join = join

    def forward(self, x):
        return x @ (self.join(list(self.parts)).flatten() * self.alone)


JOINS = {
    "cat": torch.cat,
    "stack": torch.stack,
    "twice": lambda parts: torch.cat([torch.cat(parts[:2]), parts[2]]) + torch.cat(parts),
    "some alone": lambda parts: torch.cat([torch.cat(parts[:2]), parts[2] * 2]),
}


@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_share_memory(join, set_to_none):
    torch.manual_seed(0)
    model = Joined(JOINS[join])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    statistics = NoiseStatistics(model, optimizer, 1, batch_size=4)
    expected = []
    for _ in range(3):
        rows = []
        for _ in range(4):
            loss = model(torch.randn(4, 9)).square().mean()
            found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            rows.append(torch.cat([one.double().flatten() for one in found]))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        stacked = torch.stack(rows)
        expected.append([stacked.square().sum(1).mean().item(), stacked.mean(0).square().sum().item()])
    own, mean = torch.tensor(expected, dtype=torch.float64).mean(0).tolist()
    record = statistics.records[-1]
    assert record.valid, record.reason
    assert record.whole.trace == pytest.approx(4 * 4 * (own - mean) / 3, rel=1e-5)


@pytest.mark.parametrize("join", JOINS)
def test_a_write_between_passes_is_seen_in_shared_memory(join):
    """Three passes, and a program that scales a gradient after the first: the passes from then on count."""
    torch.manual_seed(0)
    model = Joined(JOINS[join])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    statistics = NoiseStatistics(model, optimizer, 1, batch_size=4)
    for number in range(2):
        if number:
            model.parts[0].grad.mul_(0.5)
        model(torch.randn(4, 9)).square().mean().backward()
    optimizer.step()
    assert not statistics.records[0].valid
    assert statistics.records[0].reason.startswith("the estimate needs two batches")


def test_one_pass_is_not_enough():
    weights, statistics, _ = train(True, 1)
    assert [record.valid for record in statistics.records] == [False, False]
    assert statistics.records[0].reason.startswith("the estimate needs two batches")
    assert statistics.records[0].whole is None
    assert torch.equal(weights, train(False, 1)[0])


def test_nan_gradients_mark_the_record():
    weights, statistics, _ = train(True, 2, nan_step=1)
    assert [record.valid for record in statistics.records] == [False, True]
    assert weights.isfinite().all()


def test_one_virtual_learner_accumulates():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=1)
    statistics = NoiseStatistics(handle, optimizer, 1)
    for step in range(5):
        optimizer.zero_grad(set_to_none=step < 2)
        with handle.no_sync() if step < 4 else nullcontext():  # one learner needs no average
            handle.model(torch.randn(1, 8, 3)).square().mean().backward()
        handle.model(torch.randn(1, 8, 3)).square().mean().backward()
        optimizer.step()
    assert [(r.valid, r.num_learners) for r in statistics.records] == [(True, 2)] * 5
    optimizer.zero_grad()
    with handle.no_sync():
        handle.model(torch.randn(1, 8, 3)).square().mean().backward()
    optimizer.step()
    assert statistics.records[-1].reason.startswith("the estimate needs two batches")


def test_closing_takes_the_hooks_away():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    statistics = NoiseStatistics(model, optimizer, 1)
    statistics.close()
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    assert statistics.records == []


def test_models_that_cannot_be_measured():
    for model, message in (
        (nn.Linear(3, 2).requires_grad_(False), "nothing to measure"),
        (nn.Linear(3, 2, dtype=torch.complex64), "a parameter is complex: keep a real one"),
    ):
        with pytest.raises(ValueError, match=message):
            NoiseStatistics(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_sparse_gradients_are_those_of_a_dense_layer():
    batches, records = torch.randint(7, (3, 2, 5, 4)), []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 5, sparse=sparse), nn.Flatten(), nn.Linear(20, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        statistics = NoiseStatistics(model, optimizer, 1, batch_size=5)
        records.append([passes(model, statistics, optimizer, pair) for pair in batches])
    for found, expected in zip(*records, strict=True):
        assert found.valid and found.num_learners == 2
        assert found.whole.trace == pytest.approx(expected.whole.trace, rel=1e-5)
        assert found.segments["0.weight"].trace == pytest.approx(expected.segments["0.weight"].trace, rel=1e-5)


def test_parameters_that_are_trained_at_the_step():
    """A frozen one has no noise, also where its old gradient is left; one that came later makes no record valid."""
    torch.manual_seed(0)
    model, statistics, optimizer = watched()
    model[2].weight.requires_grad_(False)
    late, traces = NoiseStatistics(model, optimizer, 1, batch_size=6), []
    for layer, is_trained in ((0, True), (0, False), (2, True)):
        model[layer].weight.requires_grad_(is_trained)
        rows, trained = [], [parameter for parameter in model.parameters() if parameter.requires_grad]
        for x in torch.randn(3, 6, 4):
            gradients = torch.autograd.grad(model(x).square().mean(), trained)
            rows.append(torch.cat([g.double().flatten() for g in gradients]))
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_trained:  # else the old gradients stay
            model[0].weight.grad = torch.ones(5, 4)
        stacked = torch.stack(rows)
        traces.append(9 * (stacked.square().sum(1).mean() - stacked.mean(0).square().sum()).item())
        record = statistics.records[-1]
        assert record.valid and record.whole.trace == pytest.approx(sum(traces[-record.num_steps :]) / record.num_steps)
    assert [record.valid for record in late.records] == [True, True, False]
    assert late.records[2].reason.startswith("parameters are trained that were not when the statistics began")


def passes(model: nn.Module, statistics: NoiseStatistics, optimizer: torch.optim.Optimizer, batches, scale=1.0):
    for x in batches:
        (model(x).square().mean() * scale).backward()
    optimizer.step()
    optimizer.zero_grad()
    return statistics.records[-1]


def watched(every: int = 1, **options):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return model, NoiseStatistics(model, optimizer, every, batch_size=6, **options), optimizer


@pytest.mark.parametrize("set_to_none", [True, False])
def test_passes_of_an_attempt_that_was_dropped_do_not_count(set_to_none):
    """A loop that meets a bad loss, zeroes the gradients and begins its step again."""
    batches = torch.randn(3, 6, 4)
    model, statistics, optimizer = watched()
    model(1e3 * torch.randn(6, 4)).square().mean().backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    again = passes(model, statistics, optimizer, batches)
    plain = passes(*watched(), batches)
    assert again.num_learners == plain.num_learners == 3
    assert again.whole == plain.whole


def test_passes_of_a_closure_are_those_of_its_step():
    """Of a closure that LBFGS calls several times, the first call: its gradients are those before the step."""
    torch.manual_seed(0)
    batches, records = torch.randn(4, 2, 6, 4), []
    for kind in ("plain", "closure", "by name", "several calls"):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
        several = kind == "several calls"
        made = (torch.optim.LBFGS if several else torch.optim.SGD)(model.parameters(), lr=0.0)
        statistics, num = NoiseStatistics(model, made, 1, batch_size=6), 0
        for pair in batches:

            def closure(model: nn.Module = model, made: torch.optim.Optimizer = made, pair: torch.Tensor = pair):
                nonlocal num
                num += 1
                made.zero_grad()
                losses = [model(x).square().mean() for x in pair]
                for loss in losses:
                    loss.backward()
                return sum(losses)

            if kind == "plain":
                closure()
                made.step()
            elif kind == "by name":
                made.step(closure=closure)
            else:
                made.step(closure)
        assert num == len(batches) or (several and num > len(batches))
        records.append([(r.step, r.valid, r.reason, r.num_learners, r.whole) for r in statistics.records])
    assert records[0][0][1] and all(other == records[0] for other in records)


def test_losses_divided_by_their_number():
    batches = torch.randn(4, 6, 4)
    plain = passes(*watched(), batches).whole
    divided = passes(*watched(loss_divisor=4), batches, scale=0.25).whole
    assert divided.trace == pytest.approx(plain.trace, rel=1e-5)
    assert divided.grad_squared == pytest.approx(plain.grad_squared, rel=1e-5, abs=1e-6 * plain.trace)


def test_gradients_that_a_loop_does_not_reset():
    """Of parameters outside the optimizer, which grow, and of those that a loop writes between two passes."""
    batches, records = torch.randn(4, 3, 6, 4), []
    for kind in ("all", "head", "none", "written"):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
        made = torch.optim.SGD((model[2] if kind == "head" else model).parameters(), lr=0.0)
        statistics = NoiseStatistics(model, made, 2, batch_size=6)
        for three in batches:
            if kind == "written":
                model(torch.randn(6, 4)).square().mean().backward()
                model[0].weight.grad.mul_(0.5)
            for x in three:
                torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
                model(x).square().mean().backward()
            made.step()
            if kind != "none":
                (model if kind == "all" else made).zero_grad()
        records.append(statistics.records)
    for record in (other[-1] for other in records):
        assert record.valid and record.num_learners == 3
        assert record.whole.trace == pytest.approx(records[0][-1].whole.trace, rel=1e-4)
        assert record.whole.grad_squared == pytest.approx(records[0][-1].whole.grad_squared, rel=1e-4)


def test_scaled_losses():
    batches = torch.randn(4, 6, 4)
    plain = passes(*watched(), batches).whole
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, statistics, optimizer = watched(scaler=scaler)
    for x in batches:
        scaler.scale(model(x).square().mean()).backward()
    optimizer.step()
    assert statistics.records[0].whole.trace == pytest.approx(plain.trace, rel=1e-5)


def test_reentrant_checkpoints_are_refused():
    """Their inner backward passes would be counted as batches; one pass, and two."""
    for num_passes in (1, 2):
        model, statistics, optimizer = watched()
        for _ in range(num_passes):
            x = torch.randn(6, 4, requires_grad=True)
            hidden = checkpoint(model[:2], x, use_reentrant=True)
            model[2](hidden).square().mean().backward()
        optimizer.step()
        (record,) = statistics.records
        assert not record.valid and record.reason.startswith(
            "backward passes of this step reached different parameters"
        )
        assert record.whole is None


def test_steps_of_another_number_of_passes_are_forgotten():
    model, statistics, optimizer = watched()
    counts = [passes(model, statistics, optimizer, torch.randn(n, 6, 4)).num_steps for n in (2, 2, 3, 3, 3)]
    assert counts == [1, 2, 1, 2, 3]


def test_the_last_twenty_steps_are_kept():
    model, statistics, optimizer = watched()
    counts = [passes(model, statistics, optimizer, torch.randn(2, 6, 4)).num_steps for _ in range(23)]
    assert counts == [*range(1, 21), 20, 20, 20]


def test_a_resumed_loop_goes_on_counting():
    batches = torch.randn(8, 2, 6, 4)
    model, through, optimizer = watched(every=2)
    for step, pair in enumerate(batches):
        if step == 3:
            state = through.state_dict()
        for x in pair:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model, resumed, optimizer = watched(every=2)
    resumed.load_state_dict(state)
    for pair in batches[3:]:
        for x in pair:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = [(record.step, record.num_steps, record.whole) for record in through.records if record.step > 3]
    assert [(record.step, record.num_steps, record.whole) for record in resumed.records] == kept
    assert [step for step, *_ in kept] == [4, 6, 8]
