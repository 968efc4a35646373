"""A study is one TOML file: settings that all rows share, the rows, their published numbers, and claims about them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import filter as filter_names
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from ddpcore.experiments import claims
from ddpcore.experiments.metrics import METRICS
from ddpcore.options.fields import parse_toml
from ddpcore.options.registry import Registry
from ddpcore.options.typed import check_choice, check_keys, check_range, check_table
from ddpcore.records.run import SECTIONS
from ddpcore.records.study import CLAIM, TABLE, TEXTS, Claim, check_chart
from ddpcore.storage.files import STUDY_BYTES, plain, read_file, shown
from ddpcore.training import TrainConfig
from ddpcore.training.build import needs_ranks
from ddpcore.training.config import check_settings, merged

FOLDER = Path(__file__).parent / "studies"
SCALES = ("smoke", "cpu", "full")
_REQUIRED = {"title": str, "question": str, "source": str, "metrics": TEXTS, "shared": TABLE, "rows": TABLE}
_STUDY = _REQUIRED | {
    "notes": TEXTS, "seeds": int, "groups": TABLE, "scales": TABLE, "charts": tuple[TABLE, ...],
    "claims": tuple[TABLE, ...],
}  # fmt: skip
# Keys that groups and rows have besides the sections of a training run; keys that only rows have.
_GROUP = {"scales": TABLE, "ranks": bool, "hosts": int}
_ROW = _GROUP | {"groups": TEXTS, "published": Mapping[str, float], "about": str, "kill_rank": int}
_SCALE = {"seeds": int, "rows": TEXTS}
_DOTS = 100  # tomllib takes quadratic memory for a name of many parts, a.b.c
_LEAST = {"seeds": 1, "hosts": 1, "kill_rank": 0}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting of a study, which is named by its name or its file."""

    name: str
    study: str
    layers: Mapping[str, Sequence[Mapping[str, Any]]]  # sections of a TrainConfig for each scale; later ones override
    published: Mapping[str, float]  # numbers of the source, by metric
    about: str = ""  # if the name is not enough
    ranks: bool = False  # each learner is a process, not a virtual learner
    hosts: int = 1  # machines that the ranks emulate
    kill_rank: int | None = None  # is killed once, after the first checkpoint; the run then resumes

    def config(self, scale: str, overrides: Mapping[str, Any] | None = None) -> TrainConfig:
        """The training run at a scale. ValueError: it is not valid; the message names the study and the row."""
        values: dict[str, Any] = {}
        try:
            for layer in (*self.layers[scale], overrides or {}):
                values = merged(values, layer)
            config = TrainConfig.from_dict(values)
            strategy = config.strategy
            num = strategy.learners
            if self.kill_rank is not None and not (self.ranks and self.kill_rank < num):
                raise ValueError(f"kill_rank is {self.kill_rank}: set ranks = true and take a rank below {num}")
            if num % self.hosts:
                raise ValueError(f"strategy.learners is {num}: it must be a multiple of hosts, {self.hosts}")
            if self.hosts > 1 and not needs_ranks(config) and strategy.transport != "pg":
                raise ValueError(f"strategy.transport is {strategy.transport!r}: hosts share no memory, set it to 'pg'")
        except ValueError as error:
            raise ValueError(f"{self.study}: row {self.name}, scale {scale}: {error}") from None
        return config


@dataclass(frozen=True, kw_only=True)
class Study:
    """A published experiment, named after its file. docs/experiments.md explains the keys of such a file.

    Claims are about the first of the metrics. ``seeds`` has the number of seeds at each scale, and ``selections`` the
    names or patterns of the rows to run there; None selects all.
    """

    name: str
    title: str
    question: str
    source: str
    notes: tuple[str, ...]
    metrics: tuple[str, ...]
    seeds: Mapping[str, int]
    selections: Mapping[str, Sequence[str] | None]
    rows: Mapping[str, Row]
    charts: tuple[Mapping[str, Any], ...]
    claims: tuple[Claim, ...]

    def chosen(self, names: Sequence[str] | None) -> list[Row]:
        """The rows with these names or shell patterns (``single-*``), or all without names, in the study's order.

        ValueError: there is no such row; the message suggests the nearest name, or lists all.
        """
        patterns = ("*",) if names is None else names
        matches = {key: [key] if key in self.rows else filter_names(self.rows, key) for key in patterns}
        check_keys(f"{self.name}: rows", [key for key, found in matches.items() if not found], self.rows)
        chosen = set().union(*matches.values())
        return [row for name, row in self.rows.items() if name in chosen]


def load_study(path: str | Path, max_bytes: int = STUDY_BYTES) -> Study:
    """The study of a TOML file of at most so many bytes.

    ValueError: the file is not there, too large or damaged; the message names it, and the line of a TOML error.
    """
    path = Path(path)
    name, content = shown(path), b""
    try:
        content = read_file(path, max_bytes, "max_bytes of load_study")
    except OSError as error:
        raise ValueError(f"{name}: cannot be read ({error.strerror}): name a study, or its file") from None
    try:
        if max(line.count(b".") for line in content.split(b"\n")) > _DOTS:
            raise ValueError(f"a line has more than {_DOTS} dots: write names of fewer parts")
        return _study(path.stem, name, parse_toml(content.decode()))
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ValueError(f"{name}: line {line} is no UTF-8 text: repair the file") from None
    except RecursionError:
        raise ValueError(f"{name}: it is nested too deeply to be read: repair the file") from None
    except ValueError as error:  # TOMLDecodeError, with line and column, among them
        raise ValueError(f"{name}: {plain(str(error))}") from None


