"""One strategy in the comparison: its trainer and its measurements."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpcore.bench.config import SILENT, ResolvedConfig
from ddpcore.comm.groups import barrier, default_group, gather_objects
from ddpcore.comm.reductions import all_reduce_bytes
from ddpcore.data import Dataset, ShardedBatches
from ddpcore.parameters.flat import MiB
from ddpcore.runtime.launch import World
from ddpcore.runtime.timing import quantiles
from ddpcore.strategies.base import Baseline, Strategy
from ddpcore.strategies.learner import NonFiniteError
from ddpcore.strategies.registry import STRATEGIES, is_baseline
from ddpcore.training import Trainer
from ddpcore.training.build import LearnerPlacement, build_trainer, check_parts, read_dataset

COMPUTE, OWN_COMPUTE = "compute", "own_compute"
# Hidden contenders do the work of baselines, and of ddpcore's strategies with their hooks and optimizer, on every rank
# and without any communication. With which strategy each trains:
HIDDEN = {COMPUTE: "single", OWN_COMPUTE: SILENT}
DEFAULT_BUCKET_MB = 25.0  # of distribute() and of DistributedDataParallel, both with a first bucket of 1 MiB
LARGEST_BUCKET_MB = 2.0**20  # larger than any model
WARM_UP_STEPS = 3  # DDP rebuilds its buckets after its first step, ddpcore before the second


@dataclass
class Contender:
    """A strategy on this rank."""

    name: str
    trainer: Trainer | None  # None if this rank is idle, because the strategy trains one learner, on rank 0
    strategy: Strategy | Baseline  # that it trains with, for questions about it
    step_seconds: list[float] = field(default_factory=list)  # of every timed step on this rank
    block_seconds: list[float] = field(default_factory=list)  # of every timed block, until the slowest rank was done
    block_samples: list[int] = field(default_factory=list)  # of every timed block, of all learners
    losses: list[Tensor] = field(default_factory=list)  # [L] for each step

    @classmethod
    def build(
        cls, name: str, resolved: ResolvedConfig, world: World, dataset: Dataset, bucket_mb: float = DEFAULT_BUCKET_MB
    ) -> "Contender":
        """The contender of a strategy, with the same initial weights as every other.

        ``bucket_mb`` is the largest bucket of averaged gradients; infinity puts all gradients into one bucket.
        """
        if is_idle(name, resolved, world):
            return cls(name, None, resolved.config.strategy(name))
        strategy, data = HIDDEN.get(name, name), resolved.training.data
        own_size = data.learners_batch[world.rank] if data.learners_batch else data.batch_size // resolved.world_size
        share = own_size if name == COMPUTE else None
        own = ddp_options(bucket_mb) if STRATEGIES.takes(strategy, "bucket_cap_mb") else {}
        config = resolved.train_config(strategy, options=own, batch_size=share)
        options: dict[str, Any] = {}
        if not is_baseline(strategy):
            largest = int(min(bucket_mb, LARGEST_BUCKET_MB) * MiB)
            first = largest if bucket_mb == math.inf else min(largest, MiB)
            options = {"buckets": {"bucket_bytes": largest, "first_bucket_bytes": first}}
            options |= {} if resolved.is_virtual else {"learners": None}
        is_spread = not resolved.is_alone(strategy) and not resolved.is_virtual
        placement = LearnerPlacement.of(config, world if is_spread else World())
        return cls(name, build_trainer(placement, dataset, **options), config.checked_strategy)

    @property
    def active(self) -> Trainer:
        """The trainer of a rank that is not idle."""
        assert self.trainer is not None
        return self.trainer

    def warm_up(self) -> None:
        """Train until all buffers have their final form. Collective."""
        self.run(WARM_UP_STEPS, timed=False)

    def run(self, num_steps: int, *, timed: bool) -> None:
        """Train for a block of steps, until the slowest rank is done; keep the times if ``timed``. Collective."""
        num_samples = 0  # of a rank that is idle
        if self.trainer is not None:
            batches, first = self.trainer.batches, self.trainer.num_steps
            num_samples = batches.num_learners * (batches.num_taken(first + num_steps) - batches.num_taken(first))
        barrier("the start of a block of steps")
        start = time.perf_counter()
        for _ in range(0 if self.trainer is None else num_steps):
            self._step(self.active, timed)
        barrier("the end of a block of steps")
        if timed:
            self.block_samples.append(num_samples)
            self.block_seconds.append(time.perf_counter() - start)

    def _step(self, trainer: Trainer, timed: bool) -> None:
        start = time.perf_counter()
        try:
            loss = trainer.step()
        except NonFiniteError:  # weights that overflowed: this strategy has diverged
            if dist.is_initialized():
                raise
            loss = torch.full((len(trainer.learners),), math.nan)
        if trainer.dataset.train.labels.is_cuda:
            torch.cuda.synchronize()
        if timed:
            self.step_seconds.append(time.perf_counter() - start)
        self.losses.append(loss)

    def bytes_per_step(self, world_size: int) -> float | None:
        """Bytes that one learner sends in a step; None if unknown.

        For a baseline that averages gradients, the bytes of an all-reduce of the gradients.
        """
        if self.trainer is None or self.strategy.traits.most_learners == 1:
            return 0.0
        handle = self.trainer.handle
        if handle.learner is not None:
            return handle.learner.comm.bytes_sent / max(1, handle.learner.step)
        numel = sum(parameter.numel() for parameter in handle.model.parameters())
        return float(all_reduce_bytes(4 * numel, world_size)) if self.strategy.traits.averages_gradients else None


def compute_of(name: str) -> str:
    """The hidden contender that does the same work as a strategy."""
    return COMPUTE if is_baseline(name) else OWN_COMPUTE


def exposed_ms(own: Sequence[float], compute: Sequence[float], num_steps: Sequence[int]) -> float:
    """Milliseconds by which communication lengthens a step, at least 0.

    That is the median over blocks of the difference between a strategy and the same work without communication, which
    ran in the same round.
    """
    blocks = zip(own, compute, num_steps, strict=True)
    return max(0.0, quantiles(1e3 * (mine - without) / steps for mine, without, steps in blocks)["p50"])


def gather(value: Any) -> list[Any]:
    """The value of every rank. Collective."""
    group = default_group(None) if dist.is_initialized() else None
    return gather_objects(group, value, "the gathering of the results")


def build_dataset(resolved: ResolvedConfig, *, first: bool) -> Dataset:
    """The data set of a run, on the CPU. ``first`` also downloads and verifies its files and builds the model once.

    ValueError: files are missing or damaged, or the model refuses such samples or options, or the batch is too large.
    """
    config = resolved.config.train_config(SILENT)  # all strategies have the same data and model
    dataset = read_dataset(config, first=first)
    if first:
        ShardedBatches(len(dataset.train), config.data.batch_size, resolved.world_size)  # checks the batch size
        check_parts(resolved.training, dataset)
    return dataset


def is_idle(name: str, resolved: ResolvedConfig, world: World) -> bool:
    """Whether a contender leaves this rank idle."""
    return world.rank != 0 and name not in HIDDEN and resolved.is_alone(name)


def parse_sizes(names: Sequence[str]) -> list[float]:
    """Bucket sizes of the command line in MiB; ``one``, a single bucket, is infinity. ValueError: no size, or twice."""
    sizes = []
    for name in names:
        try:
            sizes.append(math.inf if name == "one" else float(name))
        except ValueError:
            sizes.append(math.nan)
        if not sizes[-1] > 0 or (math.isinf(sizes[-1]) and name != "one"):
            raise ValueError(f"--bucket-mb: {name!r} is not a size above 0 in MiB: give sizes such as 1,25,one")
    if len(set(sizes)) != len(sizes):
        raise ValueError("--bucket-mb has a size twice: give each once")
    return sizes


def ddp_options(bucket_mb: float) -> dict[str, Any]:
    """Options of the strategy ``ddp``; none for the default size, because a cap also limits DDP's first bucket."""
    return {} if bucket_mb == DEFAULT_BUCKET_MB else {"bucket_cap_mb": min(bucket_mb, LARGEST_BUCKET_MB)}
