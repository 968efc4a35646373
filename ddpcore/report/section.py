"""A part of the page as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddpcore.display.chart import Chart


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page: a heading, sentences, tables and charts, in this order."""

    title: str
    lines: Sequence[str] = ()
    tables: Sequence[TableData] = ()
    folded: Sequence[TableData] = ()  # below the charts, for a reader to open
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
