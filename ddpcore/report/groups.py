"""Runs whose configs differ in the seed alone are one group, and the page shows what differs between groups."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ddpcore.display.chart import Number, finite
from ddpcore.options.fields import dotted
from ddpcore.records.run import BOOKKEEPING, KEYS_0_2
from ddpcore.report.sources import Run
from ddpcore.storage.files import plain
from ddpcore.topology.describe import MOST_DRAWN

_TOPOLOGY = "strategy.topology"
_PARTS = ("strategy", _TOPOLOGY, "model", "data", "optimizer")  # their values name themselves
_MAIN = (*_PARTS[:2], "strategy.learners", *_PARTS[2:4], "data.batch_size", "optimizer", "optimizer.lr")
_MORE = ("data.shards", "run.epochs", "run.steps")
# Fields of every config; the other keys are options of parts. Version 0.2 had all but three.
_FIELDS = {*KEYS_0_2.values(), "data.learners_batch", "data.balance", "run.statistics_hessian"} - {_TOPOLOGY}
RESULTS = {"accuracy": max, "loss": min, "train_loss": min}  # what a run has reached, and which value is better


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that are shown as one."""

    name: str  # the fields in which the groups differ, with their values
    runs: Sequence[Run]

    def values(self, key: str) -> list[float]:
        """A field of the end or of the last epoch, of each run that has it and has not diverged."""
        kept = [run for run in self.runs if not run.final.get("diverged")]
        return [value for run in kept if (value := finite(last_of(run).get(key))) is not None]

    def text(self, key: str) -> str:
        """:func:`spread_of` the values, and their number if it is not that of the runs."""
        values = self.values(key)
        return spread_of(values) + (f" (n={len(values)})" if 0 < len(values) < len(self.runs) else "")


def last_of(run: Run) -> dict[str, Any]:
    """The fields of the end, and of the last epoch."""
    return {**(run.epochs[-1] if run.epochs else {"step": 0}), **run.final}


def grouped(runs: Sequence[Run], by: Sequence[str] = ()) -> list[Group]:
    """The groups, in the order of their first runs.

    Fields of the config, ``by``, tell the groups apart; (): all that differ, but for the seed. ValueError: no run has
    such a field.
    """
    configs = [config_of(run) for run in runs]
    keys = by or differing(configs)
    for key in by:
        if runs and not any(key in config for config in configs):
            known = ", ".join(differing(configs)) or "none"
            raise ValueError(f"--by {key}: no run has this field: those that differ are {known}")
    found: dict[tuple[str, ...], list[int]] = {}
    for place, config in enumerate(configs):
        found.setdefault(tuple(text_of(config.get(key)) for key in keys), []).append(place)
    groups = []
    for places in found.values():
        config = configs[places[0]]
        words = [_word(key, config[key], keys) for key in keys if config.get(key) is not None]
        name = ", ".join(words) or ", ".join(f"{key} as by default" for key in keys)
        name = name or plain(runs[places[0]].path.parent.resolve().name)
        groups.append(Group(name=name, runs=[runs[place] for place in places]))
    return groups


def config_of(run: Run) -> dict[str, Any]:
    """What a result may depend on, but for the seed: fields with dots, and no topology of a strategy without one."""
    given = dotted(run.header["config"])
    num = given.get("strategy.learners")  # with more than MOST_DRAWN, no topology is recorded
    is_recorded = "topology" in run.header and isinstance(num, int) and num <= MOST_DRAWN
    has_none = is_recorded and run.header["topology"] is None
    left_out = {"run.seed", *BOOKKEEPING, *(key for key in given if has_none and f"{key}.".startswith(f"{_TOPOLOGY}."))}
    return {key: value for key, value in given.items() if key not in left_out}


def differing(configs: Sequence[dict[str, Any]]) -> list[str]:
    """The fields in which configs differ, the main ones first. Another version may lack a field, but not an option."""

    def num_values(key: str) -> int:
        return len({text_of(config.get(key)) for config in configs if key in config or key not in _FIELDS})

    return [key for key in dict.fromkeys([*_MAIN, *chain(*configs)]) if num_values(key) > 1]


def constants(configs: Sequence[dict[str, Any]]) -> str:
    """The main fields that are equal in all configs, and the options of parts."""
    varied, first = differing(configs), configs[0]
    keys = dict.fromkeys([*_MAIN, *_MORE, *(key for key in first if key not in _FIELDS)])
    return ", ".join(_word(key, first[key], keys) for key in keys if key not in varied and first.get(key) is not None)


def _word(key: str, value: Any, keys: Any) -> str:
    short = key.rpartition(".")[2]
    short = short if [one.rpartition(".")[2] for one in keys].count(short) == 1 else key
    return text_of(value) if key in _PARTS else f"{short}={text_of(value)}"


def text_of(value: Any) -> str:
    """A value of a record for a table or a sentence."""
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else plain(str(value))


def ranked(groups: Sequence[Group]) -> tuple[str, list[Group]]:
    """The name of the result that they have, and the groups, best first; those without a result are last."""
    key = next((key for key in RESULTS if any(group.values(key) for group in groups)), "accuracy")
    sign = -1 if RESULTS[key] is max else 1
    return key, sorted(groups, key=lambda group: (not group.values(key), sign * (mean_of(group.values(key)) or 0.0)))


def mean_of(values: Sequence[Number]) -> Number:
    """The mean of those that are known; None if none is."""
    known = [value for value in values if value is not None]
    return sum(value / len(known) for value in known) if known else None  # the sum of huge values may not be finite


def spread_of(values: Sequence[float]) -> str:
    """``mean ± standard deviation``."""
    if len(values) < 2:
        return f"{values[0]:.4g}" if values else "-"
    return f"{mean_of(values):.4g} ± {statistics.stdev(values):.2g}"


def sentences(groups: Sequence[Group]) -> list[str]:
    """What came out: the best group, the next one, and whether their runs overlap; runs that diverged."""
    key, order = ranked(groups)
    title = key.replace("train_", "training ")
    found = [group for group in order if group.values(key)]
    of_groups, lines = [group.values(key) for group in found], []
    texts = [f"{spread_of(values)} ({len(values)} run{'s' * (len(values) > 1)})" for values in of_groups]
    if len(found) == 1:
        lines.append(f"{found[0].name}: {title} {texts[0]}.")
    elif found:
        best, other, *_ = of_groups
        word = "highest" if RESULTS[key] is max else "lowest"
        apart = min(best) > max(other) if RESULTS[key] is max else max(best) < min(other)
        verdict = "each of its runs is better than each of theirs" if apart else "the runs of both overlap"
        verdict = verdict if len(best) > 1 < len(other) else "a single run has no spread, so repeat with other seeds"
        first = f"{found[0].name} has the {word} {title}: {texts[0]}."
        lines.append(f"{first} Next is {found[1].name}: {texts[1]}; {verdict}.")
    for group in groups:
        if num := sum(bool(run.final.get("diverged")) for run in group.runs):
            lines.append(f"Diverged: {num} of {len(group.runs)} runs of {group.name}.")
    return lines
