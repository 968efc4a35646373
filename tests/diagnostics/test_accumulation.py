"""One device: the passes of a step are the batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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
    for _ in range(2):
        optimizer.zero_grad()
        with handle.no_sync():
            handle.model(torch.randn(1, 8, 3)).square().mean().backward()
        handle.model(torch.randn(1, 8, 3)).square().mean().backward()
        optimizer.step()
    assert [(r.valid, r.num_learners) for r in statistics.records] == [(True, 2), (True, 2)]


def test_closing_takes_the_hooks_away():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    statistics = NoiseStatistics(model, optimizer, 1)
    statistics.close()
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    assert statistics.records == []


def test_a_frozen_model_has_nothing_to_measure():
    model = nn.Linear(3, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to measure"):
        NoiseStatistics(model, torch.optim.SGD(model.parameters(), lr=0.1))
