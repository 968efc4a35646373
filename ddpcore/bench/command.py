"""Functions of all commands: resolve a config, start ranks, check memory, describe the machine, publish a result."""

from __future__ import annotations

import ctypes
import gc
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table

from ddpcore.bench.config import BenchConfig, Options, ResolvedConfig, resolve
from ddpcore.display.chart import Chart, Series, with_values
from ddpcore.display.table import console_of, print_parts
from ddpcore.models import MODELS
from ddpcore.parameters.flat import MiB
from ddpcore.runtime import launch
from ddpcore.runtime.launch import World
from ddpcore.runtime.machine import machine
from ddpcore.storage.json_lines import to_json, write_json
from ddpcore.storage.limits import shown

_PROCESS = "/proc/self"


class PeakMemory:
    """The growth of memory since the constructor: torch's allocated memory on a GPU, the resident set on the CPU.

    The resident set of each rank contains all memory that the ranks share. :meth:`grown_mb` counts only this rank's
    part of the largest amount of shared memory that was mapped, as a proportional set size does. The system records the
    peak of the whole resident set. It does not record the peak of the shared part, so a thread samples the shared part.

    Args:
        device: ``cpu`` or ``cuda``.
        num_sharing: number of processes that map the same shared memory.
    """

    def __init__(self, device: str, num_sharing: int = 1) -> None:
        self._device = device
        self._others = 1 - 1 / num_sharing
        gc.collect()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._before: float | None = torch.cuda.memory_allocated()
        else:
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                # Return freed memory to the system: if the process used it again, its resident set would not grow.
                trim(0)
            self._before = _resident("VmRSS") if _reset_peak() else None
            self._shared = _Sampler("RssShmem")

    def grown_mb(self) -> float | None:
        """The growth in MiB, at least 0; None if the system does not report the resident set."""
        peak = torch.cuda.max_memory_allocated() if self._device == "cuda" else _resident("VmHWM")
        of_others = 0.0 if self._device == "cuda" else self._others * self._shared.stop()
        return None if self._before is None or peak is None else max(0.0, peak - self._before - of_others) / MiB


