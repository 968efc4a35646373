"""Sections of the page about runs: results, curves, statistics, topology, curvature, and who waits for whom."""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any

import numpy as np

from ddpcore.bench.findings import waited_for
from ddpcore.display.chart import Chart, Number, Series, finite, network, with_values
from ddpcore.display.picture import surface_charts
from ddpcore.options.fields import get
from ddpcore.records.surface import Surface
from ddpcore.report.groups import Group, config_of, constants, last_of, mean_of, ranked, sentences, text_of
from ddpcore.report.sources import Run, Section, TableData
from ddpcore.topology.describe import MOST_DRAWN

# Field of an epoch, or of the part of a statistics line, and the title and y label of its chart.
_OF_EPOCHS = {
    "train_loss": ("Training loss", "mean loss of an epoch", True),
    "loss": ("Loss on the evaluation split", "mean cross-entropy", True),
    "accuracy": ("Accuracy on the evaluation split", "share of samples, 0 to 1", False),
}
_SPREAD = "Several seeds are one curve: their mean, with a band from the smallest to the largest."
_INTERVALS = "The band of a single run is the recorded interval. Where one end is open, there is no band."
_ROUNDING = 1e-5  # a consensus distance below this part of the largest one is not drawn
Rows = Callable[[Run], Sequence[dict[str, Any]]]
Value = Callable[[dict[str, Any]], Any]
_PLACES = {"processes": "ranks", "communication": "communication", "torch": "torch", "python": "python"}


def run_sections(runs: Sequence[Run], groups: Sequence[Group]) -> list[Section]:
    """What came out, and all curves; groups are numbered alike in every chart, and keep their colour."""
    if not runs:
        return []
    losses = Section(title="Loss of the learners", charts=with_values(map(_losses_of, runs)))
    return [_about(runs, groups), _curves(groups), _statistics(groups), losses, _topologies(groups)]


def _about(runs: Sequence[Run], groups: Sequence[Group]) -> Section:
    key, order = ranked(groups)
    columns = {name.replace("_", " "): name for name in (key, "best_accuracy", "train_loss", "total_seconds")}
    known = {name for run in runs for name, value in last_of(run).items() if finite(value) is not None}
    columns = {title: name for title, name in columns.items() if name in known}
    rows = []
    for group in order:
        results = [group.text(name) for name in columns.values()]
        counts = Counter(map(state_of, group.runs)).items()
        states = ", ".join(state if len(counts) == 1 else f"{num} {state}" for state, num in counts)
        rows.append([group.name, *results, str(len(group.runs)), states])
    of_runs, each = {run.path: group.name for group in groups for run in group.runs}, []
    for run in runs:
        seed, date = text_of(get(run.header["config"], "run.seed")), text_of(run.header.get("date"))
        results = [text_of(_rounded(last_of(run).get(one))) for one in ("step", *columns.values())]
        each.append([run.label, of_runs[run.path], seed, state_of(run), *results, date])
    problems = [problem for run in runs for problem in run.problems]
    lines = [*sentences(groups), f"The same in all runs: {constants([config_of(run) for run in runs])}."]
    lines += [f"{run.label} was resumed after step {line['step']}." for run in runs for line in run.resumed]
    lines += [f"{run.label}: {line.get('text')}." for run in runs for line in run.members]
    headings = ["what differs" if len(groups) > 1 else "runs of", *columns, "runs", "state"]
    tables = [TableData(title="", headings=headings, rows=rows), *_flatness(runs)]
    headings = ["run", "of", "seed", "state", "step", *columns, "date"]
    folded = [TableData(title="Each run", headings=headings, rows=each, num_left=2), _where(runs)]
    return Section(title="Result", lines=lines, tables=tables, folded=folded, problems=problems)


