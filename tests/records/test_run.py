"""The record of a run: which line is where, and what is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpcore.records.run import RECORD, RunRecord, rank_of, step_file
from ddpcore.storage.json_lines import write_lines

KINDS = ("run", "resume", "epoch", "statistics", "hessian", "nonfinite", "members", "end")


def test_the_kind_of_a_line_decides_where_it_is(tmp_path: Path) -> None:
    write_lines(tmp_path / RECORD, [{"kind": kind, "step": 3, "config": {}} for kind in KINDS])
    found = RunRecord.read(tmp_path)
    of_kinds = [[found.header], found.resumed, found.epochs, found.statistics, found.hessian, found.nonfinite]
    of_kinds += [found.members, [found.final]]
    assert [[line["kind"] for line in lines] for lines in of_kinds] == [[kind] for kind in KINDS]
    assert not found.problems


@pytest.mark.parametrize("step", [None, "3", 2**60])
def test_lines_without_the_number_of_a_step_are_left_out(step: object, tmp_path: Path) -> None:
    write_lines(tmp_path / RECORD, [{"kind": "run", "config": {}}, {"kind": "epoch", "step": step}])
    assert not RunRecord.read(tmp_path).epochs


def test_names_of_recorded_steps() -> None:
    assert [rank_of(Path(step_file(rank))) for rank in (0, 12, "*", "x", "²")] == [0, 12, None, None, None]
