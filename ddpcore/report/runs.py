"""Sections of the page about runs: what ran, curves of losses and scores, statistics, topology."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from typing import Any, TypeGuard

from ddpcore.display.chart import Chart, Number, Series, finite, network, with_values
from ddpcore.options.keys import get
from ddpcore.report.section import Section, TableData
from ddpcore.report.sources import Run
from ddpcore.storage.limits import plain
from ddpcore.topology.describe import MOST_DRAWN

# Field of an epoch, or of the part of a statistics line, and the title and y label of its chart.
_OF_EPOCHS = {
    "train_loss": ("Training loss", "mean loss of an epoch", True),
    "loss": ("Loss on the evaluation split", "mean cross-entropy", True),
    "accuracy": ("Accuracy on the evaluation split", "share of samples, 0 to 1", False),
}
_INTERVALS = "The band is the recorded interval. Where one end of the interval is open, there is no band."
_DISTANCE = "distance from the mean"
_SHOWN = {  # headings of the table, and the keys of the config
    "strategy": "strategy", "topology": "strategy.topology", "learners": "strategy.learners", "model": "model",
    "data": "data", "batch_size": "data.batch_size", "optimizer": "optimizer", "lr": "optimizer.lr",
    "seed": "run.seed",
}  # fmt: skip


def run_sections(runs: Sequence[Run]) -> list[Section]:
    """What ran, and all curves; runs are numbered alike in every chart, and keep their colour."""
    if not runs:
        return []
    names = labels(runs)
    sections = [_about(runs, names), _curves(runs, names), _statistics(runs, names)]
    sections += [_losses(run, name) for run, name in zip(runs, names, strict=True)]
    sections.append(_topologies(runs, names))
    return [one for one in sections if one.lines or one.tables or one.charts or one.problems]


def labels(runs: Sequence[Run]) -> list[str]:
    """A short name for each run: its folder's name, or its path if two folders have the same name."""
    short = [run.path.parent.resolve().name for run in runs]
    return [plain(name if short.count(name) == 1 else run.name) for name, run in zip(short, runs, strict=True)]


def _about(runs: Sequence[Run], names: Sequence[str]) -> Section:
    headings = ["run", "state", *_SHOWN, "steps", "seconds", "accuracy"]
    rows = []
    where = []
    for run, name in zip(runs, names, strict=True):
        header = run.header
        values = [_text(_config_value(header, key)) for key in _SHOWN]
        last = run.epochs[-1] if run.epochs else {}
        rows.append([
            name, state_of(run), *values, _text(run.final.get("step", last.get("step", 0))),
            _text(_rounded(run.final.get("total_seconds", last.get("total_seconds")))),
            _text(_rounded(run.final.get("accuracy", last.get("accuracy")))),
        ])  # fmt: skip
        machine = [
            f"{_text(header.get('device'))}, {_text(header.get('cores'))} cores",
            *(_text(header.get(key)) for key in ("ranks", "communication", "torch", "python")),
            f"{_text(header.get('ddpcore'))} ({_text(header.get('commit') or 'installed')})",
            _text(header.get("date")),
        ]
        where.append([name, *machine])
    problems = [problem for run in runs for problem in run.problems]
    lines = [f"{name} was resumed after step {line['step']}." for run, name in zip(runs, names, strict=True)
             for line in run.resumed]  # fmt: skip
    lines += [f"{name}: {line.get('text')}." for run, name in zip(runs, names, strict=True) for line in run.members]
    places = ["run", "device", "processes", "communication", "torch", "python", "ddpcore", "date"]
    tables = [
        TableData(title="", headings=headings, rows=rows),
        TableData(title="Where, and with which versions", headings=places, rows=where),
    ]
    return Section(title="What ran", lines=lines, tables=[*tables, *_flatness(runs, names)], problems=problems)


