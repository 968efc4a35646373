"""``TrainConfig``: a training run as one frozen value."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from ddpcore.comm.membership import ON_FAILURE
from ddpcore.data import SAMPLERS, SHARDS, Dataset
from ddpcore.data.shards import check_sizes
from ddpcore.optim.schedules import SCHEDULES
from ddpcore.options.command_line import described
from ddpcore.options.fields import check_value, dotted
from ddpcore.options.typed import suggest, typed
from ddpcore.records.run import BOOKKEEPING, SECTIONS, key_of_0_2, nested
from ddpcore.strategies.base import Baseline, Strategy, check_deaths, check_group, check_on_nonfinite
from ddpcore.strategies.registry import STRATEGIES
from ddpcore.topology.base import Topology
from ddpcore.topology.registry import TOPOLOGIES
from ddpcore.topology.wrapped import Weighted
from ddpcore.training import sections
from ddpcore.training.sections import CLASSES, Section, key_of, table_of

_A_RUN = "a training run"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run. The constructor checks everything that can be checked without reading data.

    A model, data set, optimizer, schedule, strategy or topology is given by its name: of a part of ddpcore or of an
    installed package, or ``module:attribute`` of your own, see :mod:`ddpcore.options.registry`.
    ValueError: a field is wrong; the message has its key, its value, and what to do.
    """

    model: sections.ModelConfig = field(default_factory=sections.ModelConfig)
    data: sections.DataConfig = field(default_factory=sections.DataConfig)
    optimizer: sections.OptimizerConfig = field(default_factory=sections.OptimizerConfig)
    strategy: sections.StrategyConfig = field(default_factory=sections.StrategyConfig)
    run: sections.RunConfig = field(default_factory=sections.RunConfig)

    def __new__(cls, *values: Any, **given: Any) -> "TrainConfig":
        """Refuse unknown sections with a suggestion, before ``__init__`` raises TypeError."""
        _check_sections(_A_RUN, given)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, section in CLASSES.items():
            if not isinstance(getattr(self, name), section):
                raise ValueError(f"{name} is {getattr(self, name)!r}: it must be a {section.__name__}")
        self._check_needs()
        self._check_batches()
        if self.run.evaluate_on == "validation" and not self.data.num_validation:
            raise ValueError("run.evaluate_on is 'validation': set data.num_validation to the samples to hold out")
        self._check_strategy()

    def _check_needs(self) -> None:
        """Refuse fields that do nothing without another one."""
        optimizer, run, defaults = self.optimizer, self.run, SimpleNamespace(**CLASSES)
        recalibrates = run.evaluation_batch_norm == "recalibrate"
        of_statistics = "run.statistics_samples run.statistics_hessian run.escape_loss"
        for keys, needed, is_given in (
            ("optimizer.gamma", "a schedule that takes it", SCHEDULES.takes(optimizer.schedule, "gamma")),
            ("optimizer.warmup_start", "optimizer.warmup", optimizer.warmup),
            (of_statistics, "run.statistics_every", run.statistics_every),
            ("run.hessian_samples run.hessian_top", "run.hessian_every", run.hessian_every),
            ("run.recalibration_batches", "run.evaluation_batch_norm=recalibrate", recalibrates),
            ("run.target", "run.evaluate_every", run.evaluate_every),
        ):
            for key in () if is_given else keys.split():
                if (value := attrgetter(key)(self)) != attrgetter(key)(defaults):
                    raise ValueError(f"{key} is {value!r}: it does nothing without {needed}, set that or leave it out")

    def _check_batches(self) -> None:
        data, learners = self.data, self.strategy.learners
        multiple = f"a multiple of learners x accumulation, {learners} x {data.accumulation}"
        if data.batch_size % (learners * data.accumulation):
            raise ValueError(f"data.batch_size is {data.batch_size}: it must be {multiple}")
        for step, size in data.batch_growth:
            if size % (learners * data.accumulation):
                raise ValueError(f"data.batch_growth has the batch size {size}: it must be {multiple}")
            if self.run.steps is not None and step >= self.run.steps:
                raise ValueError(f"data.batch_growth has the step {step}: the run ends after {self.run.steps} steps")
        if data.learners_batch:
            check_sizes("data.learners_batch", data.learners_batch, data.batch_size, learners)
        sizes = "data.learners_batch" if data.learners_batch else "data.balance" if data.balance else ""
        uneven = data.sampler != SAMPLERS[0] or data.shards != SHARDS[0] or not data.drop_last or data.accumulation > 1
        if sizes and (uneven or data.batch_growth):
            needs = f"sampler {SAMPLERS[0]!r}, drop_last, {SHARDS[0]!r} shards and one backward pass a step"
            raise ValueError(f"{sizes} is set: it needs {needs}, without batch_growth")
        may_die = self.strategy.on_failure != ON_FAILURE[0] and self.strategy.on_failure
        for name, value, why in (
            ("model.compile", self.model.compile, "a compiled model has one batch size"),
            ("run.statistics_every", self.run.statistics_every, "a noise scale averages steps of one batch size"),
            ("strategy.on_failure", may_die, "ranks that die and join share batches of one size"),
        ):
            if (data.batch_growth or sizes) and value:
                first = sizes or "data.batch_growth"
                raise ValueError(f"{first} is set and {name} is {value!r}: {why}, leave one out")

    def _check_strategy(self) -> None:
        """Build the strategy, which checks the values of its options, and check what does not go together with it."""
        config, strategy = self.strategy, self.checked_strategy
        self._check_traits(strategy)
        of_speed = self._has_weights or self.data.balance
        if of_speed and "weights" not in STRATEGIES.options(config.name) and strategy.topology is None:
            key = "learners_batch" if self.data.learners_batch else "balance"
            raise ValueError(f"data.{key} is set: {strategy.name} averages all learners alike, take ssgd or dpsgd")
        if config.on_failure != ON_FAILURE[0]:
            self._check_shrink(strategy)
        mode = config.on_nonfinite
        if isinstance(strategy, Strategy):
            check_on_nonfinite(mode, strategy)
            check_group(strategy, config.learners)
        elif mode != "raise":
            raise ValueError(f"strategy.on_nonfinite is {mode!r}: {strategy.name} checks no gradients, leave it out")

    @property
    def _has_weights(self) -> bool:
        """Whether learners have batches of different size, so that averages weight them."""
        return len(set(self.data.learners_batch)) > 1

    def _check_traits(self, strategy: Strategy | Baseline) -> None:
        traits, run, learners = strategy.traits, self.run, self.strategy.learners
        every = f"run.statistics_every is {run.statistics_every}"
        if traits.most_learners is not None and learners > traits.most_learners:
            most = f"{strategy.name} trains at most {traits.most_learners}"
            raise ValueError(f"strategy.learners is {learners}: {most}, take the strategy ssgd for more")
        if run.statistics_every and learners == 1:
            raise ValueError(f"{every}: it needs at least two learners, set it to 0")
        if run.statistics_every and traits.group > 1:
            why = f"a group of {traits.group} leaves no learner's own gradient"
            raise ValueError(f"{every}: {why}, set 0 or leave group out")
        for name, value in (("statistics_every", run.statistics_every), ("hessian_every", run.hessian_every)):
            if value and traits.no_mean:
                raise ValueError(f"run.{name} is {value}: {traits.no_mean}, take ssgd or dpsgd, or set it to 0")

    def _check_shrink(self, strategy: Strategy | Baseline) -> None:
        data, needed = self.data, f"strategy.on_failure is {self.strategy.on_failure!r}: "
        if self.run.statistics_every or self.run.hessian_every:
            raise ValueError(f"{needed}statistics need a fixed number of ranks: leave them out")
        if data.sampler != SAMPLERS[0] or not data.drop_last:
            raise ValueError(f"{needed}samples are dealt again with sampler {SAMPLERS[0]!r} and drop_last: take these")
        if data.shards != SHARDS[0]:
            raise ValueError(f"{needed}it deals samples again, and shards is {data.shards!r}: take {SHARDS[0]!r}")
        check_deaths(strategy, self.strategy.learners)

    @cached_property
    def checked_strategy(self) -> Strategy | Baseline:
        """The strategy that was built first, for questions about it. A run trains with :meth:`make_strategy`."""
        self.__dict__["_is_new"] = True
        return self._build_strategy()

    def make_strategy(self) -> Strategy | Baseline:
        """A strategy for one run, with its topology: first :attr:`checked_strategy`, in later calls a new one."""
        first = self.checked_strategy
        return first if self.__dict__.pop("_is_new", False) else self._build_strategy()

    def _build_strategy(self) -> Strategy | Baseline:
        options = dict(self.strategy.options)
        if "seed" in STRATEGIES.options(self.strategy.name):
            options.setdefault("seed", self.run.seed)
        if self._has_weights and "weights" in STRATEGIES.options(self.strategy.name):
            options.setdefault("weights", self.data.learners_batch)
        return STRATEGIES.build(self.strategy.name, topology=self.make_topology(), **options)

    def make_topology(self) -> Topology:
        """A new topology. Raises ValueError if an option is wrong."""
        found = TOPOLOGIES.build(self.strategy.topology, seed=self.run.seed, **self.strategy.topology_options)
        return Weighted(found, self.data.learners_batch) if self._has_weights else found

    def __getstate__(self) -> dict[str, Any]:
        """The sections, without the strategy that was built from them."""
        return {name: getattr(self, name) for name in SECTIONS}

    def to_dict(self) -> dict[str, Any]:
        """All sections as plain tables, lists, numbers and text, for JSON and, without the None values, for TOML."""
        return {name: getattr(self, name).to_dict() for name in SECTIONS}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainConfig":
        """The config with these sections; a missing section or field has its default.

        A section is a table, or only the name of its part: ``{"model": "mlp", "run": {"epochs": 3}}``. A key that is
        not a field of the section is an option of its part. ValueError: a key is unknown (the message names the most
        similar one), or a value is wrong.
        """
        _check_sections(_A_RUN, values)
        sections: dict[str, Any] = {name: CLASSES[name](**CLASSES[name].arguments(one)) for name, one in values.items()}
        return cls(**sections)

    def overridden(self, overrides: Mapping[str, Any]) -> "TrainConfig":
        """This config with some fields changed, see :func:`merged`. Raises ValueError as :meth:`from_dict` does."""
        return TrainConfig.from_dict(merged(self.to_dict(), overrides))

    def difference(self, other: Mapping[str, Any]) -> list[str]:
        """The keys that differ from another config's :meth:`to_dict` and change results, as ``key is x, not y``.

        A field that ``other`` lacks, because it is older, has its default. A config of version 0.2 is converted.
        """
        mine, known, defaults = dotted(self.to_dict()), nested(other), _defaults()
        theirs = dotted({name: {**defaults[name], **known.get(name, {})} for name in SECTIONS})
        measured = {"data.learners_batch"} if self.data.balance and theirs["data.balance"] else set()
        compared = sorted({*mine, *theirs} - set(BOOKKEEPING) - measured)
        unlike = [name for name in compared if mine.get(name) != theirs.get(name)]
        return [f"{name} is {mine.get(name)!r}, not {theirs.get(name)!r}" for name in unlike]


def merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a config, or some of them, after overrides, which replace values key by key.

    If a part itself changes, its old options are dropped; the other fields of its section stay. ``run.steps`` replaces
    ``run.epochs``, and the other way round. A mapping among the options of a part is replaced as a whole. ValueError: a
    section is no table.
    """
    result = dict(values)
    for name, more in overrides.items():
        result[name] = _merged_section(CLASSES[name], values.get(name, {}), more) if name in CLASSES else more
    return result


def _merged_section(section: type[Section], values: Any, overrides: Any) -> dict[str, Any]:
    old, new = table_of(section, values), table_of(section, overrides)
    for part in section.PARTS:
        default = _defaults()[section.KEY][part]
        if part == "name":
            if new.get("name", was := old.get("name", default)) != was:
                old = {key: value for key, value in old.items() if key in section.PLAIN}
        elif part in new:
            before, after = (it if isinstance(it, Mapping) else {"name": it} for it in (old.get(part, {}), new[part]))
            was = before.get("name", default["name"])
            new[part] = {**(before if after.get("name", was) == was else {}), **after}
    if isinstance(old.get("policies"), Mapping) and isinstance(new.get("policies"), Mapping):
        new["policies"] = {**old["policies"], **new["policies"]}
    for key, other in (("epochs", "steps"), ("steps", "epochs")):
        if section is sections.RunConfig and new.get(key) is not None and other not in new:
            new[other] = None
    return {**old, **new}


@cache
def _defaults() -> dict[str, Any]:
    """The default of every field, as in a file."""
    defaults = TrainConfig(run=sections.RunConfig(epochs=1)).to_dict()
    return {**defaults, "run": {**defaults["run"], "epochs": None}}


def check_settings(values: Mapping[str, Any], what: str = "", others: Sequence[str] = ()) -> None:
    """Check some sections of a config by themselves: keys, types and ranges of their fields, without options of parts.

    ValueError: a section or field does not exist, or a value is not allowed. The message begins with ``what``, which
    has the sections, and may suggest one of ``others``.
    """
    _check_sections(what or _A_RUN, values, others)
    for name, table in values.items():
        section = CLASSES[name]
        items = {item.name: item for item in fields(section)}
        try:
            for key, value in section.arguments(table).items():
                spelled = key_of(section, key)
                check_value(spelled, typed(spelled, value, section.HINTS[key]), items[key])
        except ValueError as error:
            raise ValueError(f"{what}: {error}" if what else str(error)) from None


def _check_sections(what: str, keys: Iterable[str], others: Sequence[str] = ()) -> None:
    """ValueError unless all keys are sections; the message names the key that replaces one of version 0.2."""
    for key in keys:
        if key not in SECTIONS:
            new, ends = key_of_0_2(key), {one.rpartition(".")[2]: one for one, _ in describe_fields()}
            advice = f"write {new}" if new else suggest(key, (*SECTIONS, *others), ends)
            raise ValueError(f"{what} has no {key!r}: {advice}")


def describe_fields(word: str = "") -> list[tuple[str, str]]:
    """The key and the text of each field whose key or text has the word; all without a word."""
    items = [(section, item) for section in CLASSES.values() for item in fields(section) if item.name in section.PLAIN]
    found = [(key_of(section, item.name), described(item).replace("``", "")) for section, item in items]
    return [(key, text) for key, text in found if word.lower() in f"{key} {text}".lower()]


def check_samples(config: TrainConfig, dataset: Dataset) -> None:
    """ValueError: the training set is too small for statistics, Hessian or flatness, or no split can reach a target."""
    run, learners = config.run, config.strategy.learners
    if run.target is not None and run.evaluate_on not in dataset.splits():
        raise ValueError(f"run.target is {run.target}: {dataset.name} has no {run.evaluate_on} split, leave it out")
    for name, least in (("statistics_samples", learners), ("hessian_samples", learners), ("flatness_samples", 1)):
        if num := getattr(run, name):
            sections.random_samples(dataset, name, num, least, run.seed)
