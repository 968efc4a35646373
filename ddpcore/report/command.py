"""``ddpcore report RUNS... --out report.html`` and ``ddpcore report serve RUNS...``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from ddpcore.options.command_line import parse
from ddpcore.options.fields import check, field
from ddpcore.report.figures import write_figures
from ddpcore.report.page import check_report, page_with, sections_of
from ddpcore.report.serve import serve
from ddpcore.report.sources import Sources, read_sources
from ddpcore.storage.files import replace_file
from ddpcore.storage.limits import plain, shown

_RUNS = "folders of runs or of studies, and JSON files of benches"


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Write one HTML page about runs, studies and bench results.

    Raises:
        ValueError: an option has a value that is not allowed.
    """

    EXAMPLE = "ddpcore report runs/first --out report.html"

    runs: Sequence[Path] = field(MISSING, _RUNS, positional=True, nargs="+", type=Path, metavar="RUN")
    out: Path = field(Path("report.html"), "the page to write", is_file=True)
    baseline: Sequence[Path] | None = field(
        None, "what to compare with: the page marks what moved by more than its spread", nargs="+", type=Path,
        metavar="RUN",
    )  # fmt: skip

    by: Sequence[str] = field(
        (), "group the runs by these fields, such as strategy, in place of all that differ", nargs="+", type=str,
        metavar="FIELD",
    )  # fmt: skip
    figures: Path | None = field(None, "also write each chart into this folder, as PDF, SVG and CSV", metavar="DIR")

    def __post_init__(self) -> None:
        check(self)
        if self.out.exists() and any(run.exists() and run.samefile(self.out) for run in self.runs):
            raise ValueError(f"--out: {shown(self.out)} is one of the files to show: name another file")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Serve the page of runs in progress on 127.0.0.1; it loads itself again when the runs have changed.

    Raises:
        ValueError: an option has a value that is not allowed.
    """

    EXAMPLE = "ddpcore report serve runs/first"

    runs: Sequence[Path] = field(MISSING, _RUNS, positional=True, nargs="+", type=Path, metavar="RUN")
    port: int = field(8080, "of 127.0.0.1; 0 takes a free one", least=0, below=65536, metavar="N")
    every: float = field(5.0, "seconds between two looks at the runs", above=0, below=1e6, metavar="SECONDS")

    def __post_init__(self) -> None:
        check(self)


def run_command(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0, or 1 if something named could not be shown, 2 if the command is wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    is_serve = words[:1] == ["serve"]
    kind: type[Any] = ServeOptions if is_serve else ReportOptions
    prog = "ddpcore report" + (" serve" if is_serve else "")
    about = (kind.__doc__ or "").splitlines()[0]
    more = "" if is_serve else "A run in progress: ddpcore report serve RUN ..."
    try:
        options = parse(kind, words[is_serve:], prog=prog, description=about, epilog=more)
        check_report()
        return _serve(options) if is_serve else _write(options)
    except (ValueError, OSError) as error:
        print(f"ddpcore report: {plain(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _write(options: ReportOptions) -> int:
    sources = read_sources(options.runs)
    baseline = None if options.baseline is None else read_sources(options.baseline)
    sections = sections_of(sources, baseline, options.by)
    problems = [problem for section in sections for problem in section.problems]
    for problem in problems:
        print(f"ddpcore report: {plain(problem)}", file=sys.stderr)
    if not any(section.lines or section.tables or section.charts for section in sections):
        return 2
    replace_file(options.out, page_with(sections).encode())
    if options.figures is not None:
        num = write_figures(sections, options.figures)
        print(f"{num} charts as PDF, SVG and CSV: {plain(str(options.figures))}")
    print(f"{_count(sources)}: {plain(str(options.out))}, {options.out.stat().st_size / 1e6:.1f} MB")
    return 1 if problems else 0


def _serve(options: ServeOptions) -> int:
    for problem in read_sources(options.runs).problems:
        print(f"ddpcore report: {plain(problem)}", file=sys.stderr)
    serve(options.runs, options.port, options.every)
    return 0


def _count(sources: Sources) -> str:
    found = (
        (sources.runs, "run", "runs"),
        (sources.studies, "study", "studies"),
        (sources.benches, "bench", "benches"),
    )
    return ", ".join(f"{len(items)} {one if len(items) == 1 else many}" for items, one, many in found if items)
