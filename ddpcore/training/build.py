"""Builds the parts of a run from its config: data, schedule, model, optimizer, strategy, trainer."""

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ddpcore.comm import Choice, choose_backend, choose_transport
from ddpcore.comm.connect import Connection
from ddpcore.comm.groups import barrier, default_group, gather_objects, time_limit
from ddpcore.comm.link import LearnerClock, Link
from ddpcore.comm.membership import Membership
from ddpcore.data import SHARDS, Dataset, ShardedBatches, load_dataset, split
from ddpcore.diagnostics.passes import as_it_was
from ddpcore.distributed.distribute import distribute, join
from ddpcore.distributed.state_sync import Policies
from ddpcore.models import MODELS
from ddpcore.optim.registry import build_optimizer, clips_itself
from ddpcore.optim.schedules import SCHEDULES, Schedule, linear_scaling, warmup
from ddpcore.records.run import RECORD, RunRecord, nested
from ddpcore.runtime.launch import TIMEOUT_SECONDS, World
from ddpcore.strategies.base import Baseline, Strategy, Traits, check_group, check_run, check_transport
from ddpcore.training.config import TrainConfig, check_samples
from ddpcore.training.sections import GROWTH_POWERS, StrategyConfig
from ddpcore.training.trainer import Trainer, learner_losses

# Fields of the section data that are arguments of load_dataset under the same name.
DATASET_FIELDS = ("data_dir", "normalize", "augment", "num_validation", "num_train", "num_test", "random_labels")


@dataclass(frozen=True, kw_only=True)
class LearnerPlacement:
    """Where the learners of a config run: all in this process, or the same number in each rank of a process group."""

    config: TrainConfig
    world: World
    device: torch.device
    left: Membership | None = None
    joins: bool = False

    @classmethod
    def of(cls, config: TrainConfig, world: World | None, left: Membership | None = None) -> "LearnerPlacement":
        """The placement as seen from this process; a ``world`` of None is a world of one process.

        ``left`` are the learners of a run in which ranks have died or joined, one on each rank. ValueError: learners
        cannot be divided among the ranks, the ranks have no process group, or torch sees no such device.
        """
        world = World() if world is None else world
        size, learners, kind = world.world_size, config.strategy.learners, config.run.device
        if size > 1 and not dist.is_initialized():
            raise ValueError(f"a world of {size} needs a process group: start ranks with ddpcore.runtime.launch.run")
        if left is not None and len(left.members) != size:
            members = list(left.members)
            what = f"the last checkpoint has the learners {members} that were left, and these are {size} ranks"
            raise ValueError(f"{what}: resume with {len(members)} ranks and strategy.learners={left.first}")
        if left is None and learners % size:
            raise ValueError(f"strategy.learners is {learners}: make it a multiple of the {size} ranks")
        if kind == "auto":
            kind = "cuda" if torch.cuda.is_available() else "cpu"
        if kind == "cuda" and not torch.cuda.is_available():
            raise ValueError("run.device is 'cuda' and torch sees no GPU: take 'cpu'")
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        return cls(config=config, world=world, device=device, left=left)

    @property
    def real(self) -> bool:
        """Whether there are other ranks."""
        return self.joins or self.world.world_size > 1

    @property
    def learners(self) -> list[int]:
        """The learners of this process; none before it has joined."""
        if self.joins:
            return []
        if self.left is not None:
            return [self.left.members[self.world.rank]]
        each = self.config.strategy.learners // self.world.world_size
        return list(range(self.world.rank * each, (self.world.rank + 1) * each))

    def barrier(self, what: str) -> None:
        """Wait for all ranks; ``what`` names the wait in an error."""
        if self.world.world_size > 1:
            barrier(what)

    def time_limit(self) -> AbstractContextManager[None]:
        """Inside, a rank may let the others wait as long as the config says, in any call of the process group."""
        is_group = self.world.world_size > 1
        return time_limit(default_group(None), self.config.strategy.timeout) if is_group else nullcontext()


def build_dataset(placement: LearnerPlacement) -> Dataset:
    """:func:`read_dataset`, where one rank of each machine downloads and verifies the files before the others read."""
    first, what = placement.world.local_rank == 0, "the wait for the files of the data set"
    if not first:
        placement.barrier(what)
    dataset = read_dataset(placement.config, first=first)
    if first:
        placement.barrier(what)
    return dataset


