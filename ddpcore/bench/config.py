"""What the bench runs, as one frozen value; the command line is made from its fields."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

import torch

from ddpcore import data, models, strategies, topology
from ddpcore.bench import command_line
from ddpcore.bench.command_line import BOOLEAN, check_choice, check_names, check_writable, flag, names, option, settings
from ddpcore.comm import Choice, Transport, choose_backend, choose_transport
from ddpcore.comm.choice import BACKENDS, TRANSPORTS
from ddpcore.compression import CODECS
from ddpcore.data import ShardedBatches
from ddpcore.engine.kinds import typed
from ddpcore.strategies import Baseline, Strategy

TOPOLOGIES = topology.names()
ORDERS = strategies.ORDERS
COMPRESSIONS = ("none", *CODECS)
DEVICES = ("auto", "cpu", "cuda")
STRATEGIES = ("ddp", "ssgd", "dpsgd", "local_sgd")  # where none are named


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """A bench run. Constructing one checks everything that can be known before data are read.

    Raises:
        ValueError: one line that says what is wrong and what to do.
    """

    world_size: int | None = option(None, "number of learners (4, or torchrun's)", type=int)
    strategies: tuple[str, ...] | None = option(
        None,
        f"comma-separated, of {','.join(strategies.names())} ({','.join(STRATEGIES)})",
        metavar="A,B,...",
        type=names,
    )
    topology: str = option("random_pair", f"of dpsgd, slowmo and push_sum, who meets whom: {', '.join(TOPOLOGIES)}")
    order: str = option(ORDERS[0], f"of dpsgd: {', '.join(ORDERS)}")
    staleness: int = option(0, "of dpsgd: 1 lets an exchange take a further step", type=int)
    compression: str = option("none", f"of dpsgd's messages: {', '.join(COMPRESSIONS)}")
    noise_std: float = option(0.01, "of noisy_ssgd", type=float)
    local_size: int = option(2, "learners a host, of --topology hierarchical", type=int)
    model: str = option("simplenet", ", ".join(models.names()))
    model_options: dict[str, Any] | None = option(
        None, "options of the model, such as hidden=2048x2048 of mlp", type=settings, metavar="KEY=VALUE,..."
    )
    dataset: str = option("synthetic", ", ".join(data.names()))
    dataset_options: dict[str, Any] | None = option(
        None,
        "options of the data set, such as num_frames=7 of synthetic_speech",
        type=settings,
        metavar="KEY=VALUE,...",
    )
    data_dir: Path | None = option(None, "folder that holds MNIST/raw, cifar-10-batches-py or the like", type=Path)
    download: bool = option(False, "fetch missing files into --data-dir first", action=BOOLEAN)
    normalize: bool = option(False, "images to mean 0 and std 1 a channel", action=BOOLEAN)
    augment: bool = option(False, "random crops, and flips but for digits", action=BOOLEAN)
    batch_size: int = option(256, "global, over all learners", type=int)
    lr: float = option(0.05, "learning rate", type=float)
    momentum: float = option(0.9, "momentum", type=float)
    period: int = option(8, "steps between two averages in local_sgd and slowmo", type=int)
    steps: int = option(300, "steps of each strategy", type=int)
    seed: int = option(0, "of weights, batches and pairs", type=int)
    device: str = option("auto", ", ".join(DEVICES))
    backend: str = option("auto", ", ".join(BACKENDS))
    transport: str = option("auto", f"what carries bytes between ranks: {', '.join(TRANSPORTS)}")
    json: Path | None = option(None, "write the result to this file", type=Path, metavar="FILE")

    def __post_init__(self) -> None:
        for name in ("world_size", "batch_size", "steps", "period", "local_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{flag(name)} is {value}: it must be at least 1")
        for name in ("lr", "momentum", "noise_std"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{flag(name)} is {value}: it must be a number of at least 0")
        if not 0 <= self.seed < 2**62:
            raise ValueError(f"--seed is {self.seed}: it must be at least 0 and below 2^62")
        for name, allowed in (
            ("topology", TOPOLOGIES),
            ("compression", COMPRESSIONS),
            ("model", models.names()),
            ("dataset", data.names()),
            ("device", DEVICES),
            ("backend", BACKENDS),
            ("transport", TRANSPORTS),
        ):
            check_choice(name, getattr(self, name), allowed)
        if self.strategies is not None:
            check_names("strategies", self.strategies, strategies.names(), "strategy")
        for name in (*(self.strategies or STRATEGIES), strategies.DPSGD.name):  # whose options have flags
            self.strategy(name)
        model_hints = {key: hint_of(default) for key, default in models.spec(self.model).options.items()}
        for name, hints in (("model_options", model_hints), ("dataset_options", data.option_types(self.dataset))):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, fitted(flag(name), getattr(self, name), hints))
        if self.json is not None:
            check_writable(self.json.resolve())

    def strategy(self, name: str) -> Strategy | Baseline:
        """A new strategy of that name, with the options of this run.

        Raises:
            ValueError: its options do not go together.
        """
        given = {
            "period": self.period,
            "order": self.order,
            "staleness": self.staleness,
            "compression": self.compression,
            "std": self.noise_std,
            "seed": self.seed,
        }
        known = strategies.options(name)
        return strategies.build(
            name,
            topology=topology.build(self.topology, self.seed, self.local_size),
            **{option: value for option, value in given.items() if option in known},
        )


def hint_of(default: Any) -> Any:
    """The kind of value that an option of a model with this default takes; lists are of whole numbers."""
    return tuple[int, ...] if isinstance(default, tuple) else type(default)


def fitted(name: str, given: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """Options as their hints hold them; on the command line one number may stand for a list of one. What has no hint is
    left to be refused by what it is no option of.

    Raises:
        ValueError: a value is of another kind.
    """
    found = {}
    for key, value in given.items():
        is_alone = get_origin(hints.get(key)) is tuple and type(value) in (int, float)
        value = (value,) if is_alone else value
        found[key] = typed(f"{name} {key}", value, hints[key]) if key in hints else value
    return found


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A config made definite on this machine: what every rank is given."""

    config: BenchConfig
    world_size: int
    strategies: tuple[str, ...]
    device: str
    choice: Choice
    transport: Transport | None  # None of virtual learners
    notes: tuple[str, ...]


