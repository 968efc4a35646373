"""The five sections of a ``TrainConfig``, each a frozen value that checks itself."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, get_type_hints

import torch
from torch import Tensor
from typing_extensions import Self

from ddpcore.comm.connect import TRANSPORTS
from ddpcore.comm.link import Link
from ddpcore.comm.membership import LEAST, ON_FAILURE
from ddpcore.data import DATASETS, SAMPLERS, SHARDS, Dataset
from ddpcore.data.shards import check_growth, permutation
from ddpcore.data.uneven import check_options as check_shards
from ddpcore.distributed.averaging import BATCH_NORM
from ddpcore.distributed.state_sync import Policies
from ddpcore.models import MODELS
from ddpcore.optim.registry import OPTIMIZERS
from ddpcore.optim.schedules import SCHEDULES
from ddpcore.options.fields import SEED_RANGE, check_value, field
from ddpcore.options.registry import Registry
from ddpcore.options.typed import check_keys, typed, without_numpy
from ddpcore.records.run import SECTIONS
from ddpcore.runtime.launch import MOST_SECONDS, TIMEOUT_SECONDS
from ddpcore.strategies.learner import ON_NONFINITE
from ddpcore.strategies.registry import STRATEGIES
from ddpcore.topology.registry import TOPOLOGIES

PRECISIONS = ("fp32", "bf16")
DEVICES = ("auto", "cpu", "cuda")
UNITS = ("epochs", "steps")
GROWTH_POWERS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}  # of batch size / batch_size, in the learning rate
EVALUATION_SPLITS = ("test", "validation")
_KEY = (0, 0, 0, 3)  # key of the permutation of the samples; no other random draw uses this key


@dataclass(frozen=True, eq=False)
class Section:
    """A group of fields. A field that names a part has another field for the options of this part.

    In texts and files the options of the part ``name`` are keys beside the fields. Another part of a section, such as
    the topology of a strategy, is a table there: its ``name``, and its options.
    """

    KEY: ClassVar[str]  # its key in a config
    HINTS: ClassVar[dict[str, Any]]  # the type of each field
    PARTS: ClassVar[dict[str, Registry[Any] | None]]  # fields that name a part with options, and its registry if any
    PLAIN: ClassVar[tuple[str, ...]]  # all fields but those for the options of a part: the keys that a file may have

    def __new__(cls, *values: Any, **given: Any) -> Self:
        """Refuse unknown fields with a suggestion, before ``__init__`` raises TypeError."""
        check_keys(cls.__name__, given, cls.HINTS)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for item in fields(self):
            name = key_of(type(self), item.name)
            value = typed(name, getattr(self, item.name), self.HINTS[item.name])
            object.__setattr__(self, item.name, value)
            check_value(name, value, item)
        for part, registry in self.PARTS.items():
            options = getattr(self, _options_of(part))
            others = self.PLAIN if part == "name" else ()
            for option in others:
                if option in options:
                    raise ValueError(f"{self.KEY}: options has {option}: set the field {self.KEY}.{option} instead")
            if registry is not None:
                registry.check_options(getattr(self, part), options, others)

    @classmethod
    def arguments(cls, values: Any) -> dict[str, Any]:
        """The arguments that a table of a file, or the name of the part, gives. ValueError: a key is unknown."""
        found: dict[str, Any] = {}
        parts, known = cls.PARTS, cls.PLAIN
        for key, value in table_of(cls, values).items():
            if key in parts and key != "name":
                inner = dict(value) if isinstance(value, Mapping) else {"name": value}
                if "name" in inner:
                    found[key] = inner.pop("name")
                found[_options_of(key)] = inner
            elif key in known:
                found[key] = value
            elif "name" in parts:
                found.setdefault("options", {})[key] = value
            else:
                check_keys(cls.KEY, [key], known)
        return found

    def to_dict(self) -> dict[str, Any]:
        """All fields and options as a table of plain values, for JSON and, without the None values, for TOML."""
        found = {name: without_numpy(getattr(self, name)) for name in self.PLAIN}
        for part in self.PARTS:
            options = getattr(self, _options_of(part))
            found = {**found, **options} if part == "name" else {**found, part: {"name": found[part], **options}}
        return found


def key_of(section: type[Section], name: str) -> str:
    """The key of a field of a section, as messages spell it."""
    return section.KEY if name == "name" else f"{section.KEY}.{name}"


def table_of(section: type[Section], values: Any) -> dict[str, Any]:
    """A section of a file as a table. ValueError: it is neither a table nor the name of the section's part."""
    if isinstance(values, Mapping):
        return dict(values)
    if "name" in section.HINTS:
        return {"name": values}
    raise ValueError(f"{section.KEY} is {values!r}: it must be a table, of the keys {', '.join(section.PLAIN)}")


