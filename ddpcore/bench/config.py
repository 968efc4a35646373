"""The options of a bench as a frozen dataclass, and the choice of the values that depend on the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

import torch

from ddpcore.comm import Choice, Transport, choose_backend, choose_transport
from ddpcore.comm.choice import BACKENDS, TRANSPORTS
from ddpcore.comm.membership import ON_FAILURE
from ddpcore.data import DATASETS
from ddpcore.display.plot_option import PLOT, check_plot
from ddpcore.models import MODELS
from ddpcore.options.command_line import SEED_RANGE, check, flag, option
from ddpcore.options.typed import typed
from ddpcore.runtime.launch import MOST_SECONDS, TIMEOUT_SECONDS
from ddpcore.strategies.base import Strategy, check_on_nonfinite, check_transport
from ddpcore.strategies.baselines import DDP, Single
from ddpcore.strategies.compression import CODECS
from ddpcore.strategies.dpsgd import DPSGD, ORDERS
from ddpcore.strategies.nonfinite import ON_NONFINITE
from ddpcore.strategies.registry import STRATEGIES
from ddpcore.topology.registry import TOPOLOGIES
from ddpcore.training import TrainConfig
from ddpcore.training.config import DEVICES

DEFAULT_STRATEGIES = ("ddp", "ssgd", "dpsgd", "local_sgd")
BASELINES = (Single.name, DDP.name)
SHARED = (  # fields of BenchConfig that TrainConfig also has
    "model", "dataset", "data_dir", "download", "normalize", "augment", "batch_size", "steps", "lr", "topology", "seed",
    "timeout",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a command. The docstring of a subclass is the description of its command.

    The constructor checks everything that can be checked before data are read and ranks are started.

    Raises:
        ValueError: an option is wrong; the message is one line that gives the reason and what to do.
    """

    json: Path | None = option(None, "write the result to this file", is_file=True)
    plot: Path | None = PLOT
    wide: bool = option(False, "print all columns, also those that do not fit the terminal")

    def __post_init__(self) -> None:
        check(self)
        check_plot(self.plot)


