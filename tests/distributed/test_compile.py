"""distribute() and torch.compile in the documented order, on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

import ddpcore
from ddpcore.parameters.buckets import GradientBuckets


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    torch.compiler.reset()
    yield
    dist.destroy_process_group()


def in_place(model: nn.Module) -> nn.Module:
    """Torch 2.14 compiles the hooks of a model, too, and breaks the graph at each of ours."""
    model.compile(backend="eager", fullgraph=torch.__version__ < "2.14")
    return model


def wrapped(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager", fullgraph=True)


def trained(strategy: ddpcore.Strategy, compiled: Any) -> Tensor:
    """The weights after three steps, and the weights of the averaged copy, which runs too."""
    torch.manual_seed(0)
    model = compiled(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, strategy)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
    copied = handle.evaluation_model()
    assert copied(torch.zeros(1, 4)).shape == (1, 2)
    assert handle.learner is not None and handle.learner.step == 3
    return torch.cat([parameter.detach().flatten() for one in (model, copied) for parameter in one.parameters()])


@pytest.mark.parametrize("compiled", [wrapped, in_place])
@pytest.mark.parametrize("order", ["ssgd", *ddpcore.strategies.dpsgd.ORDERS])
def test_compile_first(order: str, compiled: Any) -> None:
    """Whole graphs give the bits of a model that is not compiled. combine_then_adapt changes weights in the hook."""
    strategies = [ddpcore.SSGD() if order == "ssgd" else ddpcore.DPSGD(ddpcore.Ring(), order=order) for _ in range(2)]
    assert torch.equal(trained(strategies[0], compiled), trained(strategies[1], lambda model: model))


def test_whole_graphs_after_distribute_are_refused() -> None:
    model = nn.Linear(4, 2)
    ddpcore.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), ddpcore.SSGD())
    with pytest.raises(RuntimeError, match=r"call torch.compile\(model\), then distribute\(\)"):
        wrapped(model)(torch.zeros(1, 4))


@pytest.mark.parametrize("strategy", [ddpcore.SSGD, lambda: ddpcore.LocalSGD(2)], ids=["ssgd", "local_sgd"])
def test_a_compiled_loop_compiles_no_hook_of_a_gradient(strategy: Any) -> None:
    """They run inside the backward pass of a loop that is compiled, and read what changes with each pass."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ddpcore.distribute(model, optimizer, strategy(), learners=2)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        handle.model(x).square().mean((1, 2)).sum().backward()
        optimizer.step()

    compiled = torch.compile(step, backend="eager")
    for _ in range(2):
        compiled(torch.randn(2, 4, 3))
    assert handle.learner is not None and _debug_get_cache_entry_list(step.__code__), "the loop was not compiled"
    hooks = handle.learner.flat.parameters[0]._post_accumulate_grad_hooks.values()  # type: ignore[attr-defined]
    codes = [getattr(hook, "func", hook).__code__ for hook in hooks] + [GradientBuckets._hook.__code__]
    assert len(codes) == 2
    assert not any(map(_debug_get_cache_entry_list, codes))


@pytest.mark.slow
@pytest.mark.parametrize("learners", [None, 2])
def test_torch_cond_refuses_weights_of_one_buffer(learners: int | None) -> None:
    class Branches(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda x: F.linear(x, self.weight, self.bias), lambda x: -x[..., :2], (x,))

    model = Branches(4, 2)
    handle = ddpcore.distribute(model, torch.optim.SGD(model.parameters(), 0.1), ddpcore.SSGD(), learners=learners)
    with pytest.raises(Exception, match="Input-to-input aliasing"):
        handle.model(torch.ones(3, 4) if learners is None else torch.ones(2, 3, 4))