STUDIES: Registry[Study] = Registry(
    "study", "ddpcore.studies", Study, {path.stem: partial(load_study, path) for path in sorted(FOLDER.glob("*.toml"))}
)


def find_study(name: str) -> Study:
    """A study by name, or from a file of your own, which ends in ``.toml``. ValueError as :func:`load_study`."""
    return load_study(name) if name.endswith(".toml") else STUDIES.build(name)


def _study(name: str, path: str, values: Mapping[str, Any]) -> Study:
    check_table("the study", values, _STUDY, _REQUIRED)
    _check("the study", {key: value for key, value in values.items() if key in ("seeds", "scales")}, _STUDY, _SCALE)
    for key in ("metrics", "rows"):
        if not values[key]:
            raise ValueError(f"{key} is empty: name at least one")
    for metric in values["metrics"]:
        check_choice("a metric", metric, METRICS)
    if len(set(values["metrics"])) < len(values["metrics"]):
        raise ValueError(f"metrics is {values['metrics']}: name each once")
    check_settings(values["shared"], "shared")
    scales, groups = values.get("scales", {}), values.get("groups", {})
    for scale, layer in scales.items():
        if layer.get("rows") == []:
            raise ValueError(f"scale {scale}: rows is empty: name at least one, or leave it out for all")
    for group, entries in groups.items():
        _check(f"group {group}", entries, _GROUP, {})
    rows = {key: _row(key, path, entries, values["shared"], groups, scales) for key, entries in values["rows"].items()}
    for entries in values.get("claims", ()):
        check_table("a claim", entries, CLAIM, required=("text", "source", "predicate"))
        check_claim(entries["predicate"], tuple(rows))
    lists: dict[str, Any] = {key: tuple(values.get(key, ())) for key in ("notes", "metrics", "charts")}
    study = Study(
        name=name,
        **{key: values[key] for key in ("title", "question", "source")},
        **lists,
        seeds={scale: scales.get(scale, {}).get("seeds", values.get("seeds", 1)) for scale in SCALES},
        selections={scale: scales.get(scale, {}).get("rows") for scale in SCALES},
        rows=rows,
        claims=tuple(Claim(**entries) for entries in values.get("claims", ())),
    )
    for selected in study.selections.values():
        study.chosen(selected)
    for spec in study.charts:
        check_chart(spec)
        for key in ("x", "by"):
            if key in spec and "values" not in spec:
                check_keys(f"a chart's {key}", [spec[key].partition(".")[0]], SECTIONS)
        for value, names in product(spec.get("values", ("",)), spec.get("lines", {}).values()):
            study.chosen([one.replace("{x}", str(value)) for one in names])
    return study


def check_claim(predicate: str, rows: Sequence[str] | None = None) -> None:
    """Raise ValueError unless the text is a predicate over these rows (None: any) and :data:`METRICS`."""
    claims.check(predicate, rows, METRICS)


def _row(
    name: str, study: str, entries: Any, shared: Mapping[str, Any], groups: Mapping[str, Any], scales: Mapping[str, Any]
) -> Row:
    where = f"row {name}"
    _check(where, entries, _ROW, {})
    if not name or name.startswith(".") or set(name) & set('/\\,"') or not name.isprintable():
        raise ValueError(f"{where}: its name becomes a folder: leave / \\ , quotes and control characters out")
    for group in entries.get("groups", ()):
        check_choice(f"{where}: a group", group, groups)
    published = entries.get("published", {})
    check_keys(f"{where}, published", published, METRICS)
    parts = [*(groups[group] for group in entries.get("groups", ())), entries]
    own = {key: part[key] for part in parts for key in ("ranks", "hosts") if key in part}
    of_scales = [scales, *(part.get("scales", {}) for part in parts)]
    layers = {scale: [shared, *parts, *(part.get(scale, {}) for part in of_scales)] for scale in SCALES}
    kept = {at: [{key: one[key] for key in SECTIONS if key in one} for one in found] for at, found in layers.items()}
    return Row(
        name=name,
        study=study,
        layers=kept,
        published={metric: float(value) for metric, value in published.items()},
        about=entries.get("about", ""),
        kill_rank=entries.get("kill_rank"),
        **own,
    )


def _check(where: str, entries: Any, hints: Mapping[str, Any], scale_hints: Mapping[str, Any]) -> None:
    """Check a table and its layers for each scale. Keys without a hint are sections of a training run."""
    check_table(where, entries, hints, more_keys=True)
    check_settings({key: value for key, value in entries.items() if key not in hints}, where, tuple(hints))
    for key, least in _LEAST.items():
        check_range(f"{where}: {key}", entries.get(key), least=least)
    layers = entries.get("scales", {})
    check_keys(f"{where}, scales", layers, SCALES)
    for scale, layer in layers.items():
        _check(f"{where}, scale {scale}", layer, scale_hints, {})