def _where(runs: Sequence[Run]) -> TableData:
    """Machines and versions; equal ones are one row."""
    found: dict[tuple[str, ...], list[str]] = {}
    for run in runs:
        header = run.header
        machine = (
            f"{text_of(header.get('device'))}, {text_of(header.get('cores'))} cores",
            *(text_of(header.get(key)) for key in _PLACES.values()),
            f"{text_of(header.get('ddpcore'))} ({text_of(header.get('commit') or 'installed')})",
        )
        found.setdefault(machine, []).append(run.label)
    rows = [["all" if len(found) == 1 else ", ".join(of_runs), *machine] for machine, of_runs in found.items()]
    headings = ["runs", "device", *_PLACES, "ddpcore"]
    return TableData(title="Where, and with which versions", headings=headings, rows=rows)


def state_of(run: Run) -> str:
    """Whether a run has finished, diverged, or has not ended, and after which of its steps."""
    if run.final:
        return "diverged" if run.final.get("diverged") else "finished"
    lines = [*run.epochs, *run.statistics, *(of_rank[-1] for of_rank in run.steps.values() if of_rank)]
    last = max((line["step"] for line in lines), default=0)
    return f"not ended: step {last} of {text_of(run.header.get('total_steps'))}"


def _flatness(runs: Sequence[Run]) -> list[TableData]:
    flat = [(run.label, found) for run in runs if isinstance(found := run.final.get("flatness"), dict)]
    if not flat:
        return []
    headings = list(dict.fromkeys(key for _, values in flat for key in values))
    rows = [[name, *(text_of(_rounded(values.get(key))) for key in headings)] for name, values in flat]
    return [TableData(title="Flatness of the final models", headings=["run", *headings], rows=rows)]


def _curves(groups: Sequence[Group]) -> Section:
    charts = []
    for key, (title, y_label, log_y) in _OF_EPOCHS.items():
        for x_key, x_label in (("step", "step"), ("total_seconds", "seconds since the start")):
            series = _each(groups, attrgetter("epochs"), methodcaller("get", key), x_key)
            charts.append(_chart(f"{title}, over {x_label.split()[0].rstrip('s')}s", x_label, y_label, series, log_y))
    distances = _each(groups, _with_distance, methodcaller("get", "consensus_distance"))
    charts.append(_distance_chart("Consensus distance", distances))
    lines = [_SPREAD] if any(len(group.runs) > 1 for group in groups) else []
    return Section(title="Curves", lines=lines if with_values(charts) else [], charts=with_values(charts))


def _with_distance(run: Run) -> list[dict[str, Any]]:
    """The recorded steps if they have the consensus distance (of virtual learners), else the epochs."""
    steps = run.steps.get(0, [])
    return steps if any(finite(line.get("consensus_distance")) for line in steps) else run.epochs


def _distance_chart(title: str, series: Sequence[Series]) -> Chart:
    """Learners that stay identical have the rounding of the mean as a distance, which would stretch the axis."""
    largest = [max((value for value in one.y if value is not None), default=0.0) for one in series]
    kept = [one for one, most in zip(series, largest, strict=True) if most >= _ROUNDING * max(largest)]
    left_out = ", ".join(one.name for one in series if one not in kept)
    note = f"Not drawn, because it is below {_ROUNDING:g} of the largest: {left_out}." if left_out else ""
    return _chart(title, "step", "distance from the mean", kept, True, note)


def _statistics(groups: Sequence[Group]) -> Section:
    def curves(*keys: str) -> list[Series]:
        return _each(groups, _valid, lambda row: _part(row, *keys))

    scales = curves("whole", "noise_scale")
    for place, group in enumerate(groups):
        if len(group.runs) == 1:
            pairs = [_part(line, "whole", "interval") for line in _valid(group.runs[0])]
            bands = [[*map(finite, pair)] if isinstance(pair, list | tuple) else [] for pair in pairs]
            low, high = ([one[end] if len(one) == 2 and None not in one else None for one in bands] for end in (0, 1))
            if any(one is not None for one in low):
                scales[place] = replace(scales[place], low=low, high=high)
    losses, note = curves("dynamics", "full_loss"), _INTERVALS if any(one.low is not None for one in scales) else ""
    rates = _each(groups, _valid, _relative_rate)
    charts = [
        _chart("Gradient noise scale", "step", "samples", scales, True, note),
        _chart("Effective learning rate", "step", "effective / set learning rate", rates, False),
        _chart("Loss of the mean weights on the training set", "step", "mean loss", losses, True),
        _distance_chart("Consensus distance at measured steps", curves("spread", "consensus_distance")),
    ]
    return Section(title="Noise statistics", charts=with_values(charts))


