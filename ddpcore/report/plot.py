"""Plots into files, by matplotlib where it is installed (extra ``plot``)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

try:
    from matplotlib.figure import Figure
except ImportError:  # the extra `plot`: nothing but --plot needs it
    Figure = None

SUFFIXES = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Raise ValueError, before anything runs, where a plot could not be drawn into this file."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--plot: {path} ends in neither {' nor '.join(SUFFIXES)}: name such a file")
    if Figure is None:
        raise ValueError("--plot needs matplotlib: pip install 'ddpcore[plot]', or leave --plot out")


def plot_buckets(result: dict[str, Any], path: Path) -> None:
    """The step time over the largest bucket that was built, and the communication alone and exposed, by strategy.

    Args:
        result: as in the JSON file.
        path: a PNG or SVG file; all of it is written, or nothing.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    steps, comm = figure.subplots(1, 2)
    for number, strategy in enumerate(dict.fromkeys(row["strategy"] for row in result["rows"])):
        rows = [row for row in result["rows"] if row["strategy"] == strategy]
        x = [max(row["bucket_bytes"]) / 2**20 for row in rows]
        middle = [row["step_ms"]["p50"] for row in rows]
        spread = [
            [y - row["step_ms"]["p20"] for y, row in zip(middle, rows, strict=True)],
            [row["step_ms"]["p80"] - y for y, row in zip(middle, rows, strict=True)],
        ]
        steps.errorbar(x, middle, yerr=spread, marker="o", capsize=3, color=f"C{number}", label=strategy)
        comm.plot(x, [row["comm_ms"] for row in rows], "o--", color=f"C{number}", label=f"{strategy}, alone")
        comm.plot(x, [row["exposed_comm_ms"] for row in rows], "o-", color=f"C{number}", label=f"{strategy}, exposed")
    for axes, what in ((steps, "step, ms (median, p20 to p80)"), (comm, "communication, ms")):
        axes.set(xscale="log", xlabel="largest bucket built, MiB", ylabel=what, ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"{result['model']}, {result['world_size']} ranks, global batch {result['batch_size']}")
    partial = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        figure.savefig(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
