"""The parts of a run, from its config: data, schedule, model, optimizer, strategy, trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpcore.data import Dataset, ShardedBatches, load_dataset
from ddpcore.distributed.distribute import distribute
from ddpcore.distributed.state_sync import Policies
from ddpcore.models import MODELS
from ddpcore.optim.registry import build_optimizer, clips_itself
from ddpcore.optim.schedules import SCHEDULES, Schedule, linear_scaling, warmup
from ddpcore.runtime.launch import World
from ddpcore.strategies.base import Baseline, Strategy
from ddpcore.strategies.baselines import DDP
from ddpcore.training import statistics
from ddpcore.training.config import TrainConfig
from ddpcore.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class LearnerPlacement:
    """Where the learners of a config live: in this process all, or equally many in each rank of a process group."""

    config: TrainConfig
    world: World
    device: torch.device

    @classmethod
    def of(cls, config: TrainConfig, world: World | None) -> LearnerPlacement:
        """The place of this process.

        Raises:
            ValueError: learners and ranks do not fit, ranks are not connected, or the device is not there.
        """
        world = World() if world is None else world
        if world.world_size > 1 and not dist.is_initialized():
            raise ValueError(
                f"a world of {world.world_size} needs a process group: start ranks with ddpcore.runtime.launch.run"
            )
        if config.learners % world.world_size:
            raise ValueError(f"learners is {config.learners}: make it a multiple of the {world.world_size} ranks")
        kind = config.device
        if kind == "auto":
            kind = "cuda" if torch.cuda.is_available() else "cpu"
        if kind == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is 'cuda' and torch sees no GPU: take 'cpu'")
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        return cls(config=config, world=world, device=device)

    @property
    def real(self) -> bool:
        """Whether there are other processes."""
        return self.world.world_size > 1

    @property
    def learners(self) -> list[int]:
        """Those of this process."""
        each = self.config.learners // self.world.world_size
        return list(range(self.world.rank * each, (self.world.rank + 1) * each))

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.real:
            dist.barrier()


def build_dataset(place: LearnerPlacement) -> Dataset:
    """The data set of the config; rank 0 of each machine fetches and verifies the files before the other ranks read.

    Raises:
        ValueError: see :func:`read_dataset`.
    """
    first = place.world.local_rank == 0
    if not first:
        place.barrier()
    dataset = read_dataset(place.config, first=first)
    if first:
        place.barrier()
    return dataset


def read_dataset(config: TrainConfig, *, first: bool) -> Dataset:
    """The data set of the config, on the CPU. Only the first process fetches missing files and verifies them.

    Raises:
        ValueError: files are missing or damaged, or the options do not fit the data set.
    """
    return load_dataset(
        config.dataset,
        data_dir=config.data_dir,
        seed=config.seed,
        normalize=config.normalize,
        augment=config.augment,
        num_validation=config.num_validation,
        num_train=config.num_train,
        num_test=config.num_test,
        random_labels=config.random_labels,
        download=config.download and first,
        verify=first,
        **{**shape_options(config), **config.dataset_options},
    )


def shape_options(config: TrainConfig) -> dict[str, Any]:
    """Options of synthetic samples, which have the shape that the model takes; none of other data sets."""
    if config.dataset != "synthetic":
        return {}
    spec = MODELS.spec(config.model)
    shape = {"input_shape": spec.input_shapes[0]} if spec.input_shapes else {}
    return {**shape, "num_classes": spec.num_classes}


def needs_ranks(config: TrainConfig) -> bool:
    """Whether the strategy of the config cannot run on virtual learners."""
    return config.strategy == DDP.name


def build_batches(config: TrainConfig, dataset: Dataset) -> ShardedBatches:
    """Which samples each learner takes at a step."""
    return ShardedBatches(
        len(dataset.train), config.batch_size, config.learners, config.seed, config.sampler, config.drop_last
    )


def total_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    """Length of the run."""
    return config.steps if config.steps is not None else (config.epochs or 0) * steps_per_epoch


def build_schedule(config: TrainConfig, steps_per_epoch: int) -> Schedule:
    """The learning rate of each step."""
    lr, unit = config.lr, steps_per_epoch if config.schedule_unit == "epochs" else 1
    if config.reference_batch_size is not None:
        lr = linear_scaling(lr, config.batch_size, config.reference_batch_size)
    schedule = SCHEDULES.build(
        config.schedule,
        lr=lr,
        num_steps=total_steps(config, steps_per_epoch),
        milestones=[round(mark * unit) for mark in config.milestones],
        gamma=config.gamma,
        steps_per_unit=unit,
        **config.schedule_options,
    )
    return warmup(schedule, round(config.warmup * unit), config.warmup_start)


def build_model(config: TrainConfig, dataset: Dataset) -> nn.Module:
    """A new model, on torch's default device.

    Raises:
        ValueError: the model does not take such samples, or an option's value.
    """
    return MODELS.build(
        config.model, input_shape=dataset.input_shape, num_classes=dataset.num_classes, **config.model_options
    )


def _build_optimizer(config: TrainConfig, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return build_optimizer(
        config.optimizer,
        model,
        lr=lr,
        options=config.optimizer_options,
        two_groups=config.param_groups,
        max_grad_norm=config.max_grad_norm,
    )


def check_parts(config: TrainConfig, dataset: Dataset) -> None:
    """Make the parts of a run without memory for them, in milliseconds.

    Raises:
        ValueError: data, model, optimizer or strategy do not fit together, or an option has a value that is not taken.
    """
    steps = build_batches(config, dataset).steps_per_epoch
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        _build_optimizer(config, build_model(config, dataset), build_schedule(config, steps)(0))
    strategy, policies = config.make_strategy(), Policies(**config.policies)
    if isinstance(strategy, Strategy):
        policies.check(strategy, None)
        strategy.setup(config.learners, torch.float32)
    elif policies != Policies():
        raise ValueError(f"{strategy.name} runs without policies: leave them out")
    if config.target is not None and config.evaluate_on not in dataset.splits():
        raise ValueError(f"target is {config.target}: {dataset.name} has no {config.evaluate_on} split, leave it out")
    if config.statistics_every and config.statistics_samples is not None:
        least = config.learners
        statistics.part_of(dataset, "statistics_samples", config.statistics_samples, least, config.seed)
    if config.flatness_samples:
        statistics.part_of(dataset, "flatness_samples", config.flatness_samples, 1, config.seed)


def build_trainer(place: LearnerPlacement, dataset: Dataset, **options: Any) -> tuple[Trainer, nn.Module]:
    """The trainer at its first step, and the model as it was before ``distribute``: its state is what is saved.

    ``options`` are arguments of :func:`ddpcore.distribute` in place of those that follow from the config.

    Raises:
        ValueError: model, data, world and strategy do not fit together.
    """
    config, rank = place.config, place.world.rank
    batches = build_batches(config, dataset)
    torch.manual_seed(config.seed)
    model = build_model(config, dataset).to(place.device)
    if config.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    schedule = build_schedule(config, batches.steps_per_epoch)
    optimizer = _build_optimizer(config, model, schedule(0))
    strategy = config.make_strategy()
    virtual = not isinstance(strategy, Baseline) and (not place.real or len(place.learners) > 1)
    arguments: dict[str, Any] = {
        "learners": len(place.learners) if virtual else None,
        "group": dist.group.WORLD if place.real else None,
        "transport": config.transport,
        "link": config.make_link(),
        "policies": Policies(**config.policies) if config.policies else None,
        **options,
    }
    handle = distribute(model, optimizer, strategy, **arguments)
    torch.manual_seed(config.seed + 1 + rank)  # the weights are made: dropout differs from rank to rank
    trainer = Trainer(
        handle,
        optimizer,
        dataset.to(place.device),
        batches,
        learners=place.learners,
        stacked=arguments["learners"] is not None,
        schedule=schedule,
        accumulation=config.accumulation,
        label_smoothing=config.label_smoothing,
        max_grad_norm=None if clips_itself(config.optimizer) else config.max_grad_norm,
        autocast=torch.bfloat16 if config.precision == "bf16" else None,
        compile=config.compile,
    )
    if config.flatness_samples:  # taken at the end; that it can be is known now
        statistics.part_of(dataset, "flatness_samples", config.flatness_samples, 1, config.seed)
    if config.statistics_every:
        statistics.attach(
            trainer, every=config.statistics_every, num_samples=config.statistics_samples, seed=config.seed
        )
    return trainer, model