def resolve(config: BenchConfig, *, world_size: int, num_gpus: int, num_hosts: int = 1) -> Plan:
    """Settle the device, the connection and the strategies, and check that topology and batch fit the world.

    Raises:
        ValueError: they do not fit, or what was requested is not on this machine.
    """
    device = config.device
    if device == "auto":
        device = "cuda" if num_gpus else "cpu"
    if device == "cuda" and not num_gpus:
        raise ValueError("--device cuda: torch sees no GPU: use --device cpu")
    choice = choose_backend(config.backend, world_size=world_size, device=device, num_gpus=num_gpus)
    if choice.backend == "gloo" and device == "cuda" and num_gpus < world_size:
        raise ValueError(f"--backend gloo: {world_size} ranks would share {num_gpus} GPU: use --backend virtual")
    transport = None
    if choice.backend != "virtual":
        transport = choose_transport(config.transport, world_size=world_size, device=device, num_hosts=num_hosts)
    elif config.transport != "auto":
        raise ValueError(f"--transport {config.transport} is for real ranks: leave it out, or use --backend gloo")
    topology.build(config.topology, config.seed, config.local_size).validate(world_size)
    chosen = config.strategies or STRATEGIES
    notes = []
    if choice.backend == "virtual" and "ddp" in chosen:
        if config.strategies is not None:
            raise ValueError("ddp needs real ranks: leave it out of --strategies, or use --backend gloo or nccl")
        chosen = tuple(name for name in chosen if name != "ddp")
        notes.append("ddp needs real ranks and is left out: its ratio is not known")
    for name in chosen:
        strategy = config.strategy(name)
        if isinstance(strategy, Strategy):
            strategy.setup(world_size, torch.float32)
    # A sample count no smaller than the batch: this checks the batch against the world only.
    ShardedBatches(config.batch_size, config.batch_size, world_size, config.seed)
    return Plan(
        config=config,
        world_size=world_size,
        strategies=chosen,
        device=device,
        choice=choice,
        transport=transport,
        notes=tuple(notes),
    )


def parse(argv: Sequence[str] | None = None) -> BenchConfig:
    """The config that the command line says.

    Raises:
        ValueError: it says none; the message is one line.
    """
    return command_line.parse(
        BenchConfig,
        argv,
        prog="python -m ddpcore.bench",
        description="Train one model with several strategies, interleaved, and print what each costs and reaches.",
        epilog="Further benches, each with its own --help: "
        "python -m ddpcore.bench buckets|comm|optim|predict|stats|topology",
    )
