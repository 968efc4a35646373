"""What a program does around training with learners that are sharded: evaluations, and buffers that are DTensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_module

import ddpcore
from ddpcore.optim import FusedSGD
from helpers.sharded_models import net, sharded
from helpers.sharded_places import whole

STEPS = 4


def evaluated(place: Any) -> bool:
    """Whether an evaluation before ``distribute``, and averages in ``torch.inference_mode()``, change no bit."""
    rows = []
    for is_evaluated in (True, False):
        model = sharded(net(), place.mesh["shard"])
        optimizer = FusedSGD(model.parameters(), lr=0.1)
        if is_evaluated:
            with torch.no_grad():
                model(place.x[0, 0])  # FSDP2 keeps the weights of the root gathered
        handle = ddpcore.distribute(model, optimizer, ddpcore.LocalSGD(2), group=place.mesh["learners"])
        for step in range(STEPS):
            optimizer.zero_grad()
            model(place.batch(step)[0]).square().mean().backward()
            optimizer.step()
            if is_evaluated or step == STEPS - 1:
                with torch.inference_mode() if is_evaluated else torch.no_grad():
                    average = handle.evaluation_model()(place.x[0, 0])
        rows.append([average.clone(), *(whole(one).detach().clone() for one in model.parameters())])
    return all(map(torch.equal, *rows))


def halved(place: Any) -> bool:
    """Whether a loop that halves gradients in place has the bits of one that halves the loss."""
    rows = []
    for in_place in (True, False):
        model = sharded(net(), place.mesh["shard"])
        optimizer = FusedSGD(model.parameters(), lr=0.1)
        ddpcore.distribute(model, optimizer, ddpcore.DPSGD(ddpcore.Ring()), group=place.mesh["learners"])
        for step in range(STEPS):
            optimizer.zero_grad()
            (model(place.batch(step)[0]).square().mean() * (1.0 if in_place else 0.5)).backward()
            for parameter in model.parameters() if in_place else ():
                parameter.grad.mul_(0.5)
            optimizer.step()
        rows.append([whole(one).detach().clone() for one in model.parameters()])
    return all(map(torch.equal, *rows))


class Counted(nn.Module):
    """A buffer follows the inputs of each learner."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen += self.layer.weight.mean(0)
        return self.layer(inputs)


def buffers(place: Any, option: str) -> dict[str, float]:
    """How far the average's buffers are from the mean of all learners', and after a policy, one learner's from it."""
    torch.manual_seed(0)
    shard = place.mesh["shard"]
    model = distribute_module(Counted(), shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    more: dict[str, Any] = {
        "skip": {"on_nonfinite": "skip"},
        "policy": {"policies": ddpcore.Policies(batch_norm="average")},
    }.get(option, {})
    handle = ddpcore.distribute(model, optimizer, ddpcore.LocalSGD(3), group=place.mesh["learners"], **more)
    torch.manual_seed(place.learner)
    before = torch.zeros(6)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs = DTensor.from_local(torch.randn(4, 6), shard, [Shard(0)])
        factor = float("inf") if option == "skip" and step == 3 and place.learner else 1.0
        before = whole(model.seen).clone()
        (model(inputs).square().mean() * factor).full_tensor().backward()
        optimizer.step()
    own = whole(model.seen)
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, own)
    mean = (held[0] + held[2]) / 2
    found = {"average": float((whole(handle.evaluation_model().seen) - mean).abs().max())}
    if option == "skip" and place.learner:
        found["restored"] = float((own - before).abs().max())
    if option == "policy":
        found["apart"] = float((held[0] - held[2]).abs().max())
    return found
