"""``ddpcore bench optim``: the time of a whole optimizer step, of ours and of other libraries."""

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from ddpcore.bench import implementations
from ddpcore.bench.command import Kind, bars, check_memory, publish
from ddpcore.bench.config import Options, resolve_device
from ddpcore.bench.implementations import COMPARISONS, LISTS, OURS, USUAL, USUAL_OPTIMIZERS, Comparison, Implementation
from ddpcore.display.chart import Chart, Series
from ddpcore.display.table import cell_of, number, spread, table_of
from ddpcore.ops.steps import bytes_per_param
from ddpcore.options.fields import field
from ddpcore.runtime.launch import World
from ddpcore.runtime.machine import machine
from ddpcore.runtime.progress import ProgressReport
from ddpcore.runtime.timing import LARGEST_COPY, copying, interleaved, quantiles
from ddpcore.storage.json_lines import write_json
from ddpcore.training.sections import DEVICES

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NUM_TEMPORARIES = 3  # fp32 numbers for each parameter, in libraries that materialise each operation


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Options):
    """Time whole optimizer steps, interleaved, on the parameters of well-known networks."""

    EXAMPLE = "ddpcore bench optim --models resnet18 --optimizers sgd,lamb"

    models: tuple[str, ...] = field(USUAL, "comma-separated", choices=tuple(LISTS))
    optimizers: tuple[str, ...] = field(USUAL_OPTIMIZERS, "comma-separated", choices=tuple(OURS))
    peers: bool = field(True, "compare with other libraries too, if they are installed")
    repeats: int = field(21, "pairs of samples of each comparison, at most", least=1)
    seconds: float = field(4.0, "no pair of a comparison begins after this time; three are always taken", above=0)
    threads: int | None = field(None, "of the CPU (torch's default)", least=1)
    device: str = field("auto", choices=DEVICES)
    dtype: str = field("float32", "of parameters and gradients", choices=tuple(DTYPES))

    @property
    def resolved_device(self) -> str:
        """``cpu`` or ``cuda``; see :func:`ddpcore.bench.config.resolve_device` for errors."""
        return resolve_device(self.device, torch.cuda.device_count())


def prepare(config: OptimConfig, torchrun: World | None) -> Callable[[], None]:
    """Check the config on this machine; return a function that runs the bench."""
    states = 2 if {"adamw", "lamb"} & set(config.optimizers) else 1
    for name in config.models:
        numbers = (2 * (2 + states) + NUM_TEMPORARIES) * implementations.describe(name)["parameters"]
        needed = 4 * numbers + LARGEST_COPY
        check_memory(f"steps of {name}", needed, config.resolved_device, "name smaller lists with --models")
    return lambda: publish(measure(config), KIND, config)


