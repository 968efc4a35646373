"""Local SGD against its equation: local steps, and the mean of the weights after every H-th."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ddpcore
from ddpcore import LocalSGD
from helpers import training


@pytest.mark.parametrize("period", [1, 2, 3, 10])
def test_the_equation(period: int) -> None:
    """With local momentum, against the equation in float64."""
    n = 3
    torch.manual_seed(0)
    inputs, targets = torch.randn(n, 6, 4), torch.randn(n, 6, 2)
    model = nn.Linear(4, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    handle = ddpcore.distribute(model, optimizer, LocalSGD(period), learners=n, vectorize=False)
    w = training.rows_of(handle, "weight").double()
    momentum = torch.zeros_like(w)
    for step in range(7):
        optimizer.zero_grad()
        (0.5 * (handle.model(inputs) - targets).square()).sum().backward()
        optimizer.step()
        gradients = torch.einsum(
            "jbo,jbi->joi", torch.einsum("jbi,joi->jbo", inputs.double(), w) - targets.double(), inputs.double()
        )
        momentum = 0.9 * momentum + gradients
        w = w - 0.01 * momentum
        if (step + 1) % period == 0:
            w = w.mean(dim=0).expand_as(w).clone()
        torch.testing.assert_close(training.rows_of(handle, "weight").double(), w, rtol=1e-5, atol=1e-5)
        averaged = torch.equal(handle.models[0].weight, handle.models[1].weight)
        assert averaged == ((step + 1) % period == 0)
    assert handle.learner.comm.bytes_sent == (7 // period) * 2 * 16 * 4  # gathered: two others, 16 floats


@pytest.mark.parametrize("period", [0, -1])
def test_impossible_periods(period: int) -> None:
    with pytest.raises(ValueError, match=f"period is {period}"):
        LocalSGD(period)


class Run:
    """Three learners on least squares. ``plain_step`` steps the equation in float64."""

    def __init__(self, strategy: LocalSGD, n: int = 3, outputs: int = 2) -> None:
        torch.manual_seed(0)
        self.inputs, self.targets = torch.randn(n, 6, 4), torch.randn(n, 6, outputs)
        self.model = nn.Linear(4, outputs, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.handle = ddpcore.distribute(self.model, self.optimizer, strategy, learners=n, vectorize=False)
        self.w = self.weights()

    def weights(self) -> torch.Tensor:
        return training.rows_of(self.handle, "weight").double()

    def gradients(self) -> torch.Tensor:
        x, y = self.inputs.double(), self.targets.double()
        return torch.einsum("jbo,jbi->joi", torch.einsum("jbi,joi->jbo", x, self.w) - y, x)

    def step(self) -> None:
        self.optimizer.zero_grad()
        (0.5 * (self.handle.model(self.inputs) - self.targets).square()).sum().backward()
        self.optimizer.step()

    def check(self) -> None:
        torch.testing.assert_close(self.weights(), self.w, rtol=1e-5, atol=1e-5)


def test_post_local() -> None:
    """Three steps of ssgd, then an average every two local ones, counted from the switch."""
    run = Run(LocalSGD(2, switch_step=3))
    for step in range(8):
        gradients = run.gradients()
        run.step()
        run.w = run.w - 0.01 * (gradients.mean(0) if step < 3 else gradients)
        if step in (4, 6):
            run.w = run.w.mean(0).expand_as(run.w).clone()
        run.check()
    assert not torch.equal(run.handle.models[0].weight, run.handle.models[1].weight)


def test_warm_up_doubles_the_period() -> None:
    """A period of 8 over a warm-up of 12 steps: 1 in the first four, then 2, then 4, and 8 after it."""
    strategy = LocalSGD(8, warmup_steps=12)
    averaged = [step for step in range(1, 33) if strategy.averages_weights_at(step)]
    assert averaged == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    run = Run(strategy)
    for step in range(1, 17):
        run.step()
        assert torch.equal(run.handle.models[0].weight, run.handle.models[1].weight) == (step in averaged)


def test_outer_optimizer_is_diloco() -> None:
    """Nesterov outer steps along the mean change of the learners, against the equation in float64."""
    run = Run(LocalSGD(3, outer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)))
    anchor, momentum = run.w[0].clone(), torch.zeros_like(run.w[0])
    for step in range(9):
        gradients = run.gradients()
        run.step()
        run.w = run.w - 0.01 * gradients
        if (step + 1) % 3 == 0:
            way = anchor - run.w.mean(0)
            momentum = 0.9 * momentum + way
            anchor = anchor - 0.7 * (way + 0.9 * momentum)
            run.w = anchor.expand_as(run.w).clone()
        run.check()


def test_outer_sgd_of_rate_one_is_the_average() -> None:
    ends = []
    for outer in (None, lambda p: torch.optim.SGD(p, lr=1.0)):
        run = Run(LocalSGD(2, outer=outer))
        for _ in range(6):
            run.step()
        ends.append(run.weights())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("outer", [None, lambda p: torch.optim.SGD(p, lr=1.0)], ids=["average", "outer"])
def test_fragments_are_averaged_at_their_own_time(outer: object) -> None:
    """16 columns in two fragments, a period of four: one is averaged after steps 4, 8, the other after 2, 6, 10."""
    run = Run(LocalSGD(4, fragments=2, outer=outer), outputs=4)
    flat = run.handle.learner.flat
    assert flat.numel == 16
    sent = []
    for step in range(1, 11):
        before = run.handle.learner.comm.bytes_sent
        run.step()
        first, second = (torch.equal(flat.param_LP[0, c], flat.param_LP[1, c]) for c in (slice(0, 8), slice(8, 16)))
        assert first == (step % 4 == 0)
        assert second == (step % 4 == 2)
        sent.append(run.handle.learner.comm.bytes_sent - before)
    assert sent == [0, 2 * 8 * 4] * 5


class Crossed(nn.Module):
    """Layers that are used in the reverse of the order in which they are registered."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(4, 2), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(inputs))


@pytest.mark.parametrize("fragments", [1, 2])
def test_fragments_are_the_same_whatever_the_order_of_gradients(fragments: int) -> None:
    """Synchronous steps change the layout otherwise, and virtual learners would have another layout than real ranks."""
    model = Crossed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    strategy = LocalSGD(4, switch_step=2, fragments=fragments)
    handle = ddpcore.distribute(model, optimizer, strategy, learners=2)
    assert handle.learner is not None
    before = handle.learner.flat.names
    for _ in range(3):
        optimizer.zero_grad()
        handle.model(torch.randn(2, 3, 4)).sum().backward()
        optimizer.step()
    assert (handle.learner.flat.names == before) == (fragments > 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"switch_step": -2}, "switch_step is -2"),
        ({"fragments": 0}, "fragments is 0"),
        ({"fragments": 9}, "fragments is 9: it must be at least 1 and at most 8"),
        ({"fragments": 2, "warmup_steps": 4}, "leave warmup_steps out"),
    ],
)
def test_impossible_options(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalSGD(8, **options)
