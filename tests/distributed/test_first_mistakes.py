"""First mistakes with virtual learners get an error that names the way out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ddpcore

L = 3


def trained(strategy: ddpcore.Strategy, learners: int | None = L) -> tuple[ddpcore.Distributed, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ddpcore.distribute(model, optimizer, strategy, learners=learners), optimizer


def test_backward_adds_the_losses_of_all_learners():
    x, y = torch.randn(L, 6, 5), torch.randint(3, (L, 6))
    grads = []
    for as_tensor in (False, True):
        handle, _ = trained(ddpcore.DPSGD(ddpcore.Ring()))
        losses = [F.cross_entropy(output, labels) for output, labels in zip(handle.model(x), y, strict=True)]
        handle.backward(torch.stack(losses) if as_tensor else losses)
        grads.append([[p.grad.clone() for p in model.parameters()] for model in handle.models])
    alone, _ = trained(ddpcore.DPSGD(ddpcore.Ring()))
    for row, model in enumerate(alone.models):
        F.cross_entropy(model(x[row]), y[row]).backward()
        for found in grads:
            for one, p in zip(found[row], model.parameters(), strict=True):
                torch.testing.assert_close(one, p.grad)


def test_backward_refuses_a_mean():
    handle, _ = trained(ddpcore.SSGD())
    x, y = torch.randn(L, 6, 5), torch.randint(3, (L, 6))
    loss = F.cross_entropy(handle.model(x).flatten(0, 1), y.flatten())
    with pytest.raises(ValueError, match=r"losses have shape \(\): pass one loss for each of 3 learners"):
        handle.backward(loss)
    with pytest.raises(ValueError, match=r"losses have shape \(2,\)"):
        handle.backward(torch.stack([loss, loss]))


def test_backward_of_one_learner_takes_its_loss():
    handle = ddpcore.distribute(model := nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=0.1), ddpcore.Single())
    handle.backward(handle.model(torch.ones(4, 2)).mean())
    assert torch.equal(model.weight.grad, torch.ones(1, 2))


def test_distribute_in_inference_mode():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.inference_mode(), pytest.raises(ValueError, match=r"inside torch.inference_mode\(\)"):
        ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2)
    ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2)  # nothing was changed


@pytest.mark.parametrize("strategy", [ddpcore.NoisySSGD(0.1, where="per_learner"), ddpcore.ADPSGD()])
@pytest.mark.parametrize("way", ["forward", "a layer"])
def test_a_forward_pass_that_no_hook_sees(strategy, way):
    """The strategy would do nothing in it."""
    strategy = type(strategy)(0.1, where="per_learner") if isinstance(strategy, ddpcore.NoisySSGD) else ddpcore.ADPSGD()
    handle, optimizer = trained(strategy)
    before = [p.detach().clone() for model in handle.models for p in model.parameters()]
    for model in handle.models:
        x = torch.ones(6, 5)
        output = model.forward(x) if way == "forward" else model[2](model[1](model[0](x)))
        output.square().mean().backward()
    with pytest.raises(RuntimeError, match="saw none in this step: call the model itself"):
        optimizer.step()
    after = [p.detach() for model in handle.models for p in model.parameters()]
    assert all(map(torch.equal, before, after))
