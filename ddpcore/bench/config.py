"""What the bench runs, as one frozen value; the command line is made from its fields."""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from ddpcore import data, models, strategies, topology
from ddpcore.comm import choose_backend
from ddpcore.comm.choice import BACKENDS, Choice
from ddpcore.data import ShardedBatches

TOPOLOGIES = topology.names()
DEVICES = ("auto", "cpu", "cuda")


def _option(default: Any, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """A bench run. Constructing one checks everything that can be known before data are read.

    Raises:
        ValueError: one line that says what is wrong and what to do.
    """

    world_size: int | None = _option(None, "number of learners (4, or torchrun's)", type=int)
    strategies: tuple[str, ...] | None = _option(
        None, f"comma-separated, of {','.join(strategies.names())} (ddp,ssgd,dpsgd,local_sgd)", metavar="A,B,..."
    )
    topology: str = _option("random_pair", f"who averages with whom in dpsgd: {', '.join(TOPOLOGIES)}")
    model: str = _option("simplenet", ", ".join(models.names()))
    dataset: str = _option("synthetic", ", ".join(data.names()))
    data_dir: Path | None = _option(None, "folder that holds MNIST/raw", type=Path)
    batch_size: int = _option(256, "global, over all learners", type=int)
    lr: float = _option(0.05, "learning rate", type=float)
    momentum: float = _option(0.9, "momentum", type=float)
    period: int = _option(8, "steps between two averages in local_sgd", type=int)
    steps: int = _option(300, "steps of each strategy", type=int)
    seed: int = _option(0, "of weights, batches and pairs", type=int)
    device: str = _option("auto", ", ".join(DEVICES))
    backend: str = _option("auto", ", ".join(BACKENDS))
    json: Path | None = _option(None, "write the result to this file", type=Path, metavar="FILE")

    def __post_init__(self) -> None:
        for name in ("world_size", "batch_size", "steps", "period"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{_flag(name)} is {value}: it must be at least 1")
        for name in ("lr", "momentum"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{_flag(name)} is {value}: it must be a number of at least 0")
        if not 0 <= self.seed < 2**62:
            raise ValueError(f"--seed is {self.seed}: it must be at least 0 and below 2^62")
        for name, allowed in (
            ("topology", TOPOLOGIES),
            ("model", models.names()),
            ("dataset", data.names()),
            ("device", DEVICES),
            ("backend", BACKENDS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"unknown {_flag(name)} {getattr(self, name)!r}: choose from {', '.join(allowed)}")
        for name in self.strategies or ():
            if name not in strategies.names():
                raise ValueError(f"unknown strategy {name!r}: choose from {', '.join(strategies.names())}")
        if self.strategies is not None and len(set(self.strategies)) != len(self.strategies):
            raise ValueError("--strategies names one twice: name each once")
        if self.strategies == ():
            raise ValueError(f"--strategies is empty: choose from {', '.join(strategies.names())}")
        if self.json is not None:
            _check_writable(self.json.resolve())


def _check_writable(path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"--json: {path} is a folder: name a file")
    if not path.parent.is_dir():
        raise ValueError(f"--json: the folder {path.parent} does not exist: make it first")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"--json: cannot write into {path.parent} ({error.strerror}): name another file") from None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A config made definite on this machine: what every rank is given."""

    config: BenchConfig
    world_size: int
    strategies: tuple[str, ...]
    device: str
    choice: Choice
    notes: tuple[str, ...]


def resolve(config: BenchConfig, *, world_size: int, num_gpus: int) -> Plan:
    """Settle the device, the backend and the strategies, and check that topology and batch fit the world.

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
    topology.build(config.topology, config.seed).validate(world_size)
    chosen = config.strategies or ("ddp", "ssgd", "dpsgd", "local_sgd")
    notes = []
    if choice.backend == "virtual" and "ddp" in chosen:
        if config.strategies is not None:
            raise ValueError("ddp needs real ranks: leave it out of --strategies, or use --backend gloo or nccl")
        chosen = tuple(name for name in chosen if name != "ddp")
        notes.append("ddp needs real ranks and is left out: its ratio is not known")
    # A sample count no smaller than the batch: this checks the batch against the world only.
    ShardedBatches(config.batch_size, config.batch_size, world_size, config.seed)
    return Plan(
        config=config, world_size=world_size, strategies=chosen, device=device, choice=choice, notes=tuple(notes)
    )


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see --help)")


def parse(argv: Sequence[str] | None = None) -> BenchConfig:
    """The config that the command line says.

    Raises:
        ValueError: it says none; the message is one line.
    """
    parser = _Parser(
        prog="python -m ddpcore.bench",
        description="Train one model with several strategies, interleaved, and print what each costs and reaches.",
        allow_abbrev=False,
    )
    for item in fields(BenchConfig):
        options = dict(item.metadata)
        shown = "" if item.default in (None, MISSING) else f" (default: {item.default})"
        options["help"] += shown
        parser.add_argument(_flag(item.name), dest=item.name, default=argparse.SUPPRESS, **options)
    values = vars(parser.parse_args(argv))
    if "strategies" in values:
        values["strategies"] = tuple(name.strip() for name in values["strategies"].split(",") if name.strip())
    return BenchConfig(**values)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