def _options_of(part: str) -> str:
    return "options" if part == "name" else f"{part}_options"


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The model."""

    name: str = field("lenet5", "the model", parts=MODELS)
    options: Mapping[str, Any] = field(dict, 'its options, such as ``{"hidden": [64, 64]}``')
    channels_last: bool = field(False, "store convolution weights in channels-last order, faster on GPUs and in bf16")
    precision: str = field(PRECISIONS[0], "``bf16`` runs forward passes under autocast", choices=PRECISIONS)
    compile: bool = field(False, "run the model through ``torch.compile``")


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """The samples, and how learners get them."""

    name: str = field("synthetic", "the data set; ``synthetic`` makes samples of the model's shape", parts=DATASETS)
    options: Mapping[str, Any] = field(dict, "its options, see ``DATASETS.options(name)``")
    data_dir: str | None = field(None, "the folder of its files")
    download: bool = field(False, "first download missing files into ``data_dir``")
    normalize: bool = field(False, "normalize images to mean 0 and standard deviation 1 in each channel")
    augment: bool = field(False, "augment training images by random crops and, except for digits, random flips")
    num_validation: int = field(0, "training samples that are held out for validation", least=0)
    num_train: int | None = field(None, "use this many of the other samples, see ``Dataset.limit``", least=1)
    num_test: int | None = field(None, "use only this many test samples", least=1)
    random_labels: bool = field(False, "replace training labels by random ones, which can only be memorized")
    sampler: str = field(
        SAMPLERS[0], "the order of samples, see :class:`ddpcore.data.ShardedBatches`", choices=SAMPLERS
    )
    shards: str = field(
        SHARDS[0],
        "samples that a learner keeps for the whole run, see :func:`ddpcore.data.split`; ``even``: as ``sampler`` says",
        choices=SHARDS,
    )
    shards_options: Mapping[str, Any] = field(
        dict, '``{"alpha": 0.1}`` of ``dirichlet``, ``{"parts": [[0, 2], [1, 3]]}`` of ``given``'
    )
    drop_last: bool = field(True, "skip the incomplete batch at the end of an epoch")
    batch_size: int = field(128, "samples of one optimizer step, over all learners", least=1)
    batch_growth: tuple[tuple[int, int], ...] = field(
        (), "``[[100, 256], [300, 512]]``: batches of 256 samples from step 100 on (counted from 0), and so on"
    )
    batch_growth_lr: str = field(
        "none",
        "with ``batch_growth``, multiply the learning rate by (batch of the step / ``batch_size``)^p, where p is 0 "
        "(``none``), 1/2 (``sqrt``) or 1 (``linear``)",
        choices=tuple(GROWTH_POWERS),
    )
    learners_batch: tuple[int, ...] = field(
        (),
        "samples of each learner in a step, together ``batch_size``, for learners of different speed; averages are "
        "then weighted by them",
    )
    balance: bool = field(False, "measure each rank's speed at the start, and set ``learners_batch`` in proportion")
    accumulation: int = field(1, "backward passes per step, each with an equal part of a learner's samples", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shards(self.shards, self.shards_options)
        if self.batch_growth:
            check_growth("data.batch_growth", self.batch_size, self.batch_growth)
        if self.shards != SHARDS[0] and (self.sampler != SAMPLERS[0] or not self.drop_last):
            why = f"data.shards is '{self.shards}' and learners keep their parts"
            raise ValueError(f"{why}: leave sampler at '{SAMPLERS[0]}' and drop_last on")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """The optimizer, its learning rate, and what else a step does with a gradient."""

    name: str = field("sgd", "``sgd``, ``adamw``, ``lars``, ``lamb`` are ddpcore's, others torch's", parts=OPTIMIZERS)
    options: Mapping[str, Any] = field(dict, 'its options, such as ``{"momentum": 0.9}``')
    param_groups: bool = field(False, "no weight decay and no layer-wise adaptation of biases and norms")
    lr: float = field(0.1, "peak learning rate; with ``reference_batch_size``, the reference batch's", least=0)
    reference_batch_size: int | None = field(None, "scale ``lr`` by ``batch_size`` / this; None: unscaled", least=1)
    schedule: str = field(
        "constant",
        "``constant``; ``step`` multiplies the learning rate by ``gamma`` at each of ``milestones``; ``cosine`` decays "
        "to 0 at the end of the run; ``exponential`` multiplies by ``gamma`` per ``schedule_unit``; or your own",
        parts=SCHEDULES,
    )
    schedule_options: Mapping[str, Any] = field(dict, "options of your own schedule")
    schedule_unit: str = field(
        UNITS[0],
        "unit of ``milestones``, ``warmup`` and ``gamma``; with ``batch_growth``, a schedule in ``epochs`` has "
        "the rate that a run without growth has at the same sample of the same epoch; one in ``steps`` counts steps",
        choices=UNITS,
    )
    milestones: tuple[float, ...] = field((), "of the schedule ``step``, in ascending order")
    gamma: float = field(0.1, "factor of the schedules ``step`` and ``exponential``", above=0, most=1)
    warmup: float = field(0.0, "length of a linear ramp of the learning rate; does not delay the schedule", least=0)
    warmup_start: float = field(0.0, "the ramp starts at this share of the learning rate", least=0, most=1)
    label_smoothing: float = field(0.0, "share of the label that all classes get, only in training", least=0, most=1)
    max_grad_norm: float | None = field(None, "clip the gradient of each learner to this norm", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if "adamw_lr" in self.options:
            raise ValueError("optimizer.adamw_lr: a run sets lr for all parameters, take adjust_lr_fn=match_rms_adamw")
        marks = f"optimizer.milestones is {self.milestones}: "
        if bool(self.milestones) != (self.schedule == "step"):
            raise ValueError(f"{marks}set milestones if and only if schedule is 'step'")
        if list(self.milestones) != sorted(set(self.milestones)) or min(self.milestones, default=0) < 0:
            raise ValueError(f"{marks}they must be in ascending order, from 0")


@dataclass(frozen=True, kw_only=True)
class StrategyConfig(Section):
    """The strategy, its learners, and their connection."""

    name: str = field("single", "how learners average gradients or weights", parts=STRATEGIES)
    options: Mapping[str, Any] = field(dict, "its options, see :mod:`ddpcore.strategies.registry`")
    topology: str = field("random_pair", "the neighbours, for strategies that have neighbours", parts=TOPOLOGIES)
    topology_options: Mapping[str, Any] = field(dict, "its options")
    policies: Mapping[str, Any] = field(dict, "fields of :class:`ddpcore.Policies`")
    learners: int = field(1, "learners, virtual in one process or the same number on each rank", least=1)
    learners_at_once: int | None = field(
        None,
        "virtual learners whose activations live at once; fewer need less memory and give the same bits; None: one, or "
        "all if they are small or ``torch.func.vmap`` runs them",
        least=1,
    )
    transport: str = field(TRANSPORTS[0], "how ranks exchange bytes: :class:`ddpcore.Connection`", choices=TRANSPORTS)
    link: str | None = field(
        None,
        "a network to emulate between real ranks, ``10Gb/s,50us``, see :meth:`ddpcore.comm.Link.parse`; the seconds of "
        "the run are then those on this network",
    )
    on_failure: str = field(
        ON_FAILURE[0],
        "when a rank dies: ``raise`` ends all ranks, ``shrink`` goes on with the others, see docs/reliability.md",
        choices=ON_FAILURE,
    )
    timeout: float = field(TIMEOUT_SECONDS, "seconds a living rank may let the others wait", above=0, most=MOST_SECONDS)
    on_nonfinite: str = field(
        ON_NONFINITE[0],
        "a gradient that is not finite ends the run as diverged (``raise``), or the learner leaves out its step "
        "(``skip``), or takes the average of its neighbours (``quarantine``), see :func:`ddpcore.distribute`",
        choices=ON_NONFINITE,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_keys("strategy.policies", self.policies, (item.name for item in fields(Policies)))
        Policies(**self.policies)
        link = self.link
        if link is not None and self.learners == 1:
            raise ValueError(f"strategy.link is {link!r} and learners is 1: one learner sends nothing, leave it out")
        if link is not None:
            Link.parse(link)
        needed = f"strategy.on_failure is {self.on_failure!r}: "
        if self.on_failure != ON_FAILURE[0] and self.learners <= LEAST:
            raise ValueError(f"{needed}{LEAST} learners must be left, and learners is {self.learners}: take more")
        if self.on_failure != ON_FAILURE[0] and self.link is not None:
            raise ValueError(f"{needed}an emulated link needs a fixed number of ranks: leave it out")


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """The length of a run, its device, and what it measures and keeps."""

    epochs: int | None = field(None, "length of the run in epochs; set either ``epochs`` or ``steps``", least=1)
    steps: int | None = field(None, "length of the run in optimizer steps", least=1)
    seed: int = field(0, "of weights, dropout, batches, augmentation, gossip pairs and noise", **SEED_RANGE)
    device: str = field(DEVICES[0], "where to train", choices=DEVICES)
    target: float | None = field(None, "end the run at an evaluation with this accuracy", above=0, most=1)
    evaluate_every: int = field(1, "epochs between evaluations of the averaged model; 0: only at the end", least=0)
    evaluate_on: str = field("test", "``validation`` uses the test split once, at the end", choices=EVALUATION_SPLITS)
    evaluation_batch_norm: str = field(BATCH_NORM[0], "of the averaged model: ``evaluation_model``", choices=BATCH_NORM)
    recalibration_batches: int = field(32, "training batches for the batch normalization ``recalibrate``", least=1)
    statistics_every: int = field(0, "steps between records of ``NoiseStatistics``; 0: no statistics", least=0)
    statistics_samples: int | None = field(None, "training samples for its full loss; None: all", least=1)
    statistics_hessian: bool = field(False, "also record the noise by equation 4, as ``NoiseStatistics(hessian=True)``")
    hessian_every: int = field(0, "steps between records of ``HessianStatistics``; 0: none", least=0)
    hessian_samples: int | None = field(None, "training samples for its loss; None: all", least=1)
    hessian_top: int = field(5, "its largest eigenvalues and eigenvectors", least=1)
    flatness_samples: int = field(0, "training samples for ``flatness`` of the final model; 0: skip it", least=0)
    escape_loss: float | None = field(None, "a run has escaped from its start when the full loss is below this")
    record_steps: bool = field(False, "also record loss and times of every step, a file for each rank in ``steps/``")
    diverged_above: float | None = field(None, "stop above this multiple of the first loss; None: at NaN", above=1)
    checkpoint_every: int | None = field(None, "steps between checkpoints; None: each epoch; 0: none", least=0)
    keep_last: int = field(2, "how many of the last checkpoints to keep", least=1)
    keep_best: bool = field(True, "also keep the checkpoint with the best accuracy")
    save_nonfinite: bool = field(False, "also save checkpoints and models with numbers that are not finite")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"run.epochs is {self.epochs} and run.steps is {self.steps}: give exactly one of them")


_CLASSES = (ModelConfig, DataConfig, OptimizerConfig, StrategyConfig, RunConfig)
CLASSES: Mapping[str, type[Section]] = dict(zip(SECTIONS, _CLASSES, strict=True))
for _key, _section in CLASSES.items():
    _section.KEY = _key
    _hints, _fields = get_type_hints(_section), {item.name: item for item in fields(_section)}
    _section.HINTS = {name: _hints[name] for name in _fields}
    _section.PARTS = {name: item.metadata["parts"] for name, item in _fields.items() if _options_of(name) in _fields}
    _section.PLAIN = tuple(name for name in _fields if name not in map(_options_of, _section.PARTS))
    _lines = (f"        {name}: {item.metadata['about']}" for name, item in _fields.items())
    _section.__doc__ = "\n".join([f"{_section.__doc__}\n\n    Attributes:", *_lines])


def random_samples(dataset: Dataset, name: str, num: int, least: int, seed: int) -> Tensor:
    """The sample numbers of ``num`` random training samples, int64 ``[num]``, on the CPU.

    ValueError: ``num`` is below ``least`` or above the size of the training set; the message has ``name``.
    """
    total = len(dataset.train)
    if not least <= num <= total:
        raise ValueError(f"{name} is {num}: take {least} to {total}, the size of the training set")
    return torch.from_numpy(permutation(total, seed, *_KEY)[:num].copy())