def _valid(run: Run) -> list[dict[str, Any]]:
    return [line for line in run.statistics if line.get("valid")]


def _relative_rate(row: dict[str, Any]) -> Any:
    rate, lr = finite(_part(row, "dynamics", "effective_lr")), finite(_part(row, "dynamics", "lr"))
    return rate / lr if rate is not None and lr else None


def _losses_of(run: Run) -> Chart:
    """The losses of the learners at each step, if the run has recorded its steps."""
    at_step: dict[int, list[float]] = {}
    for line in chain.from_iterable(run.steps.values()):
        losses = line.get("loss")
        for loss in map(finite, losses if isinstance(losses, list) else ()):
            if loss is not None:
                at_step.setdefault(line["step"], []).append(loss)
    steps = sorted(at_step)
    found = [at_step[step] for step in steps]
    several = any(len(values) > 1 for values in found)
    band: dict[str, Any] = {"low": [*map(min, found)], "high": [*map(max, found)]} if several else {}
    series = Series(name="median", x=steps, y=[*map(statistics.median, found)], **band)
    note = "The median of the learners, with a band from the smallest to the largest." if band else ""
    return _chart(f"Loss of the learners: {run.label}", "step", "loss of a mini-batch", [series], True, note)


def _topologies(groups: Sequence[Group]) -> Section:
    """Each topology once, with the groups that have it."""
    found: dict[str, tuple[list[str], dict[str, Any], str]] = {}
    for group in groups:
        for run in group.runs:
            drawn, name = run.header.get("topology"), str(get(run.header["config"], "strategy.topology"))
            if not isinstance(drawn, dict) or not isinstance(drawn.get("edges"), list):
                continue
            if type(num := drawn.get("num_learners")) is int and 0 <= num <= MOST_DRAWN:
                names, *_ = found.setdefault(f"{name} {drawn}", ([], drawn, name))
                names += [group.name] if group.name not in names else []
    charts = []
    for names, drawn, name in found.values():
        gap = finite(drawn.get("spectral_gap"))
        title = f"{'; '.join(names)}: {name}" if len(found) > 1 else name
        title += "" if gap is None else f", spectral gap {gap:.4g}"
        charts.append(network(title, drawn["num_learners"], drawn["edges"]))
    return Section(title="Topologies", charts=with_values(charts))


def _each(groups: Sequence[Group], rows: Rows, value: Value, x_key: str = "step") -> list[Series]:
    """A curve for each group: of several runs the mean at each step of those that reached it, with a band."""
    curves = []
    for number, group in enumerate(groups):
        at_step: dict[int, list[tuple[Number, Number]]] = {}
        for row in chain.from_iterable(map(rows, group.runs)):
            at_step.setdefault(row["step"], []).append((finite(row.get(x_key)), finite(value(row))))
        points = [at_step[step] for step in sorted(at_step)]
        x, y = ([mean_of([pair[part] for pair in pairs]) for pairs in points] for part in (0, 1))
        band: dict[str, Any] = {}
        if len(group.runs) > 1:
            known = [[one for _, one in pairs if one is not None] for pairs in points]
            band = {name: [end(ones, default=None) for ones in known] for name, end in (("low", min), ("high", max))}
        style = "line+points" if 0 < len(x) <= 30 else "line"
        curves.append(Series(name=group.name, x=x, y=y, style=style, color=number, **band))
    return curves


def _chart(title: str, x_label: str, y_label: str, series: Sequence[Series], log_y: bool, note: str = "") -> Chart:
    """A chart without empty curves. Its axis is logarithmic only where it can show all values."""
    found = [one for one in series if any(value is not None for value in one.y)]
    log_y = log_y and all(value > 0 for one in found for value in one.y if value is not None)
    return Chart(title=title, x_label=x_label, y_label=y_label, series=found, log_y=log_y, note=note)


