"""Published beside measured as a plot (extra ``plot``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

try:
    from matplotlib.figure import Figure
except ImportError:  # the extra `plot`
    Figure = None  # type: ignore[assignment,misc]

SUFFIXES = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Raise ValueError where a plot could not be written to this file."""
    if Figure is None:
        raise ValueError("matplotlib is not installed: pip install 'ddpcore[plot]', or leave --plot out")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--plot: {path} ends in neither {' nor '.join(SUFFIXES)}: name such a file")


def plot(comparison: dict[str, Any], path: Path, run_labels: list[str]) -> None:
    """The study's first metric, row by row: published as diamonds, the mean of each run with a bar from min to max.

    Args:
        comparison: of one study, as ``ddpcore.experiments.compare`` returns it.
        path: ``.png`` or ``.svg``.
        run_labels: for the legend.

    Raises:
        ValueError: matplotlib is not installed, or the file is of another kind.
    """
    check_plot(path)
    metric = comparison["metrics"][0]
    lines = [line for line in comparison["lines"] if line["metric"] == metric]
    figure = Figure(figsize=(8, 1.5 + 0.3 * len(lines)), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(lines))
    known = [
        (place, line["published"]) for place, line in zip(places, lines, strict=True) if line["published"] is not None
    ]
    axes.scatter(
        [value for _, value in known], [place for place, _ in known], marker="D", color="black", label="published"
    )
    for number, label in enumerate(run_labels):
        cells = [(place, line["measured"][number]) for place, line in zip(places, lines, strict=True)]
        found = [(place, cell) for place, cell in cells if cell is not None and cell["num_seeds"]]
        axes.errorbar(
            [cell["mean"] for _, cell in found],
            [place for place, _ in found],
            xerr=[[cell["mean"] - cell["min"] for _, cell in found], [cell["max"] - cell["mean"] for _, cell in found]],
            fmt="o",
            capsize=3,
            label=label,
        )
    axes.set_yticks(list(places), [line["row"] for line in lines])
    axes.invert_yaxis()
    axes.set_xlabel(metric)
    axes.set_title(comparison["title"], fontsize="medium")
    axes.legend(fontsize="small")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path)
