"""``ddpcore report RUNS... --out report.html``."""

import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path

from ddpcore.options.command_line import RUNS, parse
from ddpcore.options.extras import extra
from ddpcore.options.fields import check, field
from ddpcore.report.sources import read_sources
from ddpcore.storage.files import plain, replace_file, shown


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Write one HTML page about runs, studies and bench results."""

    EXAMPLE = "ddpcore report runs/first --out report.html"

    runs: Sequence[Path] = field(MISSING, "folders of runs or of studies, and JSON files of benches", **RUNS)
    out: Path = field(Path("report.html"), "the page to write", is_file=True)
    by: Sequence[str] = field(
        (), "group the runs by these fields, such as strategy, in place of all that differ", nargs="+", type=str,
        metavar="FIELD",
    )  # fmt: skip
    figures: Path | None = field(None, "also write each chart into this folder, as PDF, SVG and CSV", metavar="DIR")

    def __post_init__(self) -> None:
        check(self)
        if self.out.exists() and any(run.exists() and run.samefile(self.out) for run in self.runs):
            raise ValueError(f"--out: {shown(self.out)} is one of the files to show: name another file")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page. Returns 0, or 1 if something named could not be shown, 2 if the command is wrong."""
    try:
        options = parse(ReportOptions, argv, prog="ddpcore report")
        with extra("report"):
            return _write(options)
    except (ValueError, OSError) as error:
        print(f"ddpcore report: {plain(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _write(options: ReportOptions) -> int:
    from ddpcore.report.page import page_of, sections_of, write_figures  # noqa: PLC0415  a missing package is one line

    sources = read_sources(options.runs)
    sections = sections_of(sources, options.by)
    problems = [problem for section in sections for problem in section.problems]
    for problem in problems:
        print(f"ddpcore report: {plain(problem)}", file=sys.stderr)
    if not any(section.lines or section.tables or section.charts for section in sections):
        return 2
    replace_file(options.out, page_of(sections).encode())
    if options.figures is not None:
        print(f"{write_figures(sections, options.figures)} charts as PDF, SVG and CSV: {plain(str(options.figures))}")
    words = {"runs": "run", "studies": "study", "benches": "bench"}
    counts = [(len(getattr(sources, many)), one, many) for many, one in words.items()]
    told = ", ".join(f"{num} {one if num == 1 else many}" for num, one, many in counts if num)
    print(f"{told}: {plain(str(options.out))}, {options.out.stat().st_size / 1e6:.1f} MB")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
