"""What an installed ddpcore must do with torch and numpy alone. Exits with an error where it does not.

Usage: ``python smoke.py``, in a folder that holds no ddpcore.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import nn

import ddpcore
from ddpcore import ops, optim
from ddpcore.runtime import launch
from ddpcore.runtime.launch import World

HERE = Path(ddpcore.__file__).parent


def loss_after_steps(optimizer: type[torch.optim.Optimizer], lr: float) -> float:
    """The loss of a small regression after some steps, as a part of the first loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    inputs = torch.randn(64, 5)
    stepper = optimizer(model.parameters(), lr=lr)
    losses = []
    for _ in range(20):
        stepper.zero_grad()
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        stepper.step()
        losses.append(loss.item())
    return losses[-1] / losses[0]


def train_learners(strategy: ddpcore.Strategy) -> None:
    """Three steps of four virtual learners."""
    model = nn.Linear(5, 1)
    optimizer = optim.FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = ddpcore.distribute(model, optimizer, strategy, learners=4)
    for _ in range(3):
        optimizer.zero_grad()
        handle.model(torch.randn(4, 8, 5)).square().mean().backward()
        optimizer.step()
    assert handle.evaluation_model()(torch.zeros(1, 5)).isfinite().all()


def train_rank(world: World, transport: str) -> None:
    """Three steps of a real rank, which averages with the other one."""
    torch.manual_seed(world.rank)
    model = nn.Linear(5, 1)
    optimizer = optim.FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    connection = ddpcore.Connection(transport=transport)
    handle = ddpcore.distribute(model, optimizer, ddpcore.DPSGD(ddpcore.Complete()), connection=connection)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()
    assert 0 < handle.consensus_distance() < 1


def main() -> None:
    """Check the files, the compiled library, every optimizer, some strategies, and two ranks over each transport."""
    assert HERE.parent == Path(sysconfig.get_paths()["purelib"]), f"ddpcore is imported from {HERE}"
    files = [*HERE.glob("py.typed"), *HERE.glob("data/digits.npz"), *HERE.glob("experiments/studies/ssgd-*.toml")]
    assert len(files) >= 3, f"of the files beside the code there are only {files}"
    assert ops.WHY_NOT_COMPILED is None, ops.WHY_NOT_COMPILED
    for optimizer, lr in ((optim.FusedSGD, 0.1), (optim.FusedLARS, 5.0), (optim.FusedLAMB, 0.05)):
        left = loss_after_steps(optimizer, lr)
        assert left < 0.9, f"{optimizer.__name__} leaves {left:.2f} of the loss"
    for strategy in (ddpcore.SSGD(), ddpcore.DPSGD(ddpcore.RandomPair(seed=0)), ddpcore.LocalSGD(period=2)):
        train_learners(strategy)
    for transport in ("shm", "pg"):
        launch.run(train_rank, (transport,), world_size=2, backend="gloo")
    kernels = [key for key in ("CPU", "CUDA") if torch._C._dispatch_has_kernel_for_dispatch_key("ddpcore::mix_", key)]
    print(f"ddpcore {ddpcore.__version__}, torch {torch.__version__}, kernels for {' and '.join(kernels)}")


if __name__ == "__main__":
    main()