def measure(config: OptimConfig) -> dict[str, Any]:
    """The result as in the JSON file: for each comparison and parameter list a row for each side.

    The file is written after each list, so a bench that is stopped early keeps its measurements.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    torch.manual_seed(0)
    chosen, notes = _comparisons(config)
    installed = [comparison for comparison in chosen if comparison.peer is None or comparison.peer.is_installed()]
    rows: list[dict[str, Any]] = []
    about = {"threads": torch.get_num_threads(), "dtype": config.dtype, "notes": notes}
    result: dict[str, Any] = {
        "environment": {**machine(config.resolved_device), **about},
        "lists": [implementations.describe(name) for name in config.models],
        "comparisons": [comparison.name for comparison in chosen],
        "rows": rows,
    }
    with ProgressReport("comparisons", len(config.models) * len(installed)) as progress:
        for name in config.models:
            for optimizer in config.optimizers:
                own = _OwnStep(name, optimizer, config)
                for comparison in installed:
                    if comparison.optimizer == optimizer:
                        rows += own.measure(comparison)
                        progress.advance(1, f"{name}: {comparison.name}")
                del own  # before the next one is allocated
            if config.json is not None:
                write_json(config.json, result)
    return result


def _comparisons(config: OptimConfig) -> tuple[list[Comparison], list[str]]:
    """The comparisons that have a line in the table, and notes about the others."""
    device, dtype = config.resolved_device, DTYPES[config.dtype]
    chosen, notes, absent = [], [], {}
    for comparison in COMPARISONS:
        peer, why = comparison.peer, None
        if comparison.optimizer not in config.optimizers or (peer is not None and not config.peers):
            continue
        if peer is not None and not peer.is_installed():
            absent[peer.library] = f"{peer.library} ({peer.install})"
        elif peer is not None:
            why = peer.why_unusable(device, dtype)
        chosen += [] if why else [comparison]
        notes += [why] if why else []
    if absent:
        notes.append(f"not installed, so not measured: {', '.join(absent.values())}")
    return chosen, notes


class _OwnStep:
    """Our optimizer on the parameters of a list, and a copy of as many bytes.

    The optimizers that it is compared with are allocated one after the other, to save memory.
    """

    def __init__(self, name: str, optimizer: str, config: OptimConfig) -> None:
        self._config, self._shapes, self._ours = config, LISTS[name][1], OURS[optimizer]
        self._about = implementations.describe(name)
        self._noise = torch.randn(2**20).to(config.resolved_device, DTYPES[config.dtype])
        self._optimizer, self._itemsize = optimizer, DTYPES[config.dtype].itemsize
        self._step = self._stepper(self._ours)
        copied = bytes_per_param(optimizer, self._itemsize)[0] * self._about["parameters"]
        self._copy, self._copied = copying(copied, config.resolved_device)

    def measure(self, comparison: Comparison) -> list[dict[str, Any]]:
        """Two rows, one for each side. The row of the left side has the ratio, left / right."""
        config, device, sides = self._config, self._config.resolved_device, (comparison.left, comparison.right)
        steps = [self._step if side is self._ours else self._stepper(side) for side in sides]
        *seconds, of_copy = interleaved([*steps, self._copy], device, config.repeats, config.seconds)
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
        return [{**common, **self._row(*sides, *seconds)}, {**common, **self._row(*sides[::-1], *seconds[::-1])}]

    def _row(
        self, side: Implementation, against: Implementation, mine: list[float], theirs: list[float]
    ) -> dict[str, Any]:
        row = {
            "implementation": side.name,
            "against": against.name,
            "ms": quantiles(1e3 * seconds for seconds in mine),
            "ratio": quantiles(left / right for left, right in zip(mine, theirs, strict=True)),
        }
        is_own = side is self._ours or side.rounded
        if not is_own or side.matrices:  # the traffic of other libraries and of matrix products is unknown
            return row | dict.fromkeys(("bytes_per_param", "bytes_per_param_uncached", "gb_per_s"))
        least, most = bytes_per_param(self._optimizer, self._itemsize, side.rounded)
        rate = least * self._about["parameters"] / quantiles(mine)["p50"] / 1e9
        return row | {"bytes_per_param": least, "bytes_per_param_uncached": most, "gb_per_s": rate}

    def _stepper(self, implementation: Implementation) -> Callable[[], Any]:
        """The step of an optimizer, with its own parameters and gradients because some libraries write to gradients."""
        params = []
        for shape in self._shapes:
            param = torch.nn.Parameter(self._numbers(shape))
            param.grad = self._numbers(shape)
            params.append(param)
        return implementation.build(params).step

    def _numbers(self, shape: tuple[int, ...]) -> torch.Tensor:
        numel = math.prod(shape)
        return self._noise.repeat(-(-numel // len(self._noise)))[:numel].view(shape).clone()


def parts(result: dict[str, Any]) -> list[Table | str]:
    """What the terminal and the page show of a result, as in the JSON file."""
    environment = result["environment"]
    machine = (
        f"{environment['device']}, {environment['threads']} of {environment['cores']} cores; torch "
        f"{environment['torch']}, ddpcore {environment['ddpcore']} ({environment['commit'] or 'installed'}); "
        f"{environment['dtype']}"
    )
    rows = result["rows"]
    apart = sum(row["ms"]["p80"] > 2 * row["ms"]["p20"] for row in rows)
    doubt = f"busy machine: in {apart} of {len(rows)} rows the p80 is more than twice the p20, and a ratio says little"
    return [machine, *environment["notes"], *[doubt] * bool(apart), _ratios(result), _bandwidths(result)]


def _ratios(result: dict[str, Any]) -> Table:
    table = Table(
        title="time of a step, left / right: median of pairs, p20 to p80 in brackets; below it the medians in ms",
        title_justify="left",
        show_lines=True,
    )
    table.add_column("left / right", no_wrap=True)
    for about in result["lists"]:
        heading = f"{cell_of(about['title'])}\n{about['parameters']:,} in {about['num_tensors']}"
        table.add_column(heading, justify="right", no_wrap=True)
    found = {(row["comparison"], row["list"], row["implementation"]): row for row in result["rows"]}
    for comparison in result["comparisons"]:
        left, _, right = comparison.partition(" / ")
        cells = []
        for about in result["lists"]:
            pair = [found.get((comparison, about["list"], side)) for side in (left, right)]
            cells.append("-" if pair[0] is None or pair[1] is None else _cell(pair[0], pair[1]))
        table.add_row(cell_of(comparison), *map(escape, cells))
    return table


def _cell(left: dict[str, Any], right: dict[str, Any]) -> str:
    times = " / ".join(f"{row['ms']['p50']:.4g}" for row in (left, right))
    middle, low, high = (f"{left['ratio'][name]:.2f}" for name in ("p50", "p20", "p80"))
    return f"{middle} [{low}-{high}]\n{times}"


def _bandwidths(result: dict[str, Any]) -> Table:
    """A line for each of ddpcore's steps and each parameter list, with the times of its first comparison."""
    titles = {about["list"]: about["title"] for about in result["lists"]}
    title = "ddpcore's steps, in their first comparison: bandwidth for the least possible traffic, beside a copy's"
    columns = {
        "step": lambda row: row["implementation"],
        "list": lambda row: titles[row["list"]],
        "ms p20/p50/p80": lambda row: spread(row["ms"], ".4g"),
        "B/param": lambda row: " to ".join(dict.fromkeys(str(row["bytes_per_param" + x]) for x in ("", "_uncached"))),
        "GB/s": number("gb_per_s", "{:.1f}"),
        "copy GB/s": number("copy_gb_per_s", "{:.1f}"),
        "of copy": lambda row: f"{row['gb_per_s'] / row['copy_gb_per_s']:.0%}",
    }
    return table_of(columns, own_steps(result), title=title, left=("step", "list"))


