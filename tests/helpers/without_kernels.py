"""What a process does that finds no compiled library: run as a script, or called by a process that has one.

Usage: ``python without_kernels.py result.pt`` with the package on the path.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn


def results() -> dict[str, Any]:
    """Every operator once, on the same numbers in every process: the tensors that it has written or returned."""
    from ddpcore import ops
    from helpers import steps

    torch.manual_seed(0)
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for rule in steps.RULES:
        for kind, (dtype, masters) in steps.KINDS.items():
            for rounded in (False,) if masters else (False, True):
                weights = [torch.randn(size).to(dtype) for size in (5000, 0, 17)]
                step = steps.new_step(rule, weights, masters=masters, group_sizes=[1, 2])
                (step.rounded() if rounded else step).run()
                for name, tensors in [*step.written().items(), ("trust", [step.trust])]:
                    what = f"{rule} {kind} rounded {rounded} {name}"
                    found |= {f"{what} {index}": tensor for index, tensor in enumerate(tensors)}
    weights, peer, grad, buffer = torch.randn(4, 5000).unbind(0)
    stack, elsewhere, values = torch.randn(2, 500), torch.randn(500), torch.rand(6)
    found["mix_"] = ops.mix_(weights, [peer], 0.5, [0.5], noise=ops.Noise(0.1, seed=1, step=2))
    rows = torch.tensor([0, 3, 6]), torch.tensor([0, 1, 2, 1, 0, 2]), values
    found["mix_stacked_"] = ops.mix_stacked_(stack, [elsewhere], *rows)
    count = torch.zeros(1)
    rule = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}
    mixture, scratch = ops.Mixture([peer], 0.5, [0.5]), ops.new_scratch([weights])
    ops.sgd_step_([weights], [grad], [buffer], [], [count], scratch, mixture=mixture, offsets=[0], **rule)
    found["segment_norms"] = ops.segment_norms([weights, peer])
    total = torch.zeros(9, dtype=torch.float64)
    ops.total_norm_([weights, peer], total)
    return found | {"weights": weights, "buffer": buffer, "stack": stack, "count": count, "total_norm_": total[0]}


def train(name: str, dtype: torch.dtype) -> list[float]:
    """The losses of a few steps of a fused optimizer."""
    from ddpcore import optim

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).to(dtype)
    lr = {"FusedSGD": 0.1, "FusedLARS": 5.0, "FusedLAMB": 0.05, "FusedAdamW": 0.05}[name]
    optimizer = getattr(optim, name)(model.parameters(), lr=lr, weight_decay=0.01, max_grad_norm=1.0)
    inputs = torch.randn(64, 5, dtype=dtype)
    targets = inputs.sum(dim=1, keepdim=True)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def distributed() -> list[Tensor]:
    """Weights after some steps of each strategy on two virtual learners."""
    import ddpcore
    from ddpcore.optim import FusedSGD

    found = []
    for strategy in (ddpcore.SSGD(), ddpcore.DPSGD(ddpcore.Complete())):
        torch.manual_seed(0)
        model = nn.Linear(5, 1)
        inputs = torch.randn(2, 8, 5)
        optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
        handle = ddpcore.distribute(
            model,
            optimizer,
            strategy,
            learners=2,
            connection=ddpcore.Connection(bucket_bytes=64, first_bucket_bytes=64),
        )
        for _ in range(3):
            optimizer.zero_grad()
            handle.model(inputs).square().mean(dim=(1, 2)).sum().backward()
            optimizer.step()
        found.append(handle.learner.flat.param_LP.clone())
    return found


def main() -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import ddpcore.ops
        import ddpcore.optim
        from ddpcore.ops import library  # noqa: F401  a second import
        from ddpcore.runtime.machine import machine
    warned = [(warning.category.__name__, str(warning.message)) for warning in caught]
    leaf = torch.ones(3, requires_grad=True)
    ddpcore.ops.sgd_step_([leaf], [torch.ones(3)], lr=0.5)
    losses = {
        f"{name} {dtype}": train(name, dtype)
        for name in ("FusedSGD", "FusedAdamW", "FusedLARS", "FusedLAMB")
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
    }
    return {
        "why": ddpcore.ops.WHY_NOT_COMPILED,
        "kernels": machine("cpu")["kernels"],
        "package": ddpcore.__file__,
        "warned": warned,
        "distributed": distributed(),
        "leaf": leaf.detach(),
        "losses": losses,
        "results": results(),
    }


if __name__ == "__main__":
    torch.save(main(), sys.argv[1])
