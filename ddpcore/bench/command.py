"""Functions of all commands: resolve a config, start ranks, check memory, describe the machine, publish a result."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ddpcore.bench.config import BenchConfig, Options, ResolvedConfig, resolve
from ddpcore.display.chart import Chart, Series, with_values
from ddpcore.display.table import console_of, print_parts
from ddpcore.models import MODELS
from ddpcore.runtime import launch
from ddpcore.runtime.launch import World
from ddpcore.runtime.machine import check_memory, machine
from ddpcore.storage.files import shown
from ddpcore.storage.json_lines import to_json, write_json

COPIES = 5  # of the parameters in each contender: weights, gradients, two moments, buckets or staging buffers


def environment(resolved: ResolvedConfig) -> dict[str, Any]:
    """The machine, the connection of the learners, and the reasons for it."""
    processes = 1 if resolved.is_virtual else resolved.world_size
    return {
        **machine(resolved.device),
        "threads_per_rank": torch.get_num_threads(),
        "oversubscribed": processes > launch.num_cores() if resolved.device == "cpu" else False,
        "backend": resolved.choice.name,
        "backend_reason": resolved.choice.reason,
        "transport": resolved.transport_name,
        "transport_reason": None if resolved.transport is None else resolved.transport.reason,
        "notes": list(resolved.notes),
    }


def model_bytes(name: str, **options: Any) -> int:
    """Bytes of the parameters of a model in float32."""
    with torch.device("meta"):
        return sum(4 * parameter.numel() for parameter in MODELS.build(name, **options).parameters())


def check_models_memory(num_models: int, resolved: ResolvedConfig, advice: str) -> None:
    """Raise ValueError unless this number of contenders, each with its own model, fits into memory."""
    ranks, model = resolved.world_size if resolved.device == "cpu" else 1, resolved.training.model
    needed = ranks * COPIES * model_bytes(model.name, **model.options) * num_models
    check_memory(f"{num_models} copies of {model.name}", needed, resolved.device, advice)


@dataclass(frozen=True)
class Results:
    """The kind of the results of a bench, and what is shown of them."""

    knows: Callable[[dict[str, Any]], bool]  # whether a JSON file with rows is such a result
    title: str  # of its section of the page
    parts: Callable[[dict[str, Any]], Sequence[Table | str]]  # its tables and sentences
    charts: Callable[[dict[str, Any]], Sequence[Chart]]

    def draw(self, result: dict[str, Any], path: Path) -> None:
        """Draw the charts of a result (as in the JSON file). ValueError as ``check_plot``, or no row has a number."""
        from ddpcore.display.picture import plot_charts  # noqa: PLC0415  matplotlib takes half a second to import

        if not (drawn := with_values(self.charts(result))):
            raise ValueError(f"--plot: no row has a number to draw, so {shown(path)} is not written")
        plot_charts(drawn, path, self.title if len(drawn) > 1 else "")


@dataclass(frozen=True)
class Kind(Results):
    """A command, with the kind of its results.

    ``prepare`` checks the options on this machine, with torchrun's world or None, and returns a function that runs the
    command. It raises ValueError, in one line, before any process starts.
    """

    options: type[Options]  # of its flags
    prepare: Callable[[Any, World | None], Callable[[], None]]


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
        backend=resolved.choice.name,
        timeout=resolved.training.strategy.timeout,
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
    """:func:`ddpcore.bench.config.resolve` on this machine, for torchrun's ranks or the ranks that will be started."""
    world_size = config.world_size or (4 if torchrun is None else torchrun.world_size)
    num_hosts = 1 if torchrun is None else torchrun.num_hosts
    return resolve(config, world_size=world_size, num_gpus=torch.cuda.device_count(), num_hosts=num_hosts)


def resolve_ranks(config: BenchConfig, torchrun: World | None) -> ResolvedConfig:
    """Like :func:`resolve_here`, for communication of ranks: ValueError if there is one, or learners are virtual."""
    resolved = resolve_here(config, torchrun)
    if resolved.world_size < 2:
        raise ValueError("--world-size is 1 and communication needs two ranks: take 2 or more")
    if resolved.is_virtual:
        advice = "this command needs real ranks: take the device cpu, or fewer ranks"
        raise ValueError(f"{resolved.choice.reason} and {advice}")
    return resolved
