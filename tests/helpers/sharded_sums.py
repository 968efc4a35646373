"""Tensor parallelism whose gradients are partial sums on each rank, beside virtual learners, for ``sharded_ranks``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import ddpcore
from ddpcore.diagnostics import NoiseStatistics
from ddpcore.optim import FusedSGD
from ddpcore.parameters.learner_models import LearnerModels
from helpers.sharded_places import TOPOLOGY, Place, whole

STEPS = 4


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))


def sequence_parallel(mesh: DeviceMesh) -> nn.Module:
    """As in torch's tutorial: each rank normalizes its part of the samples."""
    up = ColwiseParallel(input_layouts=Shard(0))
    return parallelize_module(net(), mesh, {"0": SequenceParallel(sequence_dim=0), "1": up, "3": RowwiseParallel()})


def replicated_norm(mesh: DeviceMesh) -> nn.Module:
    """Each rank normalizes all samples, of which it has a part at first."""
    model = parallelize_module(net(), mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})

    def gathered(_: nn.Module, inputs: tuple[Tensor], mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(inputs[0], mesh, [Shard(0)]).redistribute(placements=[Replicate()])

    distribute_module(model[0], mesh, input_fn=gathered, output_fn=lambda _, outputs, mesh: outputs.to_local())
    return model


PLANS: dict[str, Callable[[DeviceMesh], nn.Module]] = {
    "sequence": sequence_parallel,
    "norm": replicated_norm,
    "inputs": lambda mesh: distribute_module(net(), mesh),
}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "ssgd": ddpcore.SSGD,
    "switch": lambda: ddpcore.LocalSGD(2, switch_step=2),
    "tracking": lambda: ddpcore.GradientTracking(TOPOLOGY),
    "dpsgd": lambda: ddpcore.DPSGD(TOPOLOGY),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
    "torch": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def beside_virtual(place: Place, plan: str, strategy: str, optimizer: str, passes: str) -> dict[str, Any]:
    """What this rank sees, and what virtual learners with the samples of both ranks see.

    ``passes``: the steps accumulate gradients, inside ``no_sync`` and in the average, or statistics measure them.
    """
    found: dict[str, Any] = {}
    for kind in ("sharded", "virtual"):
        model = PLANS[plan](place.mesh["shard"]) if kind == "sharded" else net()
        optim = OPTIMIZERS[optimizer](model.parameters())
        _loss(place, plan, kind, model, 0).backward()
        given = [whole(parameter.grad).clone() for parameter in model.parameters()]
        options = {"group": place.mesh["learners"]} if kind == "sharded" else {"learners": place.num}
        handle = ddpcore.distribute(model, optim, STRATEGIES[strategy](), **options)
        moved = [whole(parameter.grad).clone() for parameter in model.parameters()]
        loss_of = partial(_loss, place, plan, kind, handle.model)
        statistics, norms = _statistics(handle, loss_of, passes), list[Tensor]()
        for step in range(STEPS):
            optim.zero_grad()
            if passes == "accumulated":
                with handle.no_sync() if step % 2 else contextlib.nullcontext():
                    loss_of(step - 1).backward()
            loss_of(step).backward()
            norms += [whole(norm) for norm in handle.clip_grad_norm_(0.2)]
            optim.step()
        found[kind] = {
            "given": max(float((one - other).abs().max()) for one, other in zip(given, moved, strict=True)),
            "weights": [_own_weights(one) for one in handle.models],
            "apart": handle.consensus_distance(),
            "norms": torch.stack(norms).view(STEPS, -1).T.tolist(),
            "records": [_numbers(one) for one in statistics.records] if statistics else [],
        }
    return found


def _statistics(handle: Any, loss_of: Callable[[int], Tensor], passes: str) -> NoiseStatistics | None:
    if passes == "accumulated":
        return None
    more: dict[str, Any] = {}
    if passes == "dynamic":
        more["loss"] = lambda: loss_of(handle.learner.step)
        more["full_loss"] = lambda: (loss_of(step) / STEPS for step in range(STEPS))
    return NoiseStatistics(handle, handle.learner.optimizer, 1, batch_size=8, **more)


def _loss(place: Place, plan: str, kind: str, model: nn.Module, step: int) -> Tensor:
    if kind == "virtual":
        x = place.x[step] if isinstance(model, LearnerModels) else place.x[step, 0]
        return model(x).square().flatten(1).mean(1).sum() if x.dim() == 3 else model(x).square().mean()
    x = place.batch(step)[0]  # the rest is on the other rank
    if plan == "inputs":
        x = DTensor.from_local(x, place.mesh["shard"], [Shard(0)])
    loss = model(x).square().mean()
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def _own_weights(model: nn.Module) -> Tensor:
    """The weights that this rank holds: a replica as it is, which others may differ from."""
    own = [
        one.to_local() if isinstance(one, DTensor) and one.placements[0].is_replicate() else whole(one)
        for one in model.parameters()
    ]
    return torch.cat([one.detach().flatten() for one in own])


def _numbers(record: Any) -> tuple[float, ...]:
    rates = (record.dynamics.effective_lr, record.dynamics.full_loss) if record.dynamics else ()
    return (record.whole.trace, record.whole.grad_squared, *rates)


CASES = [(plan, name, "fused", "dynamic") for plan in PLANS for name in STRATEGIES]
CASES += [("sequence", name, "torch", passes) for name in ("ssgd", "dpsgd") for passes in ("plain", "accumulated")]
CASES += [("sequence", name, "fused", "accumulated") for name in STRATEGIES]
