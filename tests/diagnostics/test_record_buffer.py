"""Records as they are made: what joins which average, what a record costs, what is kept of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import ddpcore
from ddpcore.diagnostics import NoiseStatistics
from ddpcore.diagnostics.record import PENDING, Measured, RecordBuffer, Series


def loop(strategy: Any, model: nn.Module | None = None, num: int = 4, **options: Any) -> tuple[Any, Any, Any]:
    model = nn.Linear(3, 2) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = ddpcore.distribute(model, optimizer, strategy, learners=num)
    statistics = NoiseStatistics(handle, optimizer, **options)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        handle.model(x).square().mean((1, 2)).sum().backward()
        optimizer.step()

    return handle, statistics, step


def test_seconds_and_share_of_the_time():
    record_buffer = RecordBuffer(torch.device("cpu"), Series(1, ["w"]), "")
    result = Measured(1, 2, 1, marks=(10.0, 16.0, 18.0))
    record = result.record(record_buffer.series, "")
    assert (record.seconds, record.share) == (2.0, 0.25)


def test_few_records_wait_on_the_device():
    _, statistics, step = loop(ddpcore.SSGD(), every=1)
    for _ in range(PENDING + 7):
        step(torch.randn(4, 8, 3))
    assert len(statistics._record_buffer._pending) == PENDING
    assert [record.step for record in statistics.records] == list(range(1, PENDING + 8))


def test_a_switch_begins_the_average_anew():
    """Post-local SGD: steps at the mean say nothing of those at the learners' own weights; then twenty are kept."""
    _, statistics, step = loop(ddpcore.LocalSGD(period=2, switch_step=60), every=30)
    for _ in range(60 + 30 * 23):
        step(torch.randn(4, 8, 3))
    records = statistics.records
    assert [record.at_mean for record in records[:4]] == [True, True, False, False]
    assert [record.num_steps for record in records] == [30, 30, *range(1, 21), 20, 20, 20]


def test_batches_that_are_not_full_are_left_out():
    torch.manual_seed(0)
    sizes = [8, 8, 2, 8, 8, 2]
    sizes_left: list[int] = []
    is_full = lambda: sizes_left.pop(0) == 8  # noqa: E731
    for strategy, kept, skipped in ((ddpcore.SSGD(), [2, 3], [1, 1]), (ddpcore.LocalSGD(period=9), [0, 0], [1, 1])):
        _, statistics, step = loop(strategy, every=3, batch_size=8, full_batch=is_full)
        sizes_left[:] = sizes
        for size in sizes:
            step(torch.randn(4, size, 3))
        assert [record.num_steps for record in statistics.records] == kept
        assert [record.num_skipped for record in statistics.records] == skipped
        assert [record.valid for record in statistics.records] == [bool(k) for k in kept]


def test_a_full_loss_that_is_not_finite_marks_the_record():
    handle, statistics, step = loop(
        ddpcore.SSGD(), every=1, full_loss=lambda: handle.model(torch.full((4, 1, 3), math.nan)).mean((1, 2)).sum()
    )
    step(torch.randn(4, 8, 3))
    (record,) = statistics.records
    assert not record.valid and record.reason == "a gradient of this step is not finite"
    assert record.whole is not None and math.isfinite(record.whole.trace)


def test_learning_rates_that_part_on_the_way_mark_the_record():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=4)
    loss = lambda: handle.model(torch.ones(4, 2, 3)).square().mean((1, 2)).sum()  # noqa: E731
    statistics = NoiseStatistics(handle, optimizer, 1, full_loss=loss)
    for rate in (0.1, 0.2):
        optimizer.param_groups[0]["lr"] = rate
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [record.valid for record in statistics.records] == [True, False]
    assert "several learning rates" in statistics.records[1].reason


class Crossed(nn.Module):
    """Used in another order than registered: the flat buffer is laid out anew after the first backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(4, 2), nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh())


@pytest.mark.parametrize("loaded_first", [True, False])
def test_resumed_statistics_know_the_segments_by_name(loaded_first):
    """Whether they are made before or after the handle has taken its old layout back."""
    batches = torch.randn(9, 4, 8, 3)

    def build(state: Any = None) -> tuple[Any, Any, Any]:
        torch.manual_seed(1)
        model = Crossed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        handle = ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=4)
        if state is not None and loaded_first:
            handle.load_state_dict(state[0])
        statistics = NoiseStatistics(handle, optimizer, 4)
        if state is not None:
            if not loaded_first:
                handle.load_state_dict(state[0])
            statistics.load_state_dict(state[1])

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            handle.model(x).square().mean((1, 2)).sum().backward()
            optimizer.step()

        return handle, statistics, step

    handle, through, step = build()
    for index, x in enumerate(batches):
        if index == 6:
            state = handle.state_dict(), through.state_dict()
        step(x)
    _, resumed, step = build(state)
    for x in batches[6:]:
        step(x)
    assert resumed.records[0].segments == through.records[1].segments
    assert resumed.records[0].whole.trace == pytest.approx(through.records[1].whole.trace, rel=1e-12)
    other = loop(ddpcore.SSGD())[1]
    with pytest.raises(ValueError, match="of a model with other parameters"):
        other.load_state_dict(state[1])
