"""What the page shows: runs, studies and bench results, read from paths (damage is reported), and its parts."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ddpcore.display.chart import Chart
from ddpcore.records.run import LANDSCAPES, RECORD, STEPS, RunRecord, has_step, rank_of, step_file
from ddpcore.records.study import MANIFEST, RESULTS
from ddpcore.records.surface import SUFFIX, Surface, read_surface
from ddpcore.storage.files import plain, shown
from ddpcore.storage.json_lines import read_json, read_lines

_OTHERS = ": the report shows the other lines"


@dataclass(frozen=True, kw_only=True)
class Run(RunRecord):
    """The record of a run, its label, the recorded steps of each rank, and its landscapes."""

    label: str  # the name of its folder, or its path if two folders have the same name
    steps: dict[int, list[dict[str, Any]]]
    landscapes: dict[str, Surface] = field(default_factory=dict)


@dataclass(kw_only=True)
class Sources:
    """All that was found: runs, folders of studies, bench results by file, and what could not be read, a line each."""

    runs: list[Run] = field(default_factory=list)
    studies: list[Path] = field(default_factory=list)
    benches: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)  # the real paths of what was found


def read_sources(paths: Sequence[Path]) -> Sources:
    """Read runs, studies and bench results, each once. A folder that is neither may hold some one level below."""
    found = Sources()
    for path in paths:
        _read(path, found, is_given=True)
    names = [plain(run.path.parent.resolve().name) for run in found.runs]
    for place, name in enumerate(names):
        if names.count(name) == 1:
            found.runs[place] = replace(found.runs[place], label=name)
    return found


def _read(path: Path, found: Sources, is_given: bool) -> bool:
    """Add what is there, or what is wrong with it. False: a folder inside of a given one holds nothing."""
    try:
        if (real := os.path.realpath(path)) in found.seen:
            return True
        if path.is_file():
            found.benches[str(path)] = read_bench(path)
        elif not path.is_dir():
            raise ValueError(f"{path}: there is no such file or folder: check the name")
        elif (path / MANIFEST).is_file() or (path / RESULTS).is_file():
            found.studies.append(path)
        elif (path / RECORD).is_file():
            found.runs.append(read_run(path))
        elif not is_given:
            return False
        else:
            inner = sorted(one for one in path.iterdir() if one.is_dir() and not one.is_symlink())
            held = [_read(one, found, is_given=False) for one in inner]
            if not any(held):
                what = f"neither a run ({RECORD}) nor a study ({MANIFEST})"
                raise ValueError(f"{shown(path)} holds {what}: name another folder")
        found.seen.add(real)
    except ValueError as error:
        found.problems.append(plain(str(error)))
    except OSError as error:
        found.problems.append(plain(f"{path} cannot be read ({error.strerror}): check its name and its permissions"))
    return True


def read_run(path: Path) -> Run:
    """A run, as far as its record can be read. ValueError: the record has no readable line."""
    try:
        record = RunRecord.read(path)
    except OSError as error:
        raise ValueError(plain(f"{path / RECORD} cannot be read ({error.strerror}): it is not shown")) from None
    problems = [f"{plain(problem)}{_OTHERS}" for problem in record.problems]
    header = record.header if isinstance(record.header.get("config"), dict) else {**record.header, "config": {}}
    steps: dict[int, list[dict[str, Any]]] = {}
    for file in _files(path / STEPS, step_file("*"), "steps", problems):
        if (rank := rank_of(file)) is not None:
            steps[rank] = [line for line in _lines(file, problems) if has_step(line)]
    landscapes = _landscapes(path / LANDSCAPES, problems)
    more = {"header": header, "problems": problems, "steps": dict(sorted(steps.items())), "landscapes": landscapes}
    return Run(**{**vars(record), **more}, label=plain(str(path)))


def _landscapes(folder: Path, problems: list[str]) -> dict[str, Surface]:
    """Those that ``ddpcore.experiments landscape`` wrote into a run, by the name of the file."""
    found = {}
    for path in _files(folder, f"*{SUFFIX}", "landscapes", problems):
        try:
            found[plain(path.stem)] = read_surface(path)
        except (ValueError, OSError) as error:
            problems.append(plain(f"{error}: the landscape is not shown"))
    return found


def _files(folder: Path, pattern: str, what: str, problems: list[str]) -> list[Path]:
    try:
        names = sorted(os.listdir(folder))  # not glob, which skips a folder that it may not read
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{plain(str(folder))} cannot be read ({error.strerror}): its {what} are not shown")
        return []
    return [folder / name for name in names if fnmatchcase(name, pattern) and not name.startswith(".")]


def _lines(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The lines that are not damaged."""
    try:
        found = read_lines(path)
    except OSError as error:
        problems.append(plain(f"{path} cannot be read ({error.strerror}): it is not shown"))
        return []
    problems += [f"{plain(problem)}{_OTHERS}" for problem in found.problems]
    return found.rows


def read_bench(path: Path) -> dict[str, Any]:
    """The result of a bench. ValueError: the file is not what a bench writes."""
    try:
        result = read_json(path)
    except ValueError as error:
        if "checksum" in str(error):
            raise ValueError(f"{shown(path)} is damaged: {error}") from None
        advice = "name a folder, or a file that a bench wrote with --json"
        raise ValueError(f"{shown(path)} is no JSON file: {advice}") from None
    if not isinstance(result, dict) or not isinstance(result.get("rows"), list):
        raise ValueError(f"{shown(path)} is not the result of a bench: it has no list of rows: name another file")
    return result


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page: a heading, sentences, tables and charts, in this order."""

    title: str
    lines: Sequence[str] = ()
    tables: "Sequence[TableData]" = ()
    folded: "Sequence[TableData]" = ()  # below the charts, for a reader to open
    charts: Sequence[Chart] = ()
    problems: Sequence[str] = ()  # what could not be read or shown
    charts_first: bool = False  # above the tables


@dataclass(frozen=True, kw_only=True)
class TableData:
    """A table of text: its title, headings, rows, and how many columns on the left are names."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_left: int = 1
