"""Synchronous SGD against its equation: w(t+1) = w(t) - a/n sum_k g_k(w(t))."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ddpcore
from ddpcore import SSGD
from ddpcore.distributed.alike import compared_options
from ddpcore.optim import FusedLAMB
from helpers.connection import connected


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_the_equation(n: int) -> None:
    """Quadratics 0.5 |w x - y|^2, one for each learner, against the equation in float64."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(n, 6, 4), torch.randn(n, 6, 2)
    model = nn.Linear(4, 2, bias=False)
    w: Tensor = model.weight.detach().double().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = ddpcore.distribute(model, optimizer, SSGD(), learners=n, vectorize=False)
    for _ in range(5):
        optimizer.zero_grad()
        (0.5 * (handle.model(inputs) - targets).square()).sum().backward()
        optimizer.step()
        gradients = [(x.double() @ w.T - y.double()).T @ x.double() for x, y in zip(inputs, targets, strict=True)]
        w = w - 0.01 * sum(gradients) / n
        for one in handle.models:
            torch.testing.assert_close(one.weight.detach().double(), w, rtol=1e-5, atol=1e-6)
            assert torch.equal(one.weight, model.weight)


def test_bytes_are_one_average_a_step() -> None:
    model = nn.Linear(16, 16, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = ddpcore.distribute(model, optimizer, SSGD(), learners=4)
    for _ in range(3):
        optimizer.zero_grad()
        handle.model(torch.ones(4, 2, 16)).sum().backward()
        optimizer.step()
    assert handle.learner.comm.bytes_sent == 3 * (3 * 256 * 4)  # gathered: three others
    assert handle.learner.step == 3


def test_a_graph_that_was_kept_from_a_backward_pass_that_died_is_refused() -> None:
    """Its averages still write to the gradient buffer. The next forward pass finishes them and starts again."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes = {"bucket_bytes": 64, "first_bucket_bytes": 64}
    handle = ddpcore.distribute(model, optimizer, SSGD(), learners=2, vectorize=False, **connected(**sizes))
    inputs = torch.ones(2, 3, 4)
    is_broken = True

    def explode(grad: Tensor) -> None:
        if is_broken:
            raise ArithmeticError("boom")

    loss = handle.model(inputs).sum()
    model[0].weight.register_hook(explode)
    with pytest.raises(ArithmeticError, match="boom"):
        loss.backward(retain_graph=True)
    is_broken = False
    with pytest.raises(RuntimeError, match="on the graph of an earlier pass that failed"):
        loss.backward(retain_graph=True)
    optimizer.zero_grad()
    handle.model(inputs).sum().backward()
    for one in handle.models:
        assert torch.equal(one[1].bias.grad, torch.full((4,), 3.0))
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", ["weights", "state"])
def test_one_number_that_changes_on_one_learner_is_found(what: str, dtype: torch.dtype) -> None:
    """In a compared step: every bit of weights and states is, not a sample of them."""
    model = nn.Sequential(nn.Linear(5, 101), nn.Linear(101, 3)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = ddpcore.distribute(model, optimizer, SSGD(), learners=2)
    for step in range(4):
        if step == 3:
            weight = handle.models[1][0].weight
            changed = weight.detach() if what == "weights" else optimizer.state[weight]["momentum_buffer"]
            changed[37, 3] += 1
        optimizer.zero_grad()
        outputs = handle.model(torch.ones(2, 4, 5, dtype=dtype))
        if step == 3:
            start = "the weights of" if what == "weights" else "the state of the optimizer for 0.weight on"
            with pytest.raises(RuntimeError, match=f"{start} learner 1 differ"):
                outputs.sum().backward()
        else:
            outputs.sum().backward()
            optimizer.step()


def test_a_tuple_as_option_is_compared_as_one_option() -> None:
    """One on a rank alone is named: ``add groups on all alike`` was no cause."""
    optimizer = FusedLAMB([torch.ones(3, requires_grad=True)], lr=0.1)
    before = compared_options(optimizer)
    optimizer.param_groups[0]["trust_clip"] = (0.1, torch.tensor(2.0))
    after = compared_options(optimizer)
    assert [name for name, _ in before] == [name for name, _ in after]
    assert ("trust_clip of group 0", (pytest.approx(0.1), 2.0)) in after