def _part(row: dict[str, Any], part: str, key: str) -> Any:
    values = row.get(part)
    return values.get(key) if isinstance(values, dict) else None


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


RISE = 0.1  # of the loss, for the width of a level set
_METRICS = {"train_loss": "Loss", "ratio": "|Smallest / largest eigenvalue|"}


def curvature_sections(runs: Sequence[Run], colors: Sequence[int]) -> list[Section]:
    """The Hessian along the runs, and their landscapes, with one scale of colours for each plane and metric."""
    return [_hessian(runs, colors), _landscapes(runs)]


def _hessian(runs: Sequence[Run], colors: Sequence[int]) -> Section:
    def chart(title: str, y_label: str, value: Callable[[dict[str, Any]], Number], note: str = "") -> Chart:
        series = []
        for run, color in zip(runs, colors, strict=True):
            x, y = [line["step"] for line in run.hessian], [*map(value, run.hessian)]
            series.append(Series(name=run.label, x=x, y=y, style="line+points", color=color))
        return _chart(title, "step", y_label, series, False, note)

    alike = "The number that {} alike in all directions would have is 1 / P for each eigenvector, with P weights."
    charts = [
        chart("Largest eigenvalue of the Hessian", "largest eigenvalue", lambda line: _first(line.get("largest"))),
        chart("Smallest eigenvalue of the Hessian", "smallest eigenvalue", lambda line: finite(line.get("smallest"))),
        chart(
            "Disagreement along the top eigenvectors", "share of the squared distance from the mean",
            lambda line: _sum(line.get("disagreement")), alike.format("a disagreement"),
        ),
        chart(
            "Gradient noise along the top eigenvectors", "share of the squared noise",
            lambda line: _sum(line.get("noise_shares")), alike.format("a noise"),
        ),
    ]  # fmt: skip
    return Section(title="Hessian along the run", charts=with_values(charts))


def _first(values: Any) -> Number:
    return finite(values[0]) if isinstance(values, list) and values else None


def _sum(values: Any) -> Number:
    numbers = [finite(value) for value in values] if isinstance(values, list) and values else [None]
    return None if None in numbers else sum(value for value in numbers if value is not None)


def _landscapes(runs: Sequence[Run]) -> Section:
    planes = sorted({stem for run in runs for stem in run.landscapes})
    found = {plane: {run.label: run.landscapes[plane] for run in runs if plane in run.landscapes} for plane in planes}
    charts = []
    for plane, surfaces in found.items():
        for metric, title in _METRICS.items():
            needed = {"min_eig", "max_eig"} if metric == "ratio" else {metric}
            having = {name: one for name, one in surfaces.items() if needed <= one.values.keys()}
            charts += surface_charts({f"{title}, {name}: {plane}": one for name, one in having.items()}, metric)
    lines = ["Pictures of one kind and one plane have the same scale of colours."] if len(charts) > 1 else []
    return Section(title="Landscapes", lines=lines, tables=[_table(found)] if found else [], charts=charts)


def _table(found: dict[str, dict[str, Surface]]) -> TableData:
    headings = ["landscape", "points", "lowest loss", "highest loss", f"radius of the set at lowest + {RISE:g}"]
    rows = []
    for name, surface in [(f"{name}: {plane}", one) for plane, own in found.items() for name, one in own.items()]:
        loss = surface.loss[np.isfinite(surface.loss)]
        row = [name, f"{int(surface.done.sum())} of {surface.done.size}"]
        numbers = [loss.min(), loss.max()] if loss.size else []
        numbers += [surface.level_radius(RISE)] if loss.size and surface.done.all() else []
        rows.append([*row, *(f"{value:.4g}" for value in numbers), *["-"] * (3 - len(numbers))])
    return TableData(title="", headings=headings, rows=rows)


