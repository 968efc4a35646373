"""A study is one TOML file: what its rows share, the rows, what was published of them, and the claims."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ddpcore.advice import advice
from ddpcore.engine import TrainConfig
from ddpcore.engine.config import merged, typed_field
from ddpcore.engine.kinds import is_finite
from ddpcore.experiments import claims
from ddpcore.experiments.results import METRICS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parent / "studies"
SCALES = ("smoke", "cpu", "full")
_FIELDS = tuple(item.name for item in fields(TrainConfig))
_TEXTS = list[str]
_TOP = {
    "title": str, "question": str, "source": str, "notes": _TEXTS, "metrics": _TEXTS, "seeds": int,
    "shared": dict, "groups": dict, "scales": dict, "rows": dict, "claims": list,
}  # fmt: skip
# What a row says beside the fields of TrainConfig, and what groups and scales may say of it.
_ROW = {
    "groups": _TEXTS, "published": dict, "scales": dict, "about": str, "ranks": bool, "hosts": int, "kill_rank": int,
}  # fmt: skip
_GROUP = {name: _ROW[name] for name in ("scales", "ranks", "hosts")}
_CLAIM = {"text": str, "source": str, "predicate": str}
_LEAST = {"seeds": 1, "hosts": 1, "kill_rank": 0}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting of a study.

    Attributes:
        name: in its study.
        study: the name of that, or its file.
        layers: fields of :class:`ddpcore.engine.TrainConfig`, from what all rows share to the row's own.
        scales: more layers, for each scale.
        published: metrics that the source printed for it.
        about: what it is, where the name does not say so.
        ranks: each learner is a process, not a virtual learner.
        hosts: machines that the ranks stand for.
        kill_rank: this rank is killed after the first checkpoint, once, and the run goes on from there.
    """

    name: str
    study: str
    layers: Sequence[Mapping[str, Any]]
    scales: Mapping[str, Sequence[Mapping[str, Any]]]
    published: Mapping[str, float]
    about: str = ""
    ranks: bool = False
    hosts: int = 1
    kill_rank: int | None = None

    def config(self, scale: str, overrides: Mapping[str, Any] | None = None) -> TrainConfig:
        """The run at a scale, with fields overridden.

        Raises:
            ValueError: it is no valid run; the message names the study and the row.
        """
        values: dict[str, Any] = {}
        try:
            for layer in (*self.layers, *self.scales.get(scale, ()), overrides or {}):
                values = merged(values, layer)
            config = TrainConfig.from_dict(values)
            if self.kill_rank is not None and not (self.ranks and self.kill_rank < config.learners):
                raise ValueError(
                    f"kill_rank is {self.kill_rank}: its {config.learners} learners must be ranks above it"
                )
            if config.learners % self.hosts:
                raise ValueError(f"learners is {config.learners}: it must be a multiple of hosts, {self.hosts}")
            if self.hosts > 1 and config.strategy != "ddp" and config.transport != "pg":
                raise ValueError(f"transport is {config.transport!r}: hosts share no memory, set it to 'pg'")
        except ValueError as error:
            raise ValueError(f"{self.study}: row {self.name}, scale {scale}: {error}") from None
        return config


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a source says, and the predicate that says whether it is so."""

    text: str
    source: str
    predicate: str


@dataclass(frozen=True, kw_only=True)
class Study:
    """A published experiment.

    Attributes:
        name: of its file.
        title: what it is.
        question: what it asks.
        source: document and table of the published numbers.
        notes: what the document leaves open, and what was chosen here.
        metrics: what is compared; claims are about the first.
        seeds: how many, at each scale.
        selections: the rows that are run at each scale where a command names none; None are all.
        rows: by name.
        claims: of the source, or of this project, whose ``source`` says which.
    """

    name: str
    title: str
    question: str
    source: str
    notes: tuple[str, ...]
    metrics: tuple[str, ...]
    seeds: Mapping[str, int]
    selections: Mapping[str, tuple[str, ...] | None]
    rows: Mapping[str, Row]
    claims: tuple[Claim, ...]

    def chosen(self, names: Sequence[str] | None) -> list[Row]:
        """The rows of these names, all where it is None, in the study's order.

        Raises:
            ValueError: there is no such row; the message has the nearest name.
        """
        for name in names or ():
            if name not in self.rows:
                raise ValueError(f"{self.name} has no row {name!r}: {advice(name, tuple(self.rows))}")
        return [row for row in self.rows.values() if names is None or row.name in names]


def names() -> tuple[str, ...]:
    """The studies that are part of the package."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def load(name: str) -> Study:
    """A study by name, or from a file of one's own, which ends in ``.toml``.

    Raises:
        ValueError: there is none, or its file is damaged; the message has the file, and the line where TOML has one.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not name.endswith(".toml") and name not in names():
        raise ValueError(f"unknown study {name!r}: {advice(name, names())}")
    try:
        return _study(path.stem, name, tomllib.loads(path.read_bytes().decode()))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}): name a study, or its file") from None
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}: line {line} is no UTF-8 text: mend the file") from None
    except RecursionError:
        raise ValueError(f"{path}: it is nested too deeply to be read: mend the file") from None
    except ValueError as error:  # TOMLDecodeError, with line and column, among them
        raise ValueError(f"{path}: {error}") from None


def _study(name: str, called: str, values: Mapping[str, Any]) -> Study:
    _check("the study", values, _TOP)
    for key in ("title", "question", "source", "metrics", "shared", "rows"):
        if key not in values:
            raise ValueError(f"the study has no {key!r}: add it")
    for key in ("metrics", "rows"):
        if not values[key]:
            raise ValueError(f"{key} is empty: name one at least")
    for metric in values["metrics"]:
        _check_metric("metrics", metric)
    if len(set(values["metrics"])) < len(values["metrics"]):
        raise ValueError(f"metrics is {values['metrics']}: name each once")
    scales, groups = values.get("scales", {}), values.get("groups", {})
    seeds = dict.fromkeys(SCALES, values.get("seeds", 1))
    selections: dict[str, tuple[str, ...] | None] = dict.fromkeys(SCALES)
    for scale, layer in _scales("the study", scales, {"seeds": int, "rows": _TEXTS}).items():
        if layer.get("rows") == []:
            raise ValueError(f"scale {scale}: rows is empty: name one at least, or leave it out for all")
        seeds[scale] = layer.get("seeds", seeds[scale])
        selections[scale] = tuple(layer["rows"]) if "rows" in layer else None
    for group, entries in groups.items():
        _check(f"group {group}", entries, _GROUP, _FIELDS)
        _scales(f"group {group}", entries.get("scales", {}))
    _check("shared", values["shared"], {}, _FIELDS)
    shared = values["shared"]
    rows = {key: _row(key, called, entries, shared, groups, scales) for key, entries in values["rows"].items()}
    study = Study(
        name=name,
        title=values["title"],
        question=values["question"],
        source=values["source"],
        notes=tuple(values.get("notes", ())),
        metrics=tuple(values["metrics"]),
        seeds=seeds,
        selections=selections,
        rows=rows,
        claims=tuple(_claim(entries) for entries in values.get("claims", ())),
    )
    for selected in selections.values():
        study.chosen(selected)
    for claim in study.claims:
        claims.check(claim.predicate, tuple(rows), tuple(METRICS))
    return study


def _row(
    name: str, study: str, entries: Any, shared: Mapping[str, Any], groups: Mapping[str, Any], scales: Mapping[str, Any]
) -> Row:
    where = f"row {name}"
    _check(where, entries, _ROW, _FIELDS)
    if not name or name.startswith(".") or set(name) & set('/\\,"'):
        raise ValueError(f"{where}: its name is that of a folder: leave / \\ , and quotes out")
    for group in entries.get("groups", ()):
        if group not in groups:
            raise ValueError(f"{where}: unknown group {group!r}: {advice(str(group), tuple(groups))}")
    for metric, value in entries.get("published", {}).items():
        _check_metric(f"{where}, published", metric)
        if not is_finite(value):
            raise ValueError(f"{where}, published: {metric} is {value!r}: it must be a finite number")
    parts = [*(groups[group] for group in entries.get("groups", ())), entries]
    said = {key: part[key] for part in parts for key in ("ranks", "hosts") if key in part}
    _scales(where, entries.get("scales", {}))
    more = [part.get("scales", {}) for part in parts]
    return Row(
        name=name,
        study=study,
        layers=[shared, *(_fields(part) for part in parts)],
        scales={scale: [_fields(layers[scale]) for layers in (scales, *more) if scale in layers] for scale in SCALES},
        published={metric: float(value) for metric, value in entries.get("published", {}).items()},
        about=entries.get("about", ""),
        kill_rank=entries.get("kill_rank"),
        **said,
    )


def _claim(entries: Any) -> Claim:
    _check("a claim", entries, _CLAIM)
    for key in _CLAIM:
        if key not in entries:
            raise ValueError(f"a claim has no {key!r}: add it")
    return Claim(**entries)


def _fields(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entries.items() if key in _FIELDS}


def _scales(where: str, entries: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """The layers of scales, once they are known to be some."""
    for scale, layer in entries.items():
        if scale not in SCALES:
            raise ValueError(f"{where} has an unknown scale {scale!r}: {advice(scale, SCALES)}")
        _check(f"{where}, scale {scale}", layer, own or {}, _FIELDS)
    return entries


def _check(where: str, entries: Any, own: Mapping[str, Any], more: Sequence[str] = ()) -> None:
    """ValueError unless it is a table of these keys, the first of these types, the others fields of a run."""
    if not isinstance(entries, Mapping):
        raise ValueError(f"{where} is {entries!r}: it must be a table")
    for key, value in entries.items():
        if key not in own and key not in more:
            raise ValueError(f"{where} has an unknown key {key!r}: {advice(key, (*own, *more))}")
        if key in own:
            _check_own(where, key, value, own[key])
            continue
        try:
            typed_field(key, value)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def _check_own(where: str, key: str, value: Any, kind: Any) -> None:
    plain: Any = list if kind is _TEXTS else kind
    if type(value) is not plain:
        raise ValueError(f"{where}: {key} is {value!r}: it must be of type {plain.__name__}")
    if kind is _TEXTS and any(type(item) is not str for item in value):
        raise ValueError(f"{where}: {key} is {value!r}: it must be a list of text")
    if key in _LEAST and value < _LEAST[key]:
        raise ValueError(f"{where}: {key} is {value}: it must be at least {_LEAST[key]}")


def _check_metric(where: str, name: Any) -> None:
    if name not in METRICS:
        raise ValueError(f"{where}: unknown metric {name!r}: {advice(str(name), tuple(METRICS))}")