@dataclass(frozen=True, kw_only=True)
class BenchConfig(Options):
    """Train one model with several strategies, interleaved, and print the speed and the loss of each."""

    EXAMPLE = "python -m ddpcore.bench --world-size 4 --strategies ddp,ssgd,dpsgd --topology ring"

    world_size: int | None = option(None, "number of learners (4, or torchrun's)", least=1)
    strategies: tuple[str, ...] | None = option(
        None, f"comma-separated ({','.join(DEFAULT_STRATEGIES)})", parts=STRATEGIES
    )
    topology: str = option("random_pair", "of strategies with neighbours, such as dpsgd", parts=TOPOLOGIES)
    order: str = option(ORDERS[0], "of dpsgd", choices=ORDERS)
    staleness: int = option(0, "of dpsgd: 1 lets an exchange take one more step")
    compression: str = option("none", "of dpsgd's messages", choices=("none", *CODECS))
    noise_std: float = option(0.01, "of noisy_ssgd", least=0)
    local_size: int = option(2, "learners on each host, of --topology hierarchical", least=1)
    model: str = option("mlp", parts=MODELS)
    model_options: dict[str, Any] | None = option(None, "options of the model, such as hidden=2048x2048 of mlp")
    dataset: str = option(
        None, "(digits, or synthetic if the model does not take them; python_text for tokens)", parts=DATASETS
    )
    dataset_options: dict[str, Any] | None = option(
        None, "options of the data set, such as num_frames=7 of synthetic_speech"
    )
    data_dir: Path | None = option(None, "folder that holds MNIST/raw, cifar-10-batches-py or the like")
    download: bool = option(False, "fetch missing files into --data-dir first")
    normalize: bool = option(False, "images to mean 0 and std 1 in each channel")
    augment: bool = option(False, "random crops, and random flips unless the images are digits")
    batch_size: int = option(256, "global, over all learners", least=1)
    optimizer: str = option("sgd", "FusedSGD or FusedAdamW; torch's for ddp and single", choices=("sgd", "adamw"))
    lr: float = option(0.05, "learning rate", least=0)
    momentum: float = option(0.9, "of sgd", least=0)
    period: int = option(8, "steps between two averages in local_sgd and slowmo", least=1)
    steps: int = option(300, "steps of each strategy", least=1)
    on_nonfinite: str = option(
        ON_NONFINITE[0],
        "a gradient that is not finite ends a strategy as diverged, or is left out; not of ddp and single",
        choices=ON_NONFINITE,
    )
    on_failure: str = option(
        ON_FAILURE[0],
        "when a rank dies: end all ranks, or go on with the others; not of ddp and single",
        choices=ON_FAILURE,
    )
    seed: int = option(0, "of weights, batches and pairs", **SEED_RANGE)
    device: str = option("auto", choices=DEVICES)
    backend: str = option("auto", choices=BACKENDS)
    transport: str = option("auto", "how bytes are sent between ranks", choices=TRANSPORTS)
    timeout: float = option(
        TIMEOUT_SECONDS, "seconds that a living rank may let the others wait", above=0, most=MOST_SECONDS
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset is None:
            spec = MODELS.spec(self.model)
            takes_digits = spec.fits((1, 8, 8)) and not self.dataset_options
            default = "python_text" if spec.tokens else "digits" if takes_digits else "synthetic"
            object.__setattr__(self, "dataset", default)
        model_hints, dataset_hints = MODELS.hints(self.model), DATASETS.hints(self.dataset)
        for name, hints in (("model_options", model_hints), ("dataset_options", dataset_hints)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, fitted(flag(name), getattr(self, name), hints))
        # dpsgd is always checked, because the command line has options of it.
        for name in (*(self.strategies or DEFAULT_STRATEGIES), DPSGD.name):
            self.train_config(name)

    def train_config(self, strategy: str, **more: Any) -> TrainConfig:
        """The config of the training run of one strategy.

        Baselines use the optimizer of torch, as users of torch do. The other strategies use the one of ddpcore.

        Args:
            strategy: name of the strategy.
            more: fields that depend on the machine, such as ``learners``.

        Raises:
            ValueError: the options do not fit together.
        """
        values = {"period": self.period, "std": self.noise_std}
        if strategy == DPSGD.name:  # other strategies may have options of these names
            values |= {name: getattr(self, name) for name in ("order", "staleness", "compression")}
        known = STRATEGIES.options(strategy)
        is_baseline = strategy in BASELINES
        momentum = {"momentum": self.momentum} if self.optimizer == "sgd" else {}
        has_hosts = TOPOLOGIES.takes(self.topology, "local_size")
        fields = {
            **{name: getattr(self, name) for name in SHARED},
            "model_options": self.model_options or {},
            "dataset_options": self.dataset_options or {},
            "optimizer": f"torch_{self.optimizer}" if is_baseline else self.optimizer,
            "optimizer_options": {**momentum, **({"fused": True} if is_baseline else {})},
            "strategy": strategy,
            "strategy_options": {name: value for name, value in values.items() if name in known},
            "on_nonfinite": "raise" if is_baseline else self.on_nonfinite,
            "topology_options": {"local_size": self.local_size} if has_hosts else {},
        }
        return TrainConfig(**{**fields, **more})


def fitted(name: str, given: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """The given options, converted to the types of their hints.

    If the hint is a tuple, a single number becomes a tuple of one number. Options without a hint are returned
    unchanged; the builder rejects unknown options.

    Raises:
        ValueError: a value does not have the type of its hint.
    """
    found = dict(given)
    for key, value in given.items():
        if key in hints:
            is_single = get_origin(hints[key]) is tuple and type(value) in (int, float)
            found[key] = typed(f"{name} {key}", (value,) if is_single else value, hints[key])
    return found


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """A config with all values that depend on the machine. It is the same on every rank.

    Attributes:
        transport: None for virtual learners.
        notes: lines to print above the table.
    """

    config: BenchConfig
    world_size: int
    strategies: tuple[str, ...]
    device: str
    choice: Choice
    transport: Transport | None
    notes: tuple[str, ...]

    @property
    def is_virtual(self) -> bool:
        """Whether one process holds all learners."""
        return self.choice.backend == "virtual"

    @property
    def transport_name(self) -> str | None:
        """One of ``TRANSPORTS`` other than ``auto``; None for virtual learners."""
        return None if self.transport is None else self.transport.name

    def train_config(self, strategy: str, **more: Any) -> TrainConfig:
        """The config of the training run of one strategy on this machine; ``more`` are further fields.

        Raises:
            ValueError: see :meth:`BenchConfig.train_config`.
        """
        learners = 1 if strategy == Single.name else self.world_size
        transport = "auto" if strategy in BASELINES else self.transport_name or "auto"
        on_failure = ON_FAILURE[0] if strategy in BASELINES else self.config.on_failure
        here = {"learners": learners, "device": self.device, "transport": transport, "on_failure": on_failure}
        return self.config.train_config(strategy, **{**here, **more})


def resolve_device(device: str, num_gpus: int) -> str:
    """``cpu`` or ``cuda``; for ``auto`` it is ``cuda`` if there is a GPU, else ``cpu``.

    Raises:
        ValueError: cuda was requested and there is no GPU.
    """
    if device == "cuda" and not num_gpus:
        raise ValueError(f"--device cuda: torch {torch.__version__} sees no GPU: use --device cpu")
    return ("cuda" if num_gpus else "cpu") if device == "auto" else device


def resolve(config: BenchConfig, *, world_size: int, num_gpus: int, num_hosts: int = 1) -> ResolvedConfig:
    """Choose the device, the connection and the strategies, and check that the topology fits the world size.

    Raises:
        ValueError: the topology does not fit, or this machine lacks a requested device or connection.
    """
    device = resolve_device(config.device, num_gpus)
    choice = choose_backend(config.backend, world_size=world_size, device=device, num_gpus=num_gpus)
    if choice.backend == "gloo" and device == "cuda" and num_gpus < world_size:
        raise ValueError(f"--backend gloo: {world_size} ranks would share {num_gpus} GPU: use --backend virtual")
    transport = None
    if choice.backend != "virtual":
        may_die = config.on_failure != ON_FAILURE[0]
        transport = choose_transport(
            config.transport, world_size=world_size, device=device, num_hosts=num_hosts, may_die=may_die
        )
    elif config.transport != "auto":
        raise ValueError(f"--transport {config.transport} is for real ranks: leave it out, or use --backend gloo")
    config.train_config(DPSGD.name).make_topology().validate(world_size)
    chosen, notes = config.strategies or DEFAULT_STRATEGIES, []
    if world_size == 1:
        notes.append("one learner: no strategy averages anything; take --world-size 2 or more")
    if choice.backend == "virtual" and DDP.name in chosen:
        if config.strategies is not None:
            raise ValueError("ddp needs real ranks: leave it out of --strategies, or use --backend gloo or nccl")
        chosen = tuple(name for name in chosen if name != DDP.name)
        notes.append("ddp needs real ranks and is left out: the ratio to it is unknown")
    if config.on_failure != ON_FAILURE[0]:
        chosen = _that_go_on(config, choice, chosen, notes)
    for name in chosen:
        strategy = config.train_config(name).make_strategy()
        if isinstance(strategy, Strategy):
            if world_size > 1:
                check_transport(strategy, "virtual" if transport is None else transport.name)
            strategy.setup(world_size, torch.float32)
            check_on_nonfinite(config.on_nonfinite, strategy, world_size)
    resolved = ResolvedConfig(
        config=config,
        world_size=world_size,
        strategies=chosen,
        device=device,
        choice=choice,
        transport=transport,
        notes=tuple(notes),
    )
    if config.on_failure != ON_FAILURE[0]:
        for name in chosen:
            resolved.train_config(name)  # refuses what cannot go on without a rank
    return resolved


def _that_go_on(config: BenchConfig, choice: Choice, chosen: tuple[str, ...], notes: list[str]) -> tuple[str, ...]:
    """The strategies that go on when a rank dies.

    Raises:
        ValueError: there are no ranks, or a strategy was requested that ends.
    """
    if choice.backend == "virtual":
        raise ValueError("--on-failure shrink is for real ranks, and these learners are virtual: leave it out")
    if config.strategies is not None and (ends := [name for name in chosen if name in BASELINES]):
        raise ValueError(f"--on-failure shrink: {ends[0]} ends when a rank dies, leave it out of --strategies")
    if config.strategies is None:
        notes.append("ddp ends when a rank dies and is left out: the ratio to it is unknown")
    return tuple(name for name in chosen if name not in BASELINES)