MAX_COLUMNS = 400  # of a heat map
_PARTS = {
    "compute": "compute",
    "overlapped": "hidden averaging, at most",
    "exposed": "exposed averaging",
    "seconds": "whole step",
}
_COUNTS = ("forward", "backward", "compute", "exposed")


def timeline_sections(run: Run) -> list[Section]:
    """The section of a run; none if fewer than two ranks have recorded their steps: one rank waits for nobody."""
    found = {}  # by rank, then by step: the recorded lines that have times
    for rank, recorded in run.steps.items():
        if timed := {line["step"]: line for line in recorded if finite(line.get("compute")) is not None}:
            found[rank] = timed
    if len(found) < 2:
        return []
    steps = sorted(set.intersection(*(set(lines) for lines in found.values())))
    headings = ["rank", *(f"{title}, ms" for title in _PARTS.values())]
    rows = [[str(rank), *(_mean(own, steps, key) for key in _PARTS)] for rank, own in found.items()]
    tables = [TableData(title=f"Mean of {len(steps):,} steps", headings=headings, rows=rows), *_waits(found, steps)]
    lines, charts = [], []
    if steps:
        lines = _named(found, steps)
        titles = (("exposed", "Exposed averaging"), ("compute", "Compute"))
        charts = [_heat(found, steps, key, f"{title} of each rank at each step") for key, title in titles]
    return [Section(title=f"Who waits for whom: {run.label}", lines=lines, tables=tables, charts=charts)]


def _mean(lines: Mapping[int, dict[str, Any]], steps: Sequence[int], key: str) -> str:
    values = [value for step in steps if (value := finite(lines[step].get(key))) is not None]
    return f"{1e3 * statistics.fmean(values):.3g}" if values else "-"


def _heat(found: Mapping[int, Any], steps: Sequence[int], key: str, title: str) -> Chart:
    size = -(-len(steps) // MAX_COLUMNS) or 1
    starts, series = range(0, len(steps), size), []
    for rank, lines in found.items():
        seconds = [finite(lines[step].get(key)) for step in steps]
        parts = ([1e3 * one for one in seconds[start : start + size] if one is not None] for start in starts)
        y = [max(part, default=None) for part in parts]
        series.append(Series(name=f"rank {rank}", x=[steps[start] for start in starts], y=y))
    note = f"A column is the largest value of {size} steps." if size > 1 else ""
    return Chart(title=title, kind="heat", x_label="step", y_label="ms", series=series, note=note)


def _waits(found: Mapping[int, Any], steps: Sequence[int]) -> list[TableData]:
    """For each rank, how long it waited for each other rank, summed over the steps; no table if nobody waited."""
    total = {(rank, str(other)): 0.0 for rank in found for other in found}
    for rank, lines in found.items():
        for step in steps:
            waits = lines[step].get("waits")
            for other, seconds in waits.items() if isinstance(waits, dict) else ():
                if (rank, other) in total and finite(seconds) is not None:
                    total[rank, other] += seconds
    if not any(total.values()):
        return []
    rows = [[f"rank {rank}", *(f"{1e3 * total[rank, str(other)]:,.1f}" for other in found)] for rank in found]
    headings = ["waits for, ms in all", *(f"rank {rank}" for rank in found)]
    title = "Time that the rank of a row waited for the rank of a column"
    return [TableData(title=title, headings=headings, rows=rows)]


def _named(found: Mapping[int, Any], steps: Sequence[int]) -> list[str]:
    """A sentence for each rank for which the others wait; none for steps that were recorded without their passes."""
    rows = {rank: [[lines[step].get(key) for key in _COUNTS] for step in steps] for rank, lines in found.items()}
    if any(finite(value) is None for lines in rows.values() for line in lines for value in line):
        return []
    means = {rank: [statistics.fmean(column) for column in zip(*lines, strict=True)] for rank, lines in rows.items()}
    own = {rank: (forward, backward, work - forward - backward) for rank, (forward, backward, work, _) in means.items()}
    return waited_for(own, {rank: mean[3] for rank, mean in means.items()})
