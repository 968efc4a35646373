"""What a training run is, as one frozen value: a row of an experiment is a mapping of what differs from another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from typing import Any, get_type_hints

from ddpcore.comm import Link
from ddpcore.comm.choice import TRANSPORTS
from ddpcore.data import DATASETS, SAMPLERS
from ddpcore.distributed.averaging import BATCH_NORM
from ddpcore.distributed.state_sync import Policies
from ddpcore.models import MODELS
from ddpcore.optim.registry import OPTIMIZERS
from ddpcore.optim.schedules import SCHEDULES
from ddpcore.options.registry import Registry
from ddpcore.options.typed import check_choice, check_keys, check_range, plain, typed
from ddpcore.strategies.base import Baseline, Strategy
from ddpcore.strategies.registry import STRATEGIES
from ddpcore.topology.base import Topology
from ddpcore.topology.registry import TOPOLOGIES

PRECISIONS = ("fp32", "bf16")
DEVICES = ("auto", "cpu", "cuda")
UNITS = ("epochs", "steps")
EVALUATION_SPLITS = ("test", "validation")
# Where and how often things are written changes no result: a run may be resumed with other values of these.
BOOKKEEPING = ("data_dir", "download", "checkpoint_every", "keep_last", "keep_best")

# Fields that name a part of the run, and where the parts of this kind are found; `model` has its `model_options`.
REGISTRIES: Mapping[str, Registry[Any]] = {
    "model": MODELS,
    "dataset": DATASETS,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "strategy": STRATEGIES,
    "topology": TOPOLOGIES,
}
# Fields that hold options, and the field that names what they are options of.
OPTIONS = {f"{name}_options": name for name in REGISTRIES} | {"policies": ""}
CHOICES = {
    "sampler": SAMPLERS,
    "schedule_unit": UNITS,
    "precision": PRECISIONS,
    "device": DEVICES,
    "transport": TRANSPORTS,
    "evaluate_on": EVALUATION_SPLITS,
    "evaluation_batch_norm": BATCH_NORM,
}
# Bounds of numbers, as check_range takes them. None, where a field may be None, keeps all.
_COUNT, _NOT_NEGATIVE, _SHARE = {"least": 1}, {"least": 0}, {"least": 0, "most": 1}
RANGES: Mapping[str, Mapping[str, float]] = {
    **dict.fromkeys(("batch_size", "accumulation", "epochs", "steps", "learners", "keep_last"), _COUNT),
    **dict.fromkeys(("recalibration_batches", "reference_batch_size", "num_train", "num_test"), _COUNT),
    **dict.fromkeys(("num_validation", "evaluate_every", "checkpoint_every", "lr", "warmup"), _NOT_NEGATIVE),
    **dict.fromkeys(("statistics_every", "flatness_samples"), _NOT_NEGATIVE),
    **dict.fromkeys(("warmup_start", "label_smoothing"), _SHARE),
    "statistics_samples": _COUNT,
    "max_grad_norm": {"above": 0},
    "gamma": {"above": 0, "most": 1},
    "target": {"above": 0, "most": 1},
    "diverged_above": {"above": 1},
    "seed": {"least": 0, "below": 2**62},
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run. Constructing one checks everything that can be known before data are read.

    Attributes:
        model: a part by name, as ``dataset``, ``optimizer``, ``schedule``, ``strategy`` and ``topology`` are: one of
            ddpcore's, your own as ``module:attribute``, or one of an installed package. See
            :mod:`ddpcore.options.registry`.
        model_options: of that model, such as ``{"dropout": 0.2}``.
        channels_last: keep the weights of convolutions in channels-last order, which GPUs and bf16 like.
        dataset: see ``model``; ``synthetic`` takes the shape that the model takes.
        dataset_options: of that data set, see ``DATASETS.options(name)``.
        data_dir: the folder of its files.
        download: fetch missing files into ``data_dir`` first.
        normalize: images to mean 0 and standard deviation 1 a channel.
        augment: random crops, and flips but for digits, of training images.
        num_validation: training samples that are held out for validation.
        num_train: train on so many of the others alone, see :meth:`ddpcore.data.Dataset.limit`.
        num_test: test on so many samples alone.
        random_labels: draw the training labels at random: only the samples can be learned.
        sampler: how samples are dealt to learners, see :class:`ddpcore.data.ShardedBatches`.
        drop_last: leave the incomplete batch at the end of an epoch out.
        batch_size: global, over all learners, of one optimizer step.
        accumulation: backward passes a step, each over an equal part of every learner's share of the batch.
        epochs: length of the run; or
        steps: its length in optimizer steps. Exactly one of the two.
        optimizer: see ``model``; ``sgd``, ``lars`` and ``lamb`` are ddpcore's, the other short names torch's.
        optimizer_options: of that optimizer, such as ``{"momentum": 0.9, "weight_decay": 5e-4}``.
        param_groups: leave biases and norms without weight decay and adaptation, see :mod:`ddpcore.optim.groups`.
        lr: peak learning rate, for a batch of ``reference_batch_size`` where that is given.
        reference_batch_size: scale ``lr`` linearly with ``batch_size / reference_batch_size``; None leaves it as it is.
        schedule: ``constant``; ``step``, times ``gamma`` at each of ``milestones``; ``cosine`` to 0 at the end of the
            run; ``exponential``, times ``gamma`` each unit of time; or a user's own, see ``model``.
        schedule_options: of a user's own schedule.
        schedule_unit: of ``milestones``, ``warmup`` and ``gamma``: ``epochs`` or ``steps``.
        milestones: for ``step``, ascending.
        gamma: see ``schedule``.
        warmup: linear ramp over so many units; the schedule is not delayed by it.
        warmup_start: share of the learning rate at which the ramp starts.
        label_smoothing: share of the label that is spread over all classes, in training alone.
        max_grad_norm: gradients of a learner that are longer are scaled to this length.
        precision: ``fp32``, or ``bf16`` for forward passes under autocast.
        compile: run the model through ``torch.compile``.
        strategy: see ``model``.
        strategy_options: of that strategy, see :mod:`ddpcore.strategies.registry`.
        topology: see ``model``; for strategies with neighbours.
        topology_options: of that topology.
        policies: fields of :class:`ddpcore.Policies`.
        learners: how many; virtual ones of one process, or spread evenly over the ranks, one or several on each.
        device: ``cpu``, ``cuda``, or ``auto``.
        transport: what carries bytes between real ranks, see :func:`ddpcore.distribute`.
        link: a network to emulate between real ranks, which seconds are then of, ``10Gb/s,50us``: see
            :meth:`ddpcore.comm.Link.parse`.
        target: end the run at an evaluation whose accuracy is at least this, 0 to 1.
        evaluate_every: epochs between two evaluations of the averaged model; 0 evaluates at the end alone.
        evaluate_on: ``test``, or ``validation``, which leaves the test split to the very end.
        evaluation_batch_norm: how the averaged model comes by its statistics, see
            :meth:`ddpcore.Distributed.evaluation_model`.
        recalibration_batches: training batches for ``recalibrate``.
        statistics_every: steps between two records of :class:`ddpcore.diagnostics.NoiseStatistics`; 0 takes none.
        statistics_samples: training samples, drawn from the seed, whose gradient stands for that of the full loss; None
            takes the training set.
        flatness_samples: training samples on which :func:`ddpcore.diagnostics.flatness` looks at the averaged model at
            the end; 0 does not look.
        escape_loss: level of the full loss below which a run counts as escaped from where it began.
        seed: of weights, dropout, batches, augmentation, pairs and noise.
        diverged_above: stop where the training loss exceeds this many times that of the first step; None stops where it
            is not finite alone.
        checkpoint_every: steps between two checkpoints; None writes one at the end of each epoch, 0 none.
        keep_last: checkpoints that are kept.
        keep_best: whether the one with the best accuracy is kept beside them.

    Raises:
        ValueError: a field is wrong; the message names it, its value, and what to do.
    """

    model: str = "lenet5"
    model_options: Mapping[str, Any] = field(default_factory=dict)
    channels_last: bool = False
    dataset: str = "synthetic"
    dataset_options: Mapping[str, Any] = field(default_factory=dict)
    data_dir: str | None = None
    download: bool = False
    normalize: bool = False
    augment: bool = False
    num_validation: int = 0
    num_train: int | None = None
    num_test: int | None = None
    random_labels: bool = False
    sampler: str = SAMPLERS[0]
    drop_last: bool = True
    batch_size: int = 128
    accumulation: int = 1
    epochs: int | None = None
    steps: int | None = None
    optimizer: str = "sgd"
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    param_groups: bool = False
    lr: float = 0.1
    reference_batch_size: int | None = None
    schedule: str = "constant"
    schedule_options: Mapping[str, Any] = field(default_factory=dict)
    schedule_unit: str = UNITS[0]
    milestones: tuple[float, ...] = ()
    gamma: float = 0.1
    warmup: float = 0.0
    warmup_start: float = 0.0
    label_smoothing: float = 0.0
    max_grad_norm: float | None = None
    precision: str = PRECISIONS[0]
    compile: bool = False
    strategy: str = "single"
    strategy_options: Mapping[str, Any] = field(default_factory=dict)
    topology: str = "random_pair"
    topology_options: Mapping[str, Any] = field(default_factory=dict)
    policies: Mapping[str, str] = field(default_factory=dict)
    learners: int = 1
    device: str = DEVICES[0]
    transport: str = TRANSPORTS[0]
    link: str | None = None
    target: float | None = None
    evaluate_every: int = 1
    evaluate_on: str = EVALUATION_SPLITS[0]
    evaluation_batch_norm: str = BATCH_NORM[0]
    recalibration_batches: int = 32
    statistics_every: int = 0
    statistics_samples: int | None = None
    flatness_samples: int = 0
    escape_loss: float | None = None
    seed: int = 0
    diverged_above: float | None = None
    checkpoint_every: int | None = None
    keep_last: int = 2
    keep_best: bool = True

    def __post_init__(self) -> None:
        for name in _hints():
            object.__setattr__(self, name, typed_field(name, getattr(self, name)))
        for name, bounds in RANGES.items():
            check_range(name, getattr(self, name), **bounds)
        for name, allowed in CHOICES.items():
            check_choice(name, getattr(self, name), allowed)
        self._check_combinations()
        self._check_options()

    def _check_combinations(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"epochs is {self.epochs} and steps is {self.steps}: give exactly one of them")
        if self.batch_size % (self.learners * self.accumulation):
            raise ValueError(
                f"batch_size is {self.batch_size}: it must be a multiple of learners x accumulation, "
                f"{self.learners} x {self.accumulation}"
            )
        if self.strategy == "single" and self.learners > 1:
            raise ValueError(f"learners is {self.learners}: single trains one, take the strategy ssgd for more")
        if self.link is not None and self.learners == 1:
            raise ValueError(f"link is {self.link!r} and learners is 1: it has nobody to send to, leave it out")
        if self.evaluate_on == "validation" and not self.num_validation:
            raise ValueError("evaluate_on is 'validation': set num_validation to the samples to hold out")
        if bool(self.milestones) != (self.schedule == "step"):
            raise ValueError(f"milestones is {self.milestones}: they and the schedule 'step' go together")
        if list(self.milestones) != sorted(set(self.milestones)) or min(self.milestones, default=0) < 0:
            raise ValueError(f"milestones is {self.milestones}: they must ascend from 0")
        if self.statistics_every and (self.learners == 1 or self.strategy in ("ddp", "push_sum")):
            raise ValueError(
                f"statistics_every is {self.statistics_every}: it compares two learners at least, of another strategy "
                "than ddp and push_sum; set it to 0"
            )
        if self.escape_loss is not None and not self.statistics_every:
            raise ValueError("escape_loss is looked for where the full loss is known: set statistics_every")
        if self.target is not None and not self.evaluate_every:
            raise ValueError(f"target is {self.target}: evaluations look for it, set evaluate_every to 1 or more")
        if self.policies.get("scaler", "keep") != "keep":
            raise ValueError("policies has a scaler: bf16 and fp32 need none, leave it out")

    def _check_options(self) -> None:
        """Options belong to what they are options of, which builds it here once and throws it away."""
        if "max_grad_norm" in self.optimizer_options:
            raise ValueError("optimizer_options has max_grad_norm: set the field max_grad_norm instead")
        for name, registry in REGISTRIES.items():
            registry.check_options(getattr(self, name), getattr(self, f"{name}_options"))
        check_keys("policies", self.policies, (item.name for item in fields(Policies)))
        Policies(**self.policies)
        self.make_link()
        self.make_strategy()

    def make_strategy(self) -> Strategy | Baseline:
        """A new strategy, with its topology.

        Raises:
            ValueError: its options are wrong.
        """
        options = dict(self.strategy_options)
        if "seed" in STRATEGIES.options(self.strategy):
            options.setdefault("seed", self.seed)
        return STRATEGIES.build(self.strategy, topology=self.make_topology(), **options)

    def make_topology(self) -> Topology:
        """A new topology.

        Raises:
            ValueError: its options are wrong.
        """
        return TOPOLOGIES.build(self.topology, seed=self.seed, **self.topology_options)

    def make_link(self) -> Link | None:
        """The network to emulate.

        Raises:
            ValueError: its text is of another form.
        """
        return None if self.link is None else Link.parse(self.link)

    def to_dict(self) -> dict[str, Any]:
        """Every field, of plain dicts, lists, numbers and text: for JSON and, without its None values, for TOML."""
        return {name: plain(value) for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """The config of a mapping; a field that is not there has its default.

        Raises:
            ValueError: a key is no field; the message has the nearest one.
        """
        check_keys("a training run", values, (item.name for item in fields(cls)))
        return cls(**values)

    def overridden(self, overrides: Mapping[str, Any]) -> TrainConfig:
        """This config with some fields changed, see :func:`merged`.

        Raises:
            ValueError: as in :meth:`from_dict`.
        """
        return TrainConfig.from_dict(merged(self.to_dict(), overrides))

    def difference(self, other: Mapping[str, Any]) -> list[str]:
        """What of another config's :meth:`to_dict` would give other results, as ``name is x, not y``.

        A field that it does not have, because it is older than the field, is at its default.
        """
        mine, other = self.to_dict(), {**_defaults(), **other}
        return [
            f"{name} is {mine.get(name)!r}, not {other.get(name)!r}"
            for name in sorted({*mine, *other} - set(BOOKKEEPING))
            if mine.get(name) != other.get(name)
        ]


def _defaults() -> dict[str, Any]:
    """Fields that need not be given."""
    values = {item.name: item.default for item in fields(TrainConfig) if item.default is not MISSING}
    made = {item.name: item.default_factory() for item in fields(TrainConfig) if item.default_factory is not MISSING}
    return {name: plain(value) for name, value in {**values, **made}.items()}


def merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a config, all or some, with others laid over them; nothing is checked but that options are mappings.

    Mappings (``optimizer_options`` and the like) are merged key by key, unless what they are options of becomes another
    too: the options of another optimizer begin anew. ``steps`` takes the place of ``epochs``, and the other way round.

    Raises:
        ValueError: options are no mapping.
    """
    result = {**values, **overrides}
    for name, owner in OPTIONS.items():
        if name in result:
            kept, more = (typed_field(name, layer.get(name, {})) for layer in (values, overrides))
            anew = owner in overrides and overrides[owner] != values.get(owner, getattr(TrainConfig, owner))
            result[name] = more if anew else {**kept, **more}
    for name, other in (("epochs", "steps"), ("steps", "epochs")):
        if overrides.get(name) is not None and other not in overrides:
            result[other] = None
    return result


def typed_field(name: str, value: Any) -> Any:
    """A value as the field of this name holds it; whether it makes sense there is for :class:`TrainConfig` to say.

    Raises:
        ValueError: it is of another kind.
    """
    return typed(name, value, _hints()[name])


@cache
def _hints() -> dict[str, Any]:
    return get_type_hints(TrainConfig)