def _config_value(header: dict[str, Any], key: str) -> Any:
    """A field of the config: a batch size with its growth, and no topology of a strategy without neighbours.

    For such a strategy ``train`` records None.
    """
    config, value = header["config"], get(header["config"], _SHOWN[key])
    growth = get(config, "data.batch_growth")
    if key == "batch_size" and growth:
        return f"{value}, growth {growth}"
    is_recorded = "topology" in header and _is_index(get(config, "strategy.learners"), MOST_DRAWN + 1)
    return None if key == "topology" and is_recorded and header["topology"] is None else value


def state_of(run: Run) -> str:
    """Whether a run has finished, diverged, or has not ended, and after which of its steps."""
    if run.final:
        return "diverged" if run.final.get("diverged") else "finished"
    lines = [*run.epochs, *run.statistics, *(of_rank[-1] for of_rank in run.steps.values() if of_rank)]
    last = max((line["step"] for line in lines), default=0)
    return f"not ended: step {last} of {_text(run.header.get('total_steps'))}"


def _flatness(runs: Sequence[Run], names: Sequence[str]) -> list[TableData]:
    found = [(name, run.final.get("flatness")) for run, name in zip(runs, names, strict=True)]
    flat = [(name, values) for name, values in found if isinstance(values, dict)]
    if not flat:
        return []
    headings = list(dict.fromkeys(key for _, values in flat for key in values))
    rows = [[name, *(_text(_rounded(values.get(key))) for key in headings)] for name, values in flat]
    return [TableData(title="Flatness of the final models", headings=["run", *headings], rows=rows)]


def _curves(runs: Sequence[Run], names: Sequence[str]) -> Section:
    charts = []
    for key, (title, y_label, log_y) in _OF_EPOCHS.items():
        for x_key, x_label in (("step", "step"), ("total_seconds", "seconds since the start")):
            series = [
                _series(name, number, run.epochs, x_key, methodcaller("get", key))
                for number, (run, name) in enumerate(zip(runs, names, strict=True))
            ]
            charts.append(_chart(f"{title}, over {x_label.split()[0].rstrip('s')}s", x_label, y_label, series, log_y))
    consensus = [
        _series(name, number, run.epochs, "step", lambda row: row.get("consensus_distance"))
        for number, (run, name) in enumerate(zip(runs, names, strict=True))
    ]
    charts.append(_chart("Consensus distance", "step", _DISTANCE, consensus, True))
    return Section(title="Curves", charts=with_values(charts))


def _statistics(runs: Sequence[Run], names: Sequence[str]) -> Section:
    scales, rates, losses, spreads = [], [], [], []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        lines = [line for line in run.statistics if line.get("valid")]
        interval = [_part(line, "whole", "interval") for line in lines]
        low, high = ([finite(pair[end]) if _is_pair(pair) else None for pair in interval] for end in (0, 1))
        scales.append(_series(name, number, lines, "step", lambda row: _part(row, "whole", "noise_scale"), low, high))
        rates.append(_series(name, number, lines, "step", _relative_rate))
        losses.append(_series(name, number, lines, "step", lambda row: _part(row, "dynamics", "full_loss")))
        spreads.append(_series(name, number, lines, "step", lambda row: _part(row, "spread", "consensus_distance")))
    charts = [
        _chart("Gradient noise scale", "step", "samples", scales, True, _INTERVALS),
        _chart("Effective learning rate", "step", "effective / set learning rate", rates, False),
        _chart("Loss of the mean weights on the training set", "step", "mean loss", losses, True),
        _chart("Consensus distance at measured steps", "step", _DISTANCE, spreads, True),
    ]  # fmt: skip
    return Section(title="Noise statistics", charts=with_values(charts))


def _relative_rate(row: dict[str, Any]) -> Any:
    rate, lr = finite(_part(row, "dynamics", "effective_lr")), finite(_part(row, "dynamics", "lr"))
    return rate / lr if rate is not None and lr else None


