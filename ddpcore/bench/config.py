"""The options of a bench as a frozen dataclass, and the choice of the values that depend on the machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from typing_extensions import override

from ddpcore.comm import Choice, choose_backend, choose_transport
from ddpcore.comm.connect import BACKENDS
from ddpcore.display.chart import PLOT, Plotted
from ddpcore.models import MODELS
from ddpcore.optim.registry import OPTIMIZERS
from ddpcore.options.command_line import SETTINGS
from ddpcore.options.fields import field, get, parse_settings
from ddpcore.options.typed import suggest
from ddpcore.strategies.base import Baseline, Plan, Strategy, Traits, check_on_nonfinite, check_transport
from ddpcore.strategies.registry import STRATEGIES, is_baseline
from ddpcore.topology.base import Topology
from ddpcore.training import TrainConfig
from ddpcore.training.config import check_settings, merged
from ddpcore.training.sections import CLASSES, DataConfig, StrategyConfig

DEFAULT_STRATEGIES = ("ddp", "ssgd", "dpsgd", "local_sgd")
# What differs from the defaults of a TrainConfig, in all benches and in benches of large models.
DEFAULTS = {
    "model": {"name": "mlp"},
    "data": {"batch_size": 256},
    "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
    "run": {"steps": 300},
}
LARGE = {**DEFAULTS, "model": {"name": "resnet18"}, "data": {"name": "synthetic", "batch_size": 32}}
SILENT = "ddpcore.bench.config:Silent"  # a name of the registry
_SET_ELSEWHERE = {
    "name": "use --strategies", "learners": "use --world-size",
    "on_failure": "a bench compares ranks that stay, leave it out",
}  # fmt: skip
_OF_RUN = ("steps", "seed", "device")  # the fields of the section run that a bench uses
_OF_RANKS = ("transport", "link", "learners")  # of the section strategy, see ResolvedConfig


class Silent(Strategy):
    """Every learner steps alone, with the hooks and the optimizer of ddpcore. Nothing is sent."""

    name: ClassVar[str] = "silent"
    traits: ClassVar[Traits] = Traits(quarantines=True)  # in an average that never comes

    def __init__(self, topology: Topology | None = None) -> None:
        self.topology = topology  # of the run; nobody averages over it

    @override
    def plan(self, step: int) -> Plan:
        return Plan(weights=False)


@dataclass(frozen=True, kw_only=True)
class Options(Plotted):
    """Options of a command. The docstring of a subclass is the description of its command.

    The constructor checks all that can be checked before data are read and ranks start. ValueError, in one line, gives
    the reason and what to do.
    """

    json: Path | None = field(None, "write the result to this file", is_file=True)
    plot: Path | None = PLOT
    wide: bool = field(False, "print all columns, also those that do not fit the terminal")


@dataclass(frozen=True, kw_only=True)
class BenchConfig(Options):
    """Train one model with several strategies, interleaved, and print the speed and the loss of each.

    KEY=VALUE describes the training, as in `ddpcore train`. An option of a strategy goes to those that have it.
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = DEFAULTS
    EXAMPLE: ClassVar[str] = "ddpcore bench --world-size 4 --strategies ddp,ssgd,dpsgd strategy.topology=ring"

    settings: Sequence[str] = SETTINGS
    world_size: int | None = field(None, "number of learners (4, or torchrun's)", least=1)
    strategies: tuple[str, ...] | None = field(None, f"with commas ({','.join(DEFAULT_STRATEGIES)})", parts=STRATEGIES)
    backend: str = field("auto", choices=BACKENDS)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.strategies or DEFAULT_STRATEGIES:
            self.train_config(name)

    @cached_property
    def values(self) -> dict[str, Any]:
        """The sections of the training, ``strategy`` with the options of all. ValueError: a setting is wrong."""
        given = parse_settings(self.settings)
        check_settings(given)
        values = merged(self.DEFAULTS, given)
        for name, advice in _SET_ELSEWHERE.items():
            if name in values.get("strategy", ()):
                raise ValueError(f"strategy.{name} is set: {advice}")
        for name in values["run"]:
            if name not in _OF_RUN and values["run"][name] is not None:
                raise ValueError(f"run.{name} is set: a bench uses {', '.join(_OF_RUN)} of a run alone, leave it out")
        strategies = self.strategies or DEFAULT_STRATEGIES
        options = [option for name in strategies for option in STRATEGIES.options(name)]
        for key in values.get("strategy", ()):
            if key not in (*options, *StrategyConfig.PLAIN):
                unknown = f"no strategy of {', '.join(strategies)} has the option {key!r}"
                raise ValueError(f"{unknown}: {suggest(key, options)}")
        if "name" not in values["data"]:
            spec = MODELS.spec(values["model"]["name"])
            takes_digits = spec.fits((1, 8, 8)) and all(key in DataConfig.PLAIN for key in values["data"])
            name = "python_text" if spec.tokens else "digits" if takes_digits else "synthetic"
            values["data"] = {**values["data"], "name": name}
        return values

    def value(self, key: str) -> Any:
        """The value of a setting, such as ``run.device``, or its default."""
        found = get(self.values, key)
        section, _, name = key.partition(".")
        return getattr(CLASSES[section], name) if found is None else found

    def train_config(
        self,
        strategy: str,
        here: Mapping[str, Any] | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        batch_size: int | None = None,
    ) -> TrainConfig:
        """The config of the training run of one strategy.

        Baselines use the optimizer of torch, as users of torch do. The other strategies use the one of ddpcore.

        ``here`` has fields that depend on the machine, by section. ``options`` are added to the settings' options of
        the strategy, and ``batch_size`` replaces the settings' size. ValueError: the settings do not fit together.
        """
        without_us = is_baseline(strategy)
        of_all, fields = self.values.get("strategy", {}), StrategyConfig.PLAIN
        left_out = (*_OF_RANKS, *(("on_nonfinite", "policies") if without_us else ()))
        own = {key: value for key, value in of_all.items() if key in fields and key not in left_out}
        known = STRATEGIES.options(strategy)
        options = {**{key: value for key, value in of_all.items() if key in known}, **(options or {})}
        optimizer = self.values["optimizer"]
        if without_us and f"torch_{optimizer['name']}" in OPTIMIZERS.names():
            optimizer = {**optimizer, "name": f"torch_{optimizer['name']}", "fused": True}
        values = {**self.values, "optimizer": optimizer, "strategy": {**own, **options, "name": strategy}}
        data: dict[str, Any] = {}
        if batch_size is not None:
            whole, growth = self.value("data.batch_size"), self.value("data.batch_growth")
            data = {"batch_size": batch_size, "batch_growth": [(at, size * batch_size // whole) for at, size in growth]}
        if (here or {}).get("strategy", {}).get("learners", 1) == 1 or batch_size is not None:
            data |= {"learners_batch": (), "balance": False}  # of one learner
        return TrainConfig.from_dict(merged(merged(values, here or {}), {"data": data}))

    def strategy(self, name: str) -> Strategy | Baseline:
        """The strategy of this name with its options, for questions about it. No run trains with it."""
        return self.train_config(name).checked_strategy


@dataclass(frozen=True)
class ResolvedConfig:
    """A config with all values that depend on the machine. It is the same on every rank."""

    config: BenchConfig
    world_size: int
    strategies: tuple[str, ...]
    device: str
    choice: Choice
    transport: Choice | None  #: None for virtual learners
    notes: tuple[str, ...]  #: lines to print above the table

    @property
    def is_virtual(self) -> bool:
        """Whether one process holds all learners."""
        return self.choice.name == "virtual"

    @property
    def transport_name(self) -> str | None:
        """One of ``TRANSPORTS`` other than ``auto``; None for virtual learners."""
        return None if self.transport is None else self.transport.name

    @cached_property
    def training(self) -> TrainConfig:
        """What all strategies have in common, as the config of learners that average nothing."""
        return self.train_config(SILENT)

    def is_alone(self, strategy: str) -> bool:
        """Whether it trains one learner, on the whole batch, so that all ranks but the first are idle."""
        return self.config.strategy(strategy).traits.most_learners == 1

    @property
    def num_steps(self) -> int:
        """The steps of each strategy."""
        return self.config.value("run.steps")

    def train_config(
        self, strategy: str, *, options: Mapping[str, Any] | None = None, batch_size: int | None = None
    ) -> TrainConfig:
        """The config of the training run of one strategy here. ValueError as :meth:`BenchConfig.train_config`."""
        here: dict[str, Any] = {"learners": 1 if self.is_alone(strategy) else self.world_size}
        if not is_baseline(strategy):
            here |= {"link": self.config.value("strategy.link"), "transport": self.transport_name or "auto"}
        sections = {"strategy": here, "run": {"device": self.device}}
        return self.config.train_config(strategy, sections, options=options, batch_size=batch_size)


def resolve_device(device: str, num_gpus: int, before: str = "--device ") -> str:
    """``cpu`` or ``cuda``, which ``auto`` is where there is a GPU. ValueError: there is none for cuda.

    ``before`` is how a user writes the option.
    """
    if device == "cuda" and not num_gpus:
        raise ValueError(f"{before}cuda: torch {torch.__version__} sees no GPU: use {before}cpu")
    return ("cuda" if num_gpus else "cpu") if device == "auto" else device


def resolve(config: BenchConfig, *, world_size: int, num_gpus: int, num_hosts: int = 1) -> ResolvedConfig:
    """Choose the device, the connection and the strategies.

    ValueError: the topology does not fit the world size, or this machine lacks a requested device or connection.
    """
    device = resolve_device(config.value("run.device"), num_gpus, "run.device=")
    wanted = config.value("strategy.transport")
    choice = choose_backend(config.backend, world_size=world_size, device=device, num_gpus=num_gpus)
    if choice.name == "gloo" and device == "cuda" and num_gpus < world_size:
        raise ValueError(f"--backend gloo: {world_size} ranks would share {num_gpus} GPU: use --backend virtual")
    transport = None
    if choice.name != "virtual":
        transport = choose_transport(wanted, world_size=world_size, device=device, num_hosts=num_hosts)
    elif wanted != "auto":
        raise ValueError(f"strategy.transport={wanted} is for real ranks: leave it out, or use --backend gloo")
    config.train_config(SILENT).make_topology().validate(world_size)
    chosen, notes = config.strategies or DEFAULT_STRATEGIES, []
    if world_size == 1:
        notes.append("one learner: no strategy averages anything; take --world-size 2 or more")
    if choice.name == "virtual":
        of_ranks = [name for name in chosen if "virtual" not in config.strategy(name).traits.transports]
        if of_ranks and config.strategies is not None:
            advice = "leave it out of --strategies, or use --backend gloo or nccl"
            raise ValueError(f"{of_ranks[0]} needs real ranks: {advice}")
        chosen = tuple(name for name in chosen if name not in of_ranks)
        notes += [f"{name} needs real ranks and is left out: the ratio to it is unknown" for name in of_ranks]
    for name in chosen:
        of_speed = config.value("data.learners_batch") or config.value("data.balance")
        is_spread = of_speed and config.strategy(name).traits.most_learners != 1
        here = {"strategy": {"learners": world_size}} if is_spread else None
        strategy = config.train_config(name, here).make_strategy()
        if isinstance(strategy, Strategy):
            if world_size > 1:
                check_transport(strategy, "virtual" if transport is None else transport.name)
            strategy.setup(world_size, torch.float32)
            check_on_nonfinite(config.value("strategy.on_nonfinite"), strategy, world_size)
    return ResolvedConfig(config, world_size, chosen, device, choice, transport, tuple(notes))
