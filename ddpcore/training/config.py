"""``TrainConfig``: a training run as one frozen value, and its checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any, get_type_hints

from ddpcore.comm import Link
from ddpcore.comm.choice import TRANSPORTS
from ddpcore.comm.membership import LEAST, ON_FAILURE
from ddpcore.data import DATASETS, SAMPLERS, SHARDS
from ddpcore.data.shards import check_growth
from ddpcore.data.uneven import check_options as check_shards
from ddpcore.distributed.averaging import BATCH_NORM
from ddpcore.distributed.state_sync import Policies
from ddpcore.models import MODELS
from ddpcore.optim.registry import OPTIMIZERS
from ddpcore.optim.schedules import SCHEDULES
from ddpcore.options.command_line import SEED_RANGE
from ddpcore.options.registry import Registry
from ddpcore.options.typed import check_choice, check_keys, check_range, typed, without_numpy
from ddpcore.records.run import BOOKKEEPING
from ddpcore.runtime.launch import MOST_SECONDS, TIMEOUT_SECONDS
from ddpcore.strategies.base import Baseline, Strategy, check_deaths, check_group, check_on_nonfinite
from ddpcore.strategies.nonfinite import ON_NONFINITE
from ddpcore.strategies.registry import STRATEGIES
from ddpcore.topology.base import Topology
from ddpcore.topology.registry import TOPOLOGIES

PRECISIONS = ("fp32", "bf16")
DEVICES = ("auto", "cpu", "cuda")
UNITS = ("epochs", "steps")
GROWTH_POWERS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}  # of batch size / batch_size, in the learning rate
EVALUATION_SPLITS = ("test", "validation")
# Fields that name a part of the run, and the registry of such parts. The options of `model` are in `model_options`.
REGISTRIES: Mapping[str, Registry[Any]] = {
    "model": MODELS,
    "dataset": DATASETS,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "strategy": STRATEGIES,
    "topology": TOPOLOGIES,
}
# Fields that hold options, and the field that names the part with these options.
OPTIONS = {f"{name}_options": name for name in REGISTRIES} | {"policies": "", "shards_options": "shards"}


def _field(default: Any, about: str, choices: Sequence[str] = (), **bounds: float) -> Any:
    """A field: its default (``dict`` makes a new dict), its meaning, its choices, its bounds for ``check_range``."""
    metadata = {"about": about, "choices": choices, "bounds": bounds}
    return (
        field(default_factory=dict, metadata=metadata) if default is dict else field(default=default, metadata=metadata)
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run. The constructor checks everything that can be checked without reading data.

    ``model``, ``dataset``, ``optimizer``, ``schedule``, ``strategy`` and ``topology`` each are the name of a part of
    ddpcore or of an installed package, or your own part as ``module:attribute``, see :mod:`ddpcore.options.registry`.
    The ``*_options`` are options of the part, such as ``{"dropout": 0.2}``.

    Raises:
        ValueError: a field is wrong; the message has its name, its value, and what to do.
    """

    model: str = _field("lenet5", "the model")
    model_options: Mapping[str, Any] = _field(dict, "its options")
    channels_last: bool = _field(False, "store convolution weights in channels-last order, faster on GPUs and in bf16")
    dataset: str = _field("synthetic", "the data set; ``synthetic`` makes samples of the shape that the model takes")
    dataset_options: Mapping[str, Any] = _field(dict, "its options, see ``DATASETS.options(name)``")
    data_dir: str | None = _field(None, "the folder of its files")
    download: bool = _field(False, "first download missing files into ``data_dir``")
    normalize: bool = _field(False, "normalize images to mean 0 and standard deviation 1 in each channel")
    augment: bool = _field(False, "augment training images by random crops and, except for digits, random flips")
    num_validation: int = _field(0, "training samples that are held out for validation", least=0)
    num_train: int | None = _field(None, "use this many of the other samples, see ``Dataset.limit``", least=1)
    num_test: int | None = _field(None, "use only this many test samples", least=1)
    random_labels: bool = _field(False, "replace training labels by random ones, which can only be memorized")
    sampler: str = _field(SAMPLERS[0], "how learners get samples, see :class:`ddpcore.data.ShardedBatches`", SAMPLERS)
    shards: str = _field(
        SHARDS[0],
        "samples that a learner keeps for the whole run, see :func:`ddpcore.data.split`; ``even``: as ``sampler`` says",
        SHARDS,
    )
    shards_options: Mapping[str, Any] = _field(
        dict, '``{"alpha": 0.1}`` of ``dirichlet``, ``{"parts": [[0, 2], [1, 3]]}`` of ``given``'
    )
    drop_last: bool = _field(True, "skip the incomplete batch at the end of an epoch")
    batch_size: int = _field(128, "samples of one optimizer step, over all learners", least=1)
    batch_growth: tuple[tuple[int, int], ...] = _field(
        (), "``[[100, 256], [300, 512]]``: batches of 256 samples from step 100 on (counted from 0), and so on"
    )
    batch_growth_lr: str = _field(
        "none",
        "with ``batch_growth``, multiply the learning rate by (batch of the step / ``batch_size``)^p, where p is 0 "
        "(``none``), 1/2 (``sqrt``) or 1 (``linear``)",
        tuple(GROWTH_POWERS),
    )
    accumulation: int = _field(1, "backward passes per step, each with an equal part of a learner's samples", least=1)
    epochs: int | None = _field(None, "length of the run in epochs; set either ``epochs`` or ``steps``", least=1)
    steps: int | None = _field(None, "length of the run in optimizer steps", least=1)
    optimizer: str = _field(
        "sgd", "``sgd``, ``adamw``, ``lars``, ``lamb`` are ddpcore's; other short names are torch's"
    )
    optimizer_options: Mapping[str, Any] = _field(dict, 'its options, such as ``{"momentum": 0.9}``')
    param_groups: bool = _field(False, "no weight decay and no layer-wise adaptation of biases and norms")
    lr: float = _field(0.1, "peak learning rate; with ``reference_batch_size``, that of the reference batch", least=0)
    reference_batch_size: int | None = _field(None, "scale ``lr`` by ``batch_size`` / this; None: unscaled", least=1)
    schedule: str = _field(
        "constant",
        "``constant``; ``step`` multiplies the learning rate by ``gamma`` at each of ``milestones``; ``cosine`` decays "
        "to 0 at the end of the run; ``exponential`` multiplies by ``gamma`` per ``schedule_unit``; or your own",
    )
    schedule_options: Mapping[str, Any] = _field(dict, "options of your own schedule")
    schedule_unit: str = _field(
        UNITS[0],
        "unit of ``milestones``, ``warmup`` and ``gamma``; with ``batch_growth``, a schedule in ``epochs`` has "
        "the rate that a run without growth has at the same sample of the same epoch; one in ``steps`` counts steps",
        UNITS,
    )
    milestones: tuple[float, ...] = _field((), "of the schedule ``step``, in ascending order")
    gamma: float = _field(0.1, "factor of the schedules ``step`` and ``exponential``", above=0, most=1)
    warmup: float = _field(0.0, "length of a linear ramp of the learning rate; does not delay the schedule", least=0)
    warmup_start: float = _field(0.0, "the ramp starts at this share of the learning rate", least=0, most=1)
    label_smoothing: float = _field(0.0, "share of the label that all classes get, only in training", least=0, most=1)
    max_grad_norm: float | None = _field(None, "clip the gradient of each learner to this norm", above=0)
    precision: str = _field(PRECISIONS[0], "``bf16`` runs forward passes under autocast", PRECISIONS)
    compile: bool = _field(False, "run the model through ``torch.compile``")
    strategy: str = _field("single", "how learners average gradients or weights")
    strategy_options: Mapping[str, Any] = _field(dict, "its options, see :mod:`ddpcore.strategies.registry`")
    topology: str = _field("random_pair", "the neighbours, for strategies that have neighbours")
    topology_options: Mapping[str, Any] = _field(dict, "its options")
    policies: Mapping[str, Any] = _field(dict, "fields of :class:`ddpcore.Policies`")
    learners: int = _field(1, "learners, virtual in one process or the same number on each rank", least=1)
    device: str = _field(DEVICES[0], "where to train", DEVICES)
    transport: str = _field(TRANSPORTS[0], "how ranks exchange bytes, see :func:`ddpcore.distribute`", TRANSPORTS)
    link: str | None = _field(
        None,
        "a network to emulate between real ranks, ``10Gb/s,50us``, see :meth:`ddpcore.comm.Link.parse`; the seconds of "
        "the run are then those on this network",
    )
    on_failure: str = _field(
        ON_FAILURE[0],
        "when a rank dies: ``raise`` ends all ranks, ``shrink`` goes on with the others, see docs/reliability.md",
        ON_FAILURE,
    )
    timeout: float = _field(
        TIMEOUT_SECONDS, "seconds that a living rank may let the others wait", above=0, most=MOST_SECONDS
    )
    target: float | None = _field(None, "end the run at an evaluation with this accuracy", above=0, most=1)
    evaluate_every: int = _field(1, "epochs between evaluations of the averaged model; 0: only at the end", least=0)
    evaluate_on: str = _field("test", "``validation`` uses the test split once, at the end", EVALUATION_SPLITS)
    evaluation_batch_norm: str = _field(BATCH_NORM[0], "of the averaged model, see ``evaluation_model``", BATCH_NORM)
    recalibration_batches: int = _field(32, "training batches for the batch normalization ``recalibrate``", least=1)
    statistics_every: int = _field(0, "steps between records of ``NoiseStatistics``; 0: no statistics", least=0)
    statistics_samples: int | None = _field(None, "training samples for its full loss; None: all", least=1)
    hessian_every: int = _field(0, "steps between records of ``HessianStatistics``; 0: none", least=0)
    hessian_samples: int | None = _field(None, "training samples for its loss; None: all", least=1)
    hessian_top: int = _field(5, "its largest eigenvalues and eigenvectors", least=1)
    flatness_samples: int = _field(0, "training samples for ``flatness`` of the final model; 0: skip it", least=0)
    escape_loss: float | None = _field(None, "a run has escaped from its start when the full loss is below this")
    record_steps: bool = _field(False, "also record loss and times of every step, a file for each rank in ``steps/``")
    seed: int = _field(0, "of weights, dropout, batches, augmentation, gossip pairs and noise", **SEED_RANGE)
    diverged_above: float | None = _field(None, "stop above this multiple of the first loss; None: at NaN", above=1)
    on_nonfinite: str = _field(
        ON_NONFINITE[0],
        "a gradient that is not finite ends the run as diverged (``raise``), or the learner leaves out its step "
        "(``skip``), or takes the average of its neighbours (``quarantine``), see :func:`ddpcore.distribute`",
        ON_NONFINITE,
    )
    checkpoint_every: int | None = _field(None, "steps between checkpoints; None: each epoch; 0: none", least=0)
    keep_last: int = _field(2, "how many of the last checkpoints to keep", least=1)
    keep_best: bool = _field(True, "also keep the checkpoint with the best accuracy")
    save_nonfinite: bool = _field(False, "also save checkpoints and models with numbers that are not finite")

    def __new__(cls, *values: Any, **given: Any) -> TrainConfig:
        """Refuse unknown fields with a suggestion, before ``__init__`` raises TypeError."""
        check_keys(cls.__name__, given, (item.name for item in fields(cls)))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for item in fields(self):
            name, value = item.name, typed(item.name, getattr(self, item.name), _hints()[item.name])
            object.__setattr__(self, name, value)
            check_range(name, value, **item.metadata["bounds"])
            if item.metadata["choices"]:
                check_choice(name, value, item.metadata["choices"])
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
        if self.batch_growth:
            self._check_growth()
        if self.shards != SHARDS[0] and (self.sampler != SAMPLERS[0] or not self.drop_last):
            raise ValueError(
                f"shards is '{self.shards}' and learners keep their parts: leave sampler at '{SAMPLERS[0]}' and "
                "drop_last on"
            )
        if self.link is not None and self.learners == 1:
            raise ValueError(f"link is {self.link!r} and learners is 1: one learner sends nothing, leave it out")
        if self.on_failure != ON_FAILURE[0]:
            self._check_shrink()
        if self.evaluate_on == "validation" and not self.num_validation:
            raise ValueError("evaluate_on is 'validation': set num_validation to the samples to hold out")
        if bool(self.milestones) != (self.schedule == "step"):
            raise ValueError(f"milestones is {self.milestones}: set milestones if and only if schedule is 'step'")
        if list(self.milestones) != sorted(set(self.milestones)) or min(self.milestones, default=0) < 0:
            raise ValueError(f"milestones is {self.milestones}: they must be in ascending order, from 0")
        if self.escape_loss is not None and not self.statistics_every:
            raise ValueError(
                f"escape_loss is {self.escape_loss}: the statistics compute the full loss, set statistics_every"
            )
        if self.target is not None and not self.evaluate_every:
            raise ValueError(
                f"target is {self.target}: only an evaluation can reach it, set evaluate_every to 1 or more"
            )
        if self.policies.get("scaler", "keep") != "keep":
            raise ValueError("policies has a scaler: bf16 and fp32 need none, leave it out")

    def _check_growth(self) -> None:
        """Check the growth of the batch, and what does not go together with it."""
        check_growth("batch_growth", self.batch_size, self.batch_growth)
        for step, size in self.batch_growth:
            if size % (self.learners * self.accumulation):
                raise ValueError(
                    f"batch_growth has the batch size {size}: it must be a multiple of learners x accumulation, "
                    f"{self.learners} x {self.accumulation}"
                )
            if self.steps is not None and step >= self.steps:
                raise ValueError(f"batch_growth has the step {step}: the run ends after {self.steps} steps")
        for name, is_set, why in (
            ("compile", self.compile, "a compiled model has one batch size"),
            ("statistics_every", self.statistics_every, "a noise scale averages steps of one batch size"),
            ("on_failure", self.on_failure != ON_FAILURE[0], "ranks that die and join share batches of one size"),
        ):
            if is_set:
                raise ValueError(f"batch_growth is set and {name} is {getattr(self, name)!r}: {why}, leave one out")

    def _check_shrink(self) -> None:
        """Check what a run needs to go on when a rank dies."""
        needed = f"on_failure is {self.on_failure!r}: "
        if self.learners <= LEAST:
            raise ValueError(f"{needed}{LEAST} learners must be left, and learners is {self.learners}: take more")
        if self.statistics_every or self.hessian_every or self.link is not None:
            raise ValueError(f"{needed}statistics and an emulated link need a fixed number of ranks: leave them out")
        if self.sampler != SAMPLERS[0] or not self.drop_last:
            raise ValueError(f"{needed}samples are dealt again with sampler {SAMPLERS[0]!r} and drop_last: take these")
        if self.shards != SHARDS[0]:
            raise ValueError(f"{needed}it deals samples again, and shards is {self.shards!r}: take {SHARDS[0]!r}")

    def _check_options(self) -> None:
        """Check the options of each part. Strategy, topology and link are built, which checks the values too."""
        if "max_grad_norm" in self.optimizer_options:
            raise ValueError("optimizer_options has max_grad_norm: set the field max_grad_norm instead")
        if "adamw_lr" in self.optimizer_options:
            raise ValueError(
                "optimizer_options has adamw_lr: a run sets lr for all parameters, take adjust_lr_fn='match_rms_adamw'"
            )
        for name, registry in REGISTRIES.items():
            registry.check_options(getattr(self, name), getattr(self, f"{name}_options"))
        check_shards(self.shards, self.shards_options)
        check_keys("policies", self.policies, (item.name for item in fields(Policies)))
        Policies(**self.policies)
        self.make_link()
        strategy = self.make_strategy()
        self._check_traits(strategy)
        if isinstance(strategy, Strategy):
            check_on_nonfinite(self.on_nonfinite, strategy)
            check_group(strategy, self.learners)
        elif self.on_nonfinite != "raise":
            raise ValueError(
                f"on_nonfinite is {self.on_nonfinite!r}: {strategy.name} checks no gradients, leave it out"
            )

    def _check_traits(self, strategy: Strategy | Baseline) -> None:
        """Check what the strategy says of itself against the number of learners and the measurements."""
        traits, every = strategy.traits, f"statistics_every is {self.statistics_every}"
        if traits.most_learners is not None and self.learners > traits.most_learners:
            raise ValueError(
                f"learners is {self.learners}: {strategy.name} trains at most {traits.most_learners}, take "
                "the strategy ssgd for more"
            )
        if self.statistics_every and self.learners == 1:
            raise ValueError(f"{every}: it needs at least two learners, set it to 0")
        if self.statistics_every and traits.group > 1:
            raise ValueError(
                f"{every}: a group of {traits.group} leaves no learner's own gradient to compare, set it to 0 or leave "
                "group out"
            )
        if self.on_failure != ON_FAILURE[0]:
            check_deaths(strategy)
        for name, value in (("statistics_every", self.statistics_every), ("hessian_every", self.hessian_every)):
            if value and traits.no_mean:
                raise ValueError(f"{name} is {value}: {traits.no_mean}, take ssgd or dpsgd, or set it to 0")

    def make_strategy(self) -> Strategy | Baseline:
        """A new strategy with its topology. Raises ValueError if an option is wrong."""
        options = dict(self.strategy_options)
        if "seed" in STRATEGIES.options(self.strategy):
            options.setdefault("seed", self.seed)
        return STRATEGIES.build(self.strategy, topology=self.make_topology(), **options)

    def make_topology(self) -> Topology:
        """A new topology. Raises ValueError if an option is wrong."""
        return TOPOLOGIES.build(self.topology, seed=self.seed, **self.topology_options)

    def make_link(self) -> Link | None:
        """The network to emulate. Raises ValueError if the text of ``link`` has another form."""
        return None if self.link is None else Link.parse(self.link)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain dicts, lists, numbers and text, for JSON and, without the None values, for TOML."""
        return {name: without_numpy(value) for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """The config with these fields; a missing field has its default.

        Raises:
            ValueError: a key is no field (the message names the most similar field), or a value is wrong.
        """
        check_keys("a training run", values, (item.name for item in fields(cls)))
        return cls(**values)

    def overridden(self, overrides: Mapping[str, Any]) -> TrainConfig:
        """This config with some fields changed, see :func:`merged`. Raises ValueError as :meth:`from_dict` does."""
        return TrainConfig.from_dict(merged(self.to_dict(), overrides))

    def difference(self, other: Mapping[str, Any]) -> list[str]:
        """The fields that differ from another config's :meth:`to_dict` and change results, as ``name is x, not y``.

        A field that ``other`` lacks, because it was written before the field existed, has its default.
        """
        mine, other = self.to_dict(), {**TrainConfig(epochs=1).to_dict(), "epochs": None, **other}
        return [
            f"{name} is {mine.get(name)!r}, not {other.get(name)!r}"
            for name in sorted({*mine, *other} - set(BOOKKEEPING))
            if mine.get(name) != other.get(name)
        ]


TrainConfig.__doc__ = f"{TrainConfig.__doc__}\n    Attributes:\n" + "\n".join(
    f"        {item.name}: {item.metadata['about']}" for item in fields(TrainConfig)
)


def merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a config, all or some, with overrides. Only checks that options are mappings.

    Options (``optimizer_options`` and the like) are merged key by key. If the part itself changes, its old options are
    dropped. ``steps`` replaces ``epochs``, and ``epochs`` replaces ``steps``.

    Raises:
        ValueError: options are no mapping.
    """
    result = {**values, **overrides}
    for name, owner in OPTIONS.items():
        if name in result:
            kept, more = (typed(name, layer.get(name, {}), _hints()[name]) for layer in (values, overrides))
            changes = owner in overrides and overrides[owner] != values.get(owner, getattr(TrainConfig, owner))
            result[name] = more if changes else {**kept, **more}
    for name, other in (("epochs", "steps"), ("steps", "epochs")):
        if overrides.get(name) is not None and other not in overrides:
            result[other] = None
    return result


@cache
def _hints() -> dict[str, Any]:
    """The type of each field."""
    return get_type_hints(TrainConfig)
