"""One strategy in the race: its model, optimizer and trainer, and what was seen of it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcore import models, parallel, strategies
from ddpcore.bench.config import BenchConfig, Plan
from ddpcore.bench.gpu import GpuMeter
from ddpcore.comm.base import all_reduce_bytes
from ddpcore.data import Dataset, ShardedBatches
from ddpcore.engine import Trainer
from ddpcore.flat import MiB
from ddpcore.launch import World
from ddpcore.metrics import quantiles
from ddpcore.optim import FusedSGD
from ddpcore.strategies import Baseline, Strategy

# Hidden contenders: the work of ddp, and that of our strategies with their hooks and optimizer, on every rank with no
# communication at all.
COMPUTE, OWN_COMPUTE = HIDDEN = ("compute", "own_compute")
NEVER = 2**40  # a period that no run reaches: local_sgd without an average is a step without communication

DEFAULT_BUCKET_MB = 25.0  # of distribute() and of DistributedDataParallel, both with a first bucket of 1 MiB
LARGEST_BUCKET_MB = 2.0**20  # beyond any model


@dataclass
class Contender:
    """A strategy on this rank.

    Attributes:
        trainer: None where the strategy does not run on this rank (``single`` runs on rank 0 alone).
        step_seconds: of every timed step here.
        losses: ``[L]`` a step.
    """

    name: str
    trainer: Trainer | None
    num_parameters: int
    step_seconds: list[float] = field(default_factory=list)
    block_seconds: list[float] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)

    def run_block(self, num_steps: int, timed: bool) -> None:
        """Train on; keep the times of the steps if ``timed``."""
        if self.trainer is None:
            return
        cuda = self.trainer.dataset.train.labels.is_cuda
        for _ in range(num_steps):
            start = time.perf_counter()
            loss = self.trainer.step()
            if cuda:
                torch.cuda.synchronize()
            if timed:
                self.step_seconds.append(time.perf_counter() - start)
            self.losses.append(loss)

    def bytes_per_step(self, world_size: int) -> float | None:
        """Bytes that one learner sends a step; for DDP what an all-reduce of its gradients takes."""
        if self.trainer is None or self.name in ("single", *HIDDEN):
            return 0.0
        if self.name == "ddp":
            return float(all_reduce_bytes(4 * self.num_parameters, world_size))
        learner = self.trainer.handle.learner
        return None if learner is None else learner.comm.bytes_sent / max(1, learner.step)


def run_block(one: Contender, num_steps: int, timed: bool, meter: GpuMeter | None = None) -> None:
    """Train on; the block lasts until its slowest rank is done. Ranks that only wait are not metered. Collective."""
    barrier()
    if meter is not None and one.trainer is not None:
        meter.start()
    start = time.perf_counter()
    one.run_block(num_steps, timed)
    barrier()
    if timed:
        one.block_seconds.append(time.perf_counter() - start)
    if meter is not None and one.trainer is not None:
        meter.stop(one.name, timed)


def compute_of(name: str) -> str:
    """The hidden contender that does the same work as a strategy."""
    return COMPUTE if name == strategies.DDP.name else OWN_COMPUTE


def exposed_ms(own: Sequence[float], compute: Sequence[float], num_steps: Sequence[int]) -> float:
    """Milliseconds of a step that communication is seen: the median over blocks of a strategy's less that of the same
    work without communication, which ran in the same turn; at least 0."""
    blocks = zip(own, compute, num_steps, strict=True)
    return max(0.0, quantiles(1e3 * (mine - alone) / steps for mine, alone, steps in blocks)["p50"])


def barrier() -> None:
    """Wait for all ranks, where there are several."""
    if dist.is_initialized():
        dist.barrier()


def build_model(config: BenchConfig, dataset: Dataset) -> nn.Module:
    """A new model, on torch's default device.

    Raises:
        ValueError: the model does not take such samples, or an option's value.
    """
    options = config.model_options or {}
    return models.build(config.model, input_shape=dataset.input_shape, num_classes=dataset.num_classes, **options)


def build(name: str, plan: Plan, world: World, dataset: Dataset, bucket_mb: float = DEFAULT_BUCKET_MB) -> Contender:
    """The contender of a strategy's name, on its device, from the same initial weights as every other.

    ``bucket_mb`` is the largest bucket of averaged gradients; infinity puts all of them into one.
    """
    config = plan.config
    torch.manual_seed(config.seed)
    model = build_model(config, dataset)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    model.to(plan.device)
    alone = name in ("single", COMPUTE)
    virtual = plan.choice.backend == "virtual"
    whole_batch = name == "single"
    if whole_batch and world.rank != 0:
        return Contender(name, None, num_parameters)
    baseline = alone or name == "ddp"
    optimizer: torch.optim.Optimizer
    if baseline:  # what a user would otherwise run
        optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum, fused=True)
    else:
        optimizer = FusedSGD(model.parameters(), lr=config.lr, momentum=config.momentum)
    if name == OWN_COMPUTE:
        strategy: Strategy | Baseline = strategies.LocalSGD(period=NEVER)
    else:
        strategy = config.strategy(strategies.Single.name if alone else name)
    if name == "ddp" and bucket_mb != DEFAULT_BUCKET_MB:  # a cap that is given has no smaller first bucket
        strategy = strategies.DDP(bucket_cap_mb=min(bucket_mb, LARGEST_BUCKET_MB))
    bucket_bytes = int(min(bucket_mb, LARGEST_BUCKET_MB) * MiB)
    first_bucket_bytes = bucket_bytes if bucket_mb == math.inf else min(bucket_bytes, MiB)
    buckets: dict[str, Any] = {"bucket_bytes": bucket_bytes, "first_bucket_bytes": first_bucket_bytes}
    num_rows = plan.world_size if virtual and not alone else None
    handle = parallel.distribute(
        model,
        optimizer,
        strategy,
        learners=num_rows,
        transport="auto" if baseline or plan.transport is None else plan.transport.name,
        vectorize=None if num_rows is None else "measure",
        **({} if baseline else buckets),
    )
    num_learners = 1 if whole_batch else plan.world_size
    batches = ShardedBatches(len(dataset.train), config.batch_size, num_learners, config.seed)
    stacked = virtual and not alone
    learners = list(range(plan.world_size)) if stacked else [0 if whole_batch else world.rank]
    trainer = Trainer(handle, optimizer, dataset, batches, learners=learners, stacked=stacked)
    return Contender(name, trainer, num_parameters)