def _losses(run: Run, name: str) -> Section:
    """The loss of each learner at each step, if the run recorded its steps."""
    curves: dict[int, tuple[list[int], list[Number]]] = {}
    for lines in run.steps.values():
        for line in lines:
            learners, losses = line.get("learners"), line.get("loss")
            if _are_numbers(learners) and isinstance(losses, list) and len(learners) == len(losses):
                for learner, loss in zip(learners, losses, strict=True):
                    steps, values = curves.setdefault(learner, ([], []))
                    steps.append(line["step"])
                    values.append(finite(loss))
    series = [_middle(curves)] if len(curves) > 1 else []
    series += [
        Series(name=f"learner {learner}", x=x, y=y, color=learner, hidden=len(curves) > 1)
        for learner, (x, y) in sorted(curves.items())
    ]
    chart = Chart(title=f"Loss of each learner: {name}", x_label="step", y_label="loss of its mini-batch",
                  series=series, log_y=_positive(series),
                  note="The median of the learners, with a band from the smallest to the largest. "
                       "A click on a name switches its curve on and off." if len(curves) > 1 else "")  # fmt: skip
    return Section(title=f"Steps of {name}", charts=with_values([chart]))


def _middle(curves: Mapping[int, tuple[list[int], list[Number]]]) -> Series:
    """The median over learners at each step, with a band from the smallest to the largest."""
    at_step: dict[int, list[float]] = {}
    for steps, values in curves.values():
        for step, value in zip(steps, values, strict=True):
            if value is not None:
                at_step.setdefault(step, []).append(value)
    steps = sorted(at_step)
    found = [at_step[step] for step in steps]
    middle = [statistics.median(values) for values in found]
    return Series(name="median", x=steps, y=middle, low=[*map(min, found)], high=[*map(max, found)], color=0)


def _topologies(runs: Sequence[Run], names: Sequence[str]) -> Section:
    charts = []
    for run, name in zip(runs, names, strict=True):
        drawn = run.header.get("topology")
        num = drawn.get("num_learners") if isinstance(drawn, dict) else None
        if isinstance(drawn, dict) and isinstance(drawn.get("edges"), list) and _is_index(num, MOST_DRAWN + 1):
            gap = finite(drawn.get("spectral_gap"))
            note = f"{name}: {get(run.header['config'], 'strategy.topology')}"
            note += "" if gap is None else f", spectral gap {gap:.4g}"
            charts.append(network(note, num, drawn["edges"]))
    return Section(title="Topologies", charts=with_values(charts))


def _are_numbers(learners: Any) -> TypeGuard[list[int]]:
    return isinstance(learners, list) and all(isinstance(one, int) for one in learners)


def _is_index(value: Any, below: int) -> TypeGuard[int]:
    return isinstance(value, int) and 0 <= value < below


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(one, int | float) for one in value)


def _series(
    name: str, number: int, rows: Sequence[dict[str, Any]], x_key: str, value: Callable[[dict[str, Any]], Any],
    low: Sequence[Number] | None = None, high: Sequence[Number] | None = None,
) -> Series:  # fmt: skip
    x, y = [finite(row.get(x_key)) for row in rows], [finite(value(row)) for row in rows]
    has_band = low is not None and high is not None and any(one is not None for one in low)
    style = "line+points" if 0 < len(x) <= 30 else "line"
    return Series(
        name=name, x=x, y=y, low=low if has_band else None, high=high if has_band else None, style=style, color=number
    )


def _chart(title: str, x_label: str, y_label: str, series: Sequence[Series], log_y: bool, note: str = "") -> Chart:
    found = [one for one in series if any(value is not None for value in one.y)]
    note = note if any(one.low is not None for one in found) else ""
    log_y = log_y and _positive(found)
    return Chart(title=title, x_label=x_label, y_label=y_label, series=found, log_y=log_y, note=note)


def _positive(series: Sequence[Series]) -> bool:
    """Whether a logarithmic axis can show all values."""
    return all(value > 0 for one in series for value in one.y if value is not None)


def _part(row: dict[str, Any], part: str, key: str) -> Any:
    values = row.get(part)
    return values.get(key) if isinstance(values, dict) else None


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else plain(str(value))
