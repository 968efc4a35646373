"""``python -m ddpcore.bench optim``: what a whole optimizer step costs, ours beside those of other libraries."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ddpcore.bench import command_line, shapes
from ddpcore.bench.command_line import check_choice, check_names, check_writable, names, option, write_json
from ddpcore.bench.environment import free_memory
from ddpcore.bench.implementations import COMPARISONS, OURS, Comparison, Implementation, bytes_per_param
from ddpcore.bench.timing import LARGEST_COPY, copying, interleaved
from ddpcore.machine import machine
from ddpcore.metrics import quantiles, to_json
from ddpcore.report.optim import print_optimizers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("auto", "cpu", "cuda")
NUM_TEMPORARIES = 3  # fp32 numbers a parameter, in libraries that write one operation after the other


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """A run of the optimizer bench. Constructing one checks all that can be known before anything is allocated.

    Raises:
        ValueError: one line that says what is wrong and what to do.
    """

    models: tuple[str, ...] = option(
        shapes.USUAL, f"comma-separated, of {','.join(shapes.names())}", metavar="A,B,...", type=names
    )
    optimizers: tuple[str, ...] = option(tuple(OURS), "comma-separated", metavar="A,B,...", type=names)
    peers: bool = option(True, "other libraries too, where they are installed", action=command_line.BOOLEAN)
    repeats: int = option(21, "pairs of samples of each comparison, at most", type=int)
    seconds: float = option(4.0, "no pair of a comparison begins after this time; three are always taken", type=float)
    threads: int | None = option(None, "of the CPU (torch's own number)", type=int)
    device: str = option("auto", ", ".join(DEVICES))
    dtype: str = option("float32", f"of parameters and gradients: {', '.join(DTYPES)}")
    json: Path | None = option(None, "write the result to this file", type=Path, metavar="FILE")

    def __post_init__(self) -> None:
        check_names("models", self.models, shapes.names(), "list")
        check_names("optimizers", self.optimizers, tuple(OURS), "optimizer")
        check_choice("device", self.device, DEVICES)
        check_choice("dtype", self.dtype, tuple(DTYPES))
        for name in ("repeats", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} is {value}: it must be at least 1")
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ValueError(f"--seconds is {self.seconds}: it must be a number above 0")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"--device cuda: torch {torch.__version__} sees no GPU: use --device cpu")
        if self.json is not None:
            check_writable(self.json.resolve())

    @property
    def resolved_device(self) -> str:
        """``cpu`` or ``cuda``."""
        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"


def main(argv: Sequence[str]) -> int:
    """Run the bench and print its table; returns 0.

    Raises:
        ValueError: the command cannot be run as it stands; one line.
    """
    config = command_line.parse(
        OptimConfig,
        argv,
        prog="python -m ddpcore.bench optim",
        description="Time whole optimizer steps, interleaved, on the parameters of well-known networks.",
    )
    _check_memory(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    print_optimizers(to_json(measure(config)))
    return 0


def measure(config: OptimConfig) -> dict[str, Any]:
    """What the JSON file holds: two rows a comparison and parameter list, one for each side.

    It is written after each list: of a bench that is ended early, what was measured is there.
    """
    torch.manual_seed(0)
    chosen, notes = _comparisons(config)
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "environment": {
            **machine(config.resolved_device),
            "threads": torch.get_num_threads(),
            "dtype": config.dtype,
            "notes": notes,
        },
        "lists": [_about(name) for name in config.models],
        "comparisons": [comparison.name for comparison in chosen],
        "rows": rows,
    }
    console = Console(stderr=True)
    with console.status("") if console.is_terminal else nullcontext() as status:
        for name in config.models:
            for optimizer in config.optimizers:
                field = _Field(name, optimizer, config)
                for comparison in chosen:
                    peer = comparison.peer
                    if comparison.optimizer == optimizer and (peer is None or peer.is_installed()):
                        if status is not None:
                            status.update(f"{name}: {comparison.name}")
                        rows += field.measure(comparison)
                del field  # before the next one is allocated
            if config.json is not None:
                write_json(config.json, result)
    return result


def _about(name: str) -> dict[str, Any]:
    sizes = shapes.shapes(name)
    return {
        "list": name,
        "title": shapes.title(name),
        "parameters": shapes.num_elements(sizes),
        "num_tensors": len(sizes),
    }


def _comparisons(config: OptimConfig) -> tuple[list[Comparison], list[str]]:
    """Those that the table has a line for, and what is to be said about others."""
    device, dtype = config.resolved_device, DTYPES[config.dtype]
    chosen, notes, absent = [], [], {}
    for comparison in COMPARISONS:
        peer = comparison.peer
        if comparison.optimizer not in config.optimizers or (peer is not None and not config.peers):
            continue
        if peer is not None and peer.cuda_only and device != "cuda":
            continue
        if peer is not None and not peer.is_installed():
            absent[peer.library] = peer.install
            if not peer.listed:
                continue
        elif peer is not None and (why := peer.why_unusable(device, dtype)) is not None:
            notes.append(why)
            continue
        chosen.append(comparison)
    if absent:
        ways = ", ".join(f"{library} ({install})" for library, install in absent.items())
        notes.append(f"not installed, so not measured: {ways}")
    return chosen, notes


class _Field:
    """Our optimizer on the parameters of a list, and a copy. The others come one after the other and go again, so that
    no more is alive than what is compared."""

    def __init__(self, name: str, optimizer: str, config: OptimConfig) -> None:
        self._config = config
        self._about = _about(name)
        self._shapes = shapes.shapes(name)
        self._noise = torch.randn(2**20).to(config.resolved_device, DTYPES[config.dtype])
        self._ours = OURS[optimizer]
        self._bytes = bytes_per_param(optimizer, DTYPES[config.dtype].itemsize)
        self._step = self._stepper(self._ours)
        self._copy, self._copied = copying(self._bytes[0] * self._about["parameters"], config.resolved_device)

    def measure(self, comparison: Comparison) -> list[dict[str, Any]]:
        """The rows of a comparison: that of the left, whose ratio is left / right, and that of the right."""
        config, left, right = self._config, comparison.left, comparison.right
        steps = [self._step if side is self._ours else self._stepper(side) for side in (left, right)]
        device = config.resolved_device
        of_left, of_right, of_copy = interleaved([*steps, self._copy], device, config.repeats, config.seconds)
        del steps
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        common = {
            "comparison": comparison.name,
            "optimizer": comparison.optimizer,
            **{key: self._about[key] for key in ("list", "parameters", "num_tensors")},
            "device": device,
            "dtype": config.dtype,
            "copy_gb_per_s": self._copied / quantiles(of_copy)["p50"] / 1e9,
            "repeats": len(of_copy),
        }
        return [
            {**common, **self._row(left, right, of_left, of_right)},
            {**common, **self._row(right, left, of_right, of_left)},
        ]

    def _row(
        self, side: Implementation, against: Implementation, mine: list[float], theirs: list[float]
    ) -> dict[str, Any]:
        least, most = self._bytes
        is_ours = side is self._ours  # what other libraries move is not known here
        total = least * self._about["parameters"]
        return {
            "implementation": side.name,
            "against": against.name,
            "ms": quantiles(1e3 * seconds for seconds in mine),
            "ratio": quantiles(left / right for left, right in zip(mine, theirs, strict=True)),
            "bytes_per_param": least if is_ours else None,
            "bytes_per_param_uncached": most if is_ours else None,
            "gb_per_s": total / quantiles(mine)["p50"] / 1e9 if is_ours else None,
        }

    def _stepper(self, implementation: Implementation) -> Callable[[], Any]:
        """The step of an optimizer with parameters and gradients of its own: some libraries write to gradients."""
        params = []
        for shape in self._shapes:
            param = torch.nn.Parameter(self._numbers(shape))
            param.grad = self._numbers(shape)
            params.append(param)
        return implementation.build(params).step

    def _numbers(self, shape: tuple[int, ...]) -> torch.Tensor:
        numel = math.prod(shape)
        return self._noise.repeat(-(-numel // len(self._noise)))[:numel].view(shape).clone()


def _check_memory(config: OptimConfig) -> None:
    """A machine that runs out of memory kills the process without a word."""
    device = config.resolved_device
    free = free_memory(device)
    states = 2 if "lamb" in config.optimizers else 1
    for name in config.models:
        numbers = (2 * (2 + states) + NUM_TEMPORARIES) * _about(name)["parameters"]
        needed = 4 * numbers + LARGEST_COPY
        if needed > free:
            raise ValueError(
                f"{name} needs about {needed / 1e9:.1f} GB of memory and {free / 1e9:.1f} GB are free: "
                "name smaller lists with --models"
            )
