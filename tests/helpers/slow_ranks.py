"""One of four real ranks, of which rank 1 is busy for 200 ms in its backward pass, on a clock of the test.

A forward pass takes 10 ms. Where ranks wait for each other, the clocks of all become the latest of them.
"""

from __future__ import annotations

import copy
import pickle
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ddpcore
from ddpcore.distributed.phases import PhaseClock
from helpers.ranks import join

MAKERS: dict[str, Any] = {
    "ddp": ddpcore.DDP,
    "ssgd": ddpcore.SSGD,
    "dpsgd": lambda: ddpcore.DPSGD(ddpcore.Ring()),
    "local_sgd": lambda: ddpcore.LocalSGD(period=2),
}
PLACES = ("nobody", "forward", "backward", "rest", "a little", "two")
now = [0.0]


class Busy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        now[0] += ctx.seconds
        return gradient, None


class Net(nn.Module):
    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.seconds = forward, backward

    def forward(self, inputs: Tensor) -> Tensor:
        now[0] += 0.01 + self.seconds[0]
        return self.last(Busy.apply(self.first(inputs), self.seconds[1]))


def latest(method: Any) -> Any:
    """The method of a wait that ends when the last rank is there."""

    def waits(self: Any, *args: Any) -> Any:
        clock = torch.tensor(now[0], dtype=torch.float64)
        dist.all_reduce(clock, op=dist.ReduceOp.MAX)
        now[0] = clock.item()
        return method(self, *args)

    return waits


def main() -> None:
    path, rank, _ = join()
    time.perf_counter = lambda: now[0]
    PhaseClock.__exit__ = latest(PhaseClock.__exit__)  # type: ignore[method-assign]
    PhaseClock._end_waiting = latest(PhaseClock._end_waiting)  # type: ignore[method-assign]
    found: dict[Any, Any] = {}
    for name, make in MAKERS.items():
        for place in PLACES:
            busy = {"a little": 0.001, "nobody": 0.0}.get(place, 0.2) * (rank == 1)
            busy += 0.2 * (place == "two" and rank == 2)
            in_passes = (busy, 0.0) if place == "forward" else (0.0, 0.0 if place == "rest" else busy)
            torch.manual_seed(0)
            model = Net(*in_passes)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            handle = ddpcore.distribute(model, optimizer, make())
            for _ in range(5):
                optimizer.zero_grad()
                handle.model(torch.ones(2, 4)).sum().backward()
                now[0] += busy if place == "rest" else 0.0
                optimizer.step()
            found[name, place] = [handle.slow_ranks(), handle.slow_ranks()]
    before = handle.phases.forward
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    found["copies"] = [one(torch.ones(2, 4)).requires_grad and handle.phases.forward == before for one in copies]
    torch.save(found, path)


if __name__ == "__main__":
    main()