def own_steps(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of ddpcore's steps: one for each step and parameter list, of their first comparison."""
    own = [row for row in result["rows"] if row["bytes_per_param"] is not None]
    first = {(row["implementation"], row["list"]): row for row in reversed(own)}
    return [row for row in own if first[row["implementation"], row["list"]] is row]


def charts(result: dict[str, Any]) -> list[Chart]:
    """The charts of a result, as in the JSON file."""
    titles = {about["list"]: about["title"] for about in result["lists"]}
    own = own_steps(result)
    names = [f"{row['implementation']}, {titles[row['list']]}" for row in own]
    mine = Series(name="step", x=names, y=[row["gb_per_s"] for row in own])
    copy = Series(name="copy", x=names, y=[row["copy_gb_per_s"] for row in own])
    left = [row for row in result["rows"] if row["comparison"].startswith(f"{row['implementation']} / ")]
    pairs = [f"{row['comparison']}, {titles[row['list']]}" for row in left]
    return [
        bars("Time of a step: left / right", "ratio", pairs, [row["ratio"] for row in left]),
        Chart(title="Bandwidth of a step, and of a copy", kind="bars", x_label="GB/s", series=[mine, copy]),
    ]


KIND = Kind(OptimConfig, prepare, lambda result: "comparisons" in result, "Optimizers", parts, charts)