def read_dataset(config: TrainConfig, *, first: bool) -> Dataset:
    """The data set of the config, on the CPU. Only with ``first``, missing files are downloaded and files are verified.

    ValueError: files are missing or damaged, or the options do not fit the data set.
    """
    data, options = config.data, {**_shape_options(config), **config.data.options}
    given: dict[str, Any] = {"seed": config.run.seed, **{name: getattr(data, name) for name in DATASET_FIELDS}}
    return load_dataset(data.name, download=data.download and first, verify=first, **given, **options)


def _shape_options(config: TrainConfig) -> dict[str, Any]:
    """Options of the data set ``synthetic``: the shape of the model's samples. Other data sets need none."""
    if config.data.name != "synthetic":
        return {}
    spec = MODELS.spec(config.model.name)
    return {**({"input_shape": spec.input_shapes[0]} if spec.input_shapes else {}), "num_classes": spec.num_classes}


class Datasets:
    """Builds the data set of a config, and reuses the last one if the next run needs the same."""

    def __init__(self) -> None:
        self._key: Any = None
        self._dataset: Dataset | None = None

    def of(self, placement: LearnerPlacement) -> Dataset:
        """The data set. ValueError as :func:`build_dataset`. Collective."""
        config = placement.config
        names = ("name", "options", *DATASET_FIELDS)
        key = repr(_shape_options(config)), config.run.seed, *(repr(getattr(config.data, name)) for name in names)
        if self._dataset is None or key != self._key:
            self._key, self._dataset = key, build_dataset(placement)
        return self._dataset


def needs_ranks(config: TrainConfig) -> bool:
    """Whether the strategy of the config cannot run on virtual learners."""
    return "virtual" not in config.checked_strategy.traits.transports