class _Sampler:
    """Samples one line of the process's status every 2 ms. Shared segments exist for longer than 2 ms."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._before = self._most = _resident(key) or 0.0
        self._stopped = threading.Event()
        threading.Thread(target=self._sample, daemon=True).start()

    def stop(self) -> float:
        """Stop the thread, and return the largest growth in bytes."""
        self._stopped.set()
        return max(self._most, _resident(self._key) or 0.0) - self._before

    def _sample(self) -> None:
        while not self._stopped.wait(0.002):
            self._most = max(self._most, _resident(self._key) or 0.0)


def _reset_peak() -> bool:
    try:
        Path(_PROCESS, "clear_refs").write_text("5")  # resets VmHWM: proc(5)
    except OSError:
        return False
    return True


def _resident(key: str) -> float | None:
    return status_bytes(f"{_PROCESS}/status", key)


def status_bytes(file: str, key: str) -> float | None:
    """The bytes in the line ``KEY: NUMBER kB`` of a system file; None without such a line or a readable file."""
    try:
        for line in Path(file).read_text().splitlines():
            if line.startswith(f"{key}:"):
                return 1024.0 * int(line.split()[1])
    except OSError:
        pass
    return None


COPIES = 5  # of the parameters in each contender: weights, gradients, two moments, buckets or staging buffers


def environment(resolved: ResolvedConfig) -> dict[str, Any]:
    """The machine, the connection of the learners, and the reasons for it."""
    processes = 1 if resolved.is_virtual else resolved.world_size
    return {
        **machine(resolved.device),
        "threads_per_rank": torch.get_num_threads(),
        "oversubscribed": processes > launch.num_cores() if resolved.device == "cpu" else False,
        "backend": resolved.choice.backend,
        "backend_reason": resolved.choice.reason,
        "transport": resolved.transport_name,
        "transport_reason": None if resolved.transport is None else resolved.transport.reason,
        "notes": list(resolved.notes),
    }


def model_bytes(resolved: ResolvedConfig) -> int:
    """Bytes of the parameters of the model."""
    model = MODELS.build(resolved.training.model.name, **resolved.training.model.options)
    return sum(4 * parameter.numel() for parameter in model.parameters())


def check_models_memory(num_models: int, resolved: ResolvedConfig, advice: str) -> None:
    """Check that this number of contenders, each with its own model, fits into memory.

    Raises:
        ValueError: see :func:`check_memory`.
    """
    ranks = resolved.world_size if resolved.device == "cpu" else 1
    needed = ranks * COPIES * model_bytes(resolved) * num_models
    check_memory(f"{num_models} copies of {resolved.training.model.name}", needed, resolved.device, advice)


def free_memory(device: str) -> float:
    """Bytes that can be allocated; infinity if the system does not report them."""
    if device == "cuda":
        return float(torch.cuda.mem_get_info()[0])
    free = status_bytes("/proc/meminfo", "MemAvailable")
    return math.inf if free is None else free


def check_memory(what: str, needed: float, device: str, advice: str) -> None:
    """Check that this many bytes are free, because the system kills processes without a message if memory runs out.

    Raises:
        ValueError: too few are free; the message begins with ``what`` and ends with ``advice``.
    """
    free, need = free_memory(device), f"{what} need about {needed / 1e9:.1f} GB of memory"
    if needed > free:
        raise ValueError(f"{need} and {free / 1e9:.1f} GB are free: {advice}")


class Kind(NamedTuple):
    """A kind of bench result.

    Attributes:
        knows: whether a JSON file with rows is such a result.
        title: of its section of the page.
        parts: its tables and sentences.
        charts: its charts.
    """

    knows: Callable[[dict[str, Any]], bool]
    title: str
    parts: Callable[[dict[str, Any]], Sequence[Table | str]]
    charts: Callable[[dict[str, Any]], Sequence[Chart]]

    def draw(self, result: dict[str, Any], path: Path) -> None:
        """Draw the charts of a result (as in the JSON file) into a PNG or SVG file.

        Raises:
            ValueError: see :func:`ddpcore.display.chart.check_plot`; or no row has a number to draw.
        """
        from ddpcore.display.picture import plot_charts  # noqa: PLC0415  matplotlib takes half a second to import

        drawn = with_values(self.charts(result))
        if not drawn:
            raise ValueError(f"--plot: no row has a number to draw, so {shown(path)} is not written")
        plot_charts(drawn, path, self.title if len(drawn) > 1 else "")


def has(key: str) -> Callable[[dict[str, Any]], bool]:
    """Whether a row of a result has this key."""
    return lambda result: any(isinstance(row, dict) and key in row for row in result["rows"])


def bars(title: str, label: str, names: Sequence[str], quantiles: Sequence[Any]) -> Chart:
    """Bars of medians from p20 to p80; rows without numbers are left out."""
    found = [(name, values) for name, values in zip(names, quantiles, strict=True) if values is not None]
    series = spread_series(label, [name for name, _ in found], [values for _, values in found])
    return Chart(title=title, kind="bars", x_label=f"{label}, median, p20 to p80", series=[series])


def spread_series(name: str, x: Sequence[Any], quantiles: Sequence[Any], **style: Any) -> Series:
    """Medians from p20 to p80; None is a gap. ``style`` has further fields of the series."""
    low, middle, high = ([one and one[key] for one in quantiles] for key in ("p20", "p50", "p80"))
    return Series(name=name, x=x, y=middle, low=low, high=high, **style)


def environment_lines(environment: Mapping[str, Any]) -> list[str]:
    """The machine, the connection between the learners, and notes."""
    lines = [
        f"{environment['device']}, {environment['cores']} cores, {environment['threads_per_rank']} threads a rank; "
        f"torch {environment['torch']}, ddpcore {environment['ddpcore']} ({environment['commit'] or 'installed'})",
        f"backend {environment['backend']}: {environment['backend_reason']}",
    ]
    if environment["transport"] is not None:
        lines.append(f"transport {environment['transport']}: {environment['transport_reason']}")
    if environment["oversubscribed"]:
        lines.append("oversubscribed: more ranks than cores. Compare strategies in this table, not their scaling.")
    return [*lines, *environment["notes"]]


def size_name(mb: float | None) -> str:
    """A bucket size as text. Infinity, which is None in JSON, is one bucket."""
    return "one bucket" if mb in (None, float("inf")) else f"{mb:g} MiB"


def start_ranks(worker: Callable[..., None], resolved: ResolvedConfig, *args: Any) -> Callable[[], None]:
    """A function that runs ``worker(world, resolved, *args)`` on every rank."""
    return lambda: launch.run(
        worker,
        (resolved, *args),
        world_size=resolved.world_size,
        backend=resolved.choice.backend,
        timeout=resolved.training.strategy.timeout,
        on_failure=resolved.training.strategy.on_failure,
        forks=True,
    )


def publish(result: dict[str, Any], kind: Kind, options: Options) -> None:
    """Print a result, write it to the JSON file if there is one, and draw it if asked."""
    plain = to_json(result)
    print_parts(console_of(wide=options.wide), *kind.parts(plain))
    if options.json is not None:
        write_json(options.json, plain)
        print(f"wrote {shown(options.json)}")
    if options.plot is not None:
        kind.draw(plain, options.plot)
        print(f"wrote {shown(options.plot)}")


def resolve_here(config: BenchConfig, torchrun: World | None) -> ResolvedConfig:
    """The config on this machine, for torchrun's ranks or the ranks that will be started.

    Raises:
        ValueError: see :func:`ddpcore.bench.config.resolve`.
    """
    world_size = config.world_size or (4 if torchrun is None else torchrun.world_size)
    return resolve(config, world_size=world_size, num_gpus=torch.cuda.device_count(), num_hosts=num_hosts(torchrun))


def num_hosts(torchrun: World | None) -> int:
    """The number of machines on which the ranks run."""
    return 1 if torchrun is None else torchrun.num_hosts


def resolve_ranks(config: BenchConfig, torchrun: World | None) -> ResolvedConfig:
    """Like :func:`resolve_here`, for commands that measure communication between ranks.

    Raises:
        ValueError: see there; or there is only one rank, or the learners would be virtual.
    """
    resolved = resolve_here(config, torchrun)
    if resolved.world_size < 2:
        raise ValueError("--world-size is 1 and communication needs two ranks: take 2 or more")
    if resolved.choice.backend == "virtual":
        raise ValueError(
            f"{resolved.choice.reason} and this command needs real ranks: take the device cpu, or fewer ranks"
        )
    return resolved
