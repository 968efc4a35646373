"""A rank's place on a mesh of learners and shards, and its training there, for ``sharded_ranks``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

import ddpcore
from ddpcore.optim import FusedAdamW, FusedLAMB, FusedLARS, FusedSGD, Muon
from helpers import oracle
from helpers.oracle import MAKERS
from helpers.sharded_models import mixed, net

STEPS, BATCH = 6, 4
CPU = torch.device("cpu")
TOPOLOGY = ddpcore.Ring()


def muon(params: Any) -> Muon:
    every = list(params)
    kinds = {rule: [one for one in every if (one.dim() == 2) == (rule == "muon")] for rule in ("muon", "adamw")}
    return Muon([{"params": kind, "rule": rule} for rule, kind in kinds.items()], lr=0.01)


# A quotient g / (|g| + eps) turns the rounding of a gradient that is nearly zero into that of a whole step. This eps
# bounds it: a sum of terms below 1 with an error of 2^-24 changes a step of lr 0.01 by 6e-7 at most.
EPS = 1e-3
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: FusedAdamW(params, lr=0.01, eps=EPS),
    "lamb": lambda params: FusedLAMB(params, lr=0.01, eps=EPS),
    "lars": lambda params: FusedLARS(params, lr=0.1, momentum=0.9),
    "torch": lambda params: torch.optim.AdamW(params, lr=0.01, eps=EPS),
    "muon": muon,  # with float64, because it rounds its updates of float32 to bfloat16
}
UNITS = [["blocks.0"], ["blocks.1"], ["norm", "head"]]  # the modules that FSDP2 gathers one at a time
STRATEGIES = {
    **MAKERS,
    "units": lambda topology: ddpcore.LocalSGD(period=4, fragments=UNITS, outer=oracle.outer, overlap=1),
}
WHOLE = {"mixed": mixed, "double": lambda: net().double()}  # what a feature shards; elsewhere net()


def samples(learners: int, shards: int) -> tuple[Tensor, Tensor]:
    """``[STEPS, learners, shards * BATCH, 5]``, and labels."""
    generator = torch.Generator().manual_seed(5)
    size = (STEPS, learners, shards * BATCH)
    return torch.randn((*size, 5), generator=generator), torch.randint(0, 3, size, generator=generator)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(value).clone() for name, value in model.state_dict().items()}


class Place:
    """This rank's place on a mesh of learners and shards, of the first ranks. All ranks make it."""

    def __init__(self, learners: int, shards: int, like: Place | None = None) -> None:
        ranks = torch.arange(learners * shards).view(learners, shards)
        self.mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("learners", "shard"))
        self.num, self.shards, self.is_in = learners, shards, self.mesh.get_coordinate() is not None
        self.learner, self.shard = self.mesh.get_coordinate() or (-1, -1)
        self.x, self.y = samples(learners, shards) if like is None else (like.x, like.y)

    def batches(self, step: int, micro: int = 0, of: int = 1) -> tuple[Tensor, Tensor]:
        """``[learners, shards, b, 5]`` and labels: one micro-batch of all ranks."""
        x, y = (one[step].unflatten(1, (self.shards, of, -1))[:, :, micro] for one in (self.x, self.y))
        return x, y

    def batch(self, step: int, micro: int = 0, of: int = 1) -> tuple[Tensor, Tensor]:
        x, y = self.batches(step, micro, of)
        return x[self.learner, self.shard], y[self.learner, self.shard]

    def train(self, handle: Any, steps: range, clip: bool = False, micros: int = 1) -> None:
        """Of virtual learners, too: each has the batches of a whole shard group."""
        optimizer, dtype = handle.learner.optimizer, next(handle.model.parameters()).dtype
        for step in steps:
            optimizer.zero_grad()
            for micro in range(micros):
                with contextlib.nullcontext() if micro == micros - 1 else handle.no_sync():
                    if handle.comm.transport == "virtual":
                        handle.num_samples = range(1, self.num + 1)  # only strategies with weights read it
                        x, y = (one.flatten(1, 2) for one in self.batches(step, micro, micros))
                        outputs = handle.model(x.to(dtype))
                        handle.backward([cross_entropy(o, one) for o, one in zip(outputs, y, strict=True)])
                    else:
                        handle.num_samples = self.learner + 1
                        x, y = self.batch(step, micro, micros)
                        cross_entropy(handle.model(x.to(dtype)), y).backward()
            if clip and step == 3:
                handle.clip_grad_norm_(0.5)
            optimizer.step()


def begun(place: Place, strategy: str, optimizer: str, model: nn.Module, *, virtual: bool = False) -> Any:
    """The handle of a model that is a part of a learner, or of virtual learners."""
    made = OPTIMIZERS[optimizer]([one for one in model.parameters() if one.requires_grad])
    options = {"learners": place.num} if virtual else {"group": place.mesh["learners"]}
    return ddpcore.distribute(model, made, STRATEGIES[strategy](TOPOLOGY), **options)


def distance(mine: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    return max(float((mine[name] - value).abs().max()) for name, value in others.items())