def check_connection(config: TrainConfig, num_ranks: int, num_hosts: int = 1) -> None:
    """ValueError unless the strategy runs on so many ranks, before any is started. 0 and 1 are one process."""
    strategy, learners = config.checked_strategy, config.strategy.learners
    unused, why = "transport link", "learners of one process have none, leave it out or give each a rank"
    if isinstance(strategy, Baseline):
        unused, why = "transport link policies", f"{strategy.name} does not use it, leave it out"
    elif learners <= num_ranks > 1:
        unused = ""
    for name in unused.split():
        if (value := getattr(config.strategy, name)) != getattr(StrategyConfig(), name):
            raise ValueError(f"strategy.{name} is {value!r}: {why}")
    if isinstance(strategy, Baseline):
        return
    Policies(**config.strategy.policies).check(strategy)
    check_group(strategy, learners, learners // max(1, num_ranks))
    if strategy.traits.transports == Traits().transports or learners == 1:
        return
    if num_ranks <= 1:
        name = "virtual"
    elif config.strategy.link is not None:
        name = "link"
    elif learners > num_ranks:
        name = "grid"
    else:
        device = "cuda" if torch.cuda.is_available() and config.run.device != "cpu" else "cpu"
        given, may_die = config.strategy.transport, config.strategy.on_failure == "shrink"
        name = choose_transport(given, world_size=num_ranks, device=device, num_hosts=num_hosts, may_die=may_die).name
    check_transport(strategy, name)


def backend_here(config: TrainConfig, num_ranks: int, num_hosts: int = 1) -> Choice:
    """The backend that connects so many ranks (0: virtual learners) on hosts such as this one, and the reason."""
    num_gpus = torch.cuda.device_count() * num_hosts
    device = ("cuda" if num_gpus else "cpu") if config.run.device == "auto" else config.run.device
    return choose_backend("auto", world_size=max(1, num_ranks), device=device, num_gpus=num_gpus)


def build_batches(config: TrainConfig, dataset: Dataset) -> ShardedBatches:
    """Which samples each learner takes at a step. ValueError: the shards or the batch do not fit the data set."""
    parts, data, learners = None, config.data, config.strategy.learners
    if data.shards != SHARDS[0]:
        parts = split(data.shards, dataset.train.labels.cpu(), learners, seed=config.run.seed, **data.shards_options)
    how = data.sampler, data.drop_last, parts, data.batch_growth, data.learners_batch
    return ShardedBatches(len(dataset.train), data.batch_size, learners, config.run.seed, *how)


def total_steps(config: TrainConfig, batches: ShardedBatches) -> int:
    """Length of the run in steps. ValueError: it ends before the last step of ``batch_growth``."""
    num = config.run.steps if config.run.steps is not None else batches.first_step(config.run.epochs or 0)
    if config.data.batch_growth and (step := config.data.batch_growth[-1][0]) >= num:
        raise ValueError(f"data.batch_growth has the step {step}: the run ends after {num} steps, take earlier steps")
    return num


def build_schedule(config: TrainConfig, batches: ShardedBatches) -> Schedule:
    """The learning rate of each step. ValueError as :func:`total_steps`."""
    optimizer, data = config.optimizer, config.data
    of_data = optimizer.schedule_unit == "epochs"
    lr, unit = optimizer.lr, batches.steps_per_epoch if of_data else 1
    num_steps = total_steps(config, batches)
    if optimizer.reference_batch_size is not None:
        lr = linear_scaling(lr, data.batch_size, optimizer.reference_batch_size)
    schedule = SCHEDULES.build(
        optimizer.schedule,
        lr=lr,
        num_steps=batches.step_without_growth(num_steps) if of_data else num_steps,
        milestones=[round(mark * unit) for mark in optimizer.milestones],
        gamma=optimizer.gamma,
        steps_per_unit=unit,
        **optimizer.schedule_options,
    )
    if not isinstance(first := schedule(0), Real | Tensor):
        raise ValueError(f"schedule {optimizer.schedule} gives {first!r} at step 0: it must give a number")
    schedule = warmup(schedule, round(optimizer.warmup * unit), optimizer.warmup_start)
    if not data.batch_growth:
        return schedule
    power = GROWTH_POWERS[data.batch_growth_lr]

    def grown(step: int) -> float:
        at = batches.step_without_growth(step) if of_data else step
        return schedule(at) * (batches.batch_size_at(step) / data.batch_size) ** power

    return grown


def build_model(config: TrainConfig, dataset: Dataset, device: torch.device) -> nn.Module:
    """The model of the config for the samples of a data set. ValueError: it refuses an option or these samples."""
    name, shape, options = config.model.name, dataset.input_shape, config.model.options
    MODELS.check_input(name, shape, dataset.has_tokens)
    model = MODELS.build(name, input_shape=shape, num_classes=dataset.num_classes, **options).to(device)
    if any(map(is_lazy, model.parameters())):
        raise ValueError(f"model {name} has a parameter without a shape (lazy module): give its layer all sizes")
    return model.to(memory_format=torch.channels_last) if config.model.channels_last else model  # type: ignore[call-overload]


def _check_outputs(model: nn.Module, config: TrainConfig, dataset: Dataset, device: torch.device) -> None:
    """ValueError unless a copy of the model scores each class, for each place that has a label."""
    try:
        copied = copy.deepcopy(model).eval()
    except (RuntimeError, TypeError):
        return  # the first step checks it
    inputs, labels = dataset.train.batch(torch.arange(min(2, len(dataset.train)), device="cpu"), 0)
    wanted = [len(labels), dataset.num_classes, *labels.shape[1:]]
    with as_it_was(copied, device), torch.no_grad():
        outputs = copied(inputs.to(device))
    found = list(outputs.shape) if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
    if found != wanted:
        raise ValueError(f"model {config.model.name} gives {found} for {len(labels)} samples: it must give {wanted}")


def _build_optimizer(config: TrainConfig, model: nn.Module, schedule: Schedule) -> torch.optim.Optimizer:
    given, lr = config.optimizer, schedule(0)
    more: dict[str, Any] = {"two_groups": given.param_groups, "max_grad_norm": given.max_grad_norm}
    return build_optimizer(given.name, model, lr=lr, options=given.options, **more)


def check_parts(config: TrainConfig, dataset: Dataset) -> None:
    """Build the parts of a run on torch's ``meta`` device: without memory for weights, in milliseconds.

    ValueError: data, model, optimizer or strategy do not fit together, or refuse the value of an option.
    """
    batches = build_batches(config, dataset)
    schedule = build_schedule(config, batches)
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        _build_optimizer(config, build_model(config, dataset, torch.device("meta")), schedule)
    strategy = config.make_strategy()
    if isinstance(strategy, Strategy):
        strategy.setup(config.strategy.learners, torch.float32)
        check_run(strategy, total_steps(config, batches))
    check_samples(config, dataset)


def build_trainer(
    placement: LearnerPlacement,
    dataset: Dataset,
    store: dist.Store | None = None,
    buckets: Mapping[str, int] | None = None,
    **options: Any,
) -> Trainer:
    """The trainer at its first step, or, with the ``store`` of a run, at the step in which this rank joins that run.

    ``buckets`` are ``bucket_bytes`` and ``first_bucket_bytes`` of :class:`ddpcore.Connection`, ``options`` arguments of
    :func:`ddpcore.distribute` that replace the config's. ValueError: the parts do not fit together.
    """
    config, rank = placement.config, placement.world.rank
    batches = build_batches(config, dataset)
    torch.manual_seed(config.run.seed)
    model = build_model(config, dataset, placement.device)
    _check_outputs(model, config, dataset, placement.device)
    schedule = build_schedule(config, batches)
    optimizer = _build_optimizer(config, model, schedule)
    strategy = config.make_strategy()
    if isinstance(strategy, Strategy):
        check_run(strategy, total_steps(config, batches))
    arguments = {**_arguments(placement, strategy, buckets or {}), **options}
    if arguments["learners"] is not None and not placement.real:
        check_connection(config, 1)
    if store is None:
        handle, learners = distribute(model, optimizer, strategy, **arguments), placement.learners
    else:
        assert isinstance(strategy, Strategy)
        names = ("connection", "policies", "on_nonfinite")
        handle = join(model, optimizer, strategy, store, **{name: arguments[name] for name in names})
        assert handle.comm.member is not None
        rank, learners = handle.comm.member, [handle.comm.member]
    torch.manual_seed(config.run.seed + 1 + rank)  # all ranks have the same weights; from here on dropout differs
    at_once, num = config.strategy.learners_at_once, len(placement.learners)
    if at_once is None and num > 1 and forward_work(config, dataset, placement.world.world_size) / num < AT_ONCE_WORK:
        at_once = num  # all, because their passes are small; None leaves it to Distributed.split
    trainer = Trainer(
        handle,
        optimizer,
        dataset.to(placement.device),
        batches,
        learners=learners,
        stacked=arguments.get("learners") is not None,
        module=model,
        schedule=schedule,
        accumulation=config.data.accumulation,
        label_smoothing=config.optimizer.label_smoothing,
        max_grad_norm=None if clips_itself(config.optimizer.name) else config.optimizer.max_grad_norm,
        autocast=torch.bfloat16 if config.model.precision == "bf16" else None,
        compile=config.model.compile,
        at_once=at_once,
    )
    trainer.num_steps = 0 if handle.learner is None else handle.learner.step
    return trainer


def _arguments(
    placement: LearnerPlacement, strategy: Strategy | Baseline, buckets: Mapping[str, int]
) -> dict[str, Any]:
    config = placement.config
    virtual = not isinstance(strategy, Baseline) and (not placement.real or len(placement.learners) > 1)
    arguments: dict[str, Any] = {
        "learners": len(placement.learners) if virtual else None,
        "group": dist.group.WORLD if placement.world.world_size > 1 else None,
        "connection": Connection(
            transport=config.strategy.transport,
            link=None if config.strategy.link is None else Link.parse(config.strategy.link),
            on_failure=config.strategy.on_failure,
            membership=placement.left,
            timeout=config.strategy.timeout if placement.real and isinstance(strategy, Strategy) else TIMEOUT_SECONDS,
            **buckets,
        ),
        "policies": Policies(**config.strategy.policies) if config.strategy.policies else None,
    }
    if isinstance(strategy, Strategy):  # all ranks end the run together, see Loop
        arguments["on_nonfinite"] = "skip" if config.strategy.on_nonfinite == "raise" else config.strategy.on_nonfinite
    return arguments


LEAST_WORK = 2e7
"""Operations of a forward pass below which one thread computes. Measured on two cores: at 12 million operations (an mlp
with 1000 digits) two threads are slower than one, at 27 million (LeNet-5 with 32 images) they are 1.2 times as fast."""
PER_INPUT = 20  # operations for each number of the samples, for models without matrix products

AT_ONCE_WORK = 5e7
"""Operations of a learner's forward pass below which its memory is small, and passes in turn take up to a sixth longer
(measured). From here on they take as long."""


def forward_work(config: TrainConfig, dataset: Dataset, num_ranks: int) -> float:
    """The operations of one forward pass of a process: the products of its batch, and a share for each input number.

    It depends on the config and on the shape of the samples only, so it is the same on every machine.
    A model whose weights alone need ``LEAST_WORK`` is not called. ``num_ranks`` ranks share the batch.
    """
    num_samples = max(1, config.data.batch_size // (num_ranks * config.data.accumulation))
    dtype = torch.int64 if dataset.has_tokens else torch.float32
    inputs = torch.zeros(2, *dataset.input_shape, dtype=dtype, device="cpu")  # BatchNorm may refuse one
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = build_model(config, dataset, torch.device("cpu")).eval()
        products = 2 * sum(parameter.numel() for parameter in model.parameters())  # of most models the least
        if num_samples * products < LEAST_WORK:
            products = max(products, _products(model, inputs) // len(inputs))
    return float(num_samples * (products + PER_INPUT * inputs[0].numel()))


def _products(model: nn.Module, inputs: Tensor) -> int:
    """Operations of the linear layers and convolutions in a forward pass."""
    counts: list[int] = []

    def count(layer: nn.Module, _: Any, output: Any) -> None:
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim > 1 and isinstance(output, Tensor):
            counts.append(2 * output.numel() * weight[0].numel())

    for layer in model.modules():
        layer.register_forward_hook(count)
    model(inputs)
    return sum(counts)


@contextmanager
def threads_for(config: TrainConfig, dataset: Dataset, num_ranks: int) -> Iterator[None]:
    """Inside, torch computes with one thread if the model is small (see :func:`forward_work`), else as before.

    The rule does not look at a clock, because sums may have other bits with another number of threads.
    """
    before = torch.get_num_threads()
    on_cpu = config.run.device == "cpu" or not torch.cuda.is_available()
    if on_cpu and before > 1 and forward_work(config, dataset, num_ranks) < LEAST_WORK:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- batches of learners by the speed of their ranks ----

ROUNDS, REPEATS = 3, 9  # each round measures the sizes that the last one has dealt


def balanced(placement: LearnerPlacement, dataset: Dataset, resumed: Path | None = None) -> LearnerPlacement:
    """The placement with ``data.learners_batch`` set, if the config has ``data.balance`` and no sizes yet. Collective.

    A run in the folder ``resumed`` keeps its sizes. ValueError: virtual learners have no speed of their own.
    """
    config, world = placement.config, placement.world
    if not config.data.balance or config.data.learners_batch:
        return placement
    batch_size, learners = config.data.batch_size, config.strategy.learners
    if world.world_size < 2 or learners > world.world_size:
        raise ValueError("data.balance is set: it measures one learner on each rank, set data.learners_batch instead")
    if resumed is not None and (resumed / RECORD).exists():
        sizes = nested(RunRecord.read(resumed).header["config"])["data"]["learners_batch"]
        return replace(placement, config=config.overridden({"data": {"learners_batch": sizes}}))
    dataset, sizes, num, seconds = dataset.to(placement.device), [batch_size // learners] * learners, 0, 0.0
    for _ in range(ROUNDS):
        num, seconds = num + sizes[world.rank], seconds + seconds_of(placement, dataset, sizes[world.rank])
        speeds = gather_objects(default_group(None), num / seconds, "the speed of the ranks", config.strategy.timeout)
        sizes = dealt(speeds, batch_size)
    return replace(placement, config=config.overridden({"data": {"learners_batch": sizes}}))


def seconds_of(placement: LearnerPlacement, dataset: Dataset, size: int) -> float:
    """Median seconds of a forward and backward pass of this rank with so many samples; on a link, by its clocks."""
    link = placement.config.strategy.link
    slow = 1.0 if link is None or placement.world.rank else Link.parse(link).slow
    now = time.perf_counter if link is None else LearnerClock(slow).now
    with torch.random.fork_rng(devices=[]):
        model, found = build_model(placement.config, dataset, placement.device), []
        _check_outputs(model, placement.config, dataset, placement.device)
        inputs, labels = dataset.train.batch(torch.arange(size, device="cpu"), 0)
        for _ in range(1 + REPEATS):  # the first is a warm-up
            begin = now()
            learner_losses(model(inputs).float(), labels, stacked=False).sum().backward()
            if placement.device.type == "cuda":
                torch.cuda.synchronize()
            found.append(now() - begin)
    return median(found[1:])


def dealt(speeds: Sequence[float], batch_size: int) -> list[int]:
    """So many samples in proportion to speeds, at least one each; together ``batch_size``, by largest remainders."""
    room, total = batch_size - len(speeds), sum(speeds)
    exact = [room * speed / total for speed in speeds]
    sizes = [1 + int(one) for one in exact]
    for rank in sorted(range(len(sizes)), key=lambda rank: int(exact[rank]) - exact[rank])[: batch_size - sum(sizes)]:
        sizes[rank] += 1
    return sizes
