"""The record, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddpcore.training import RunRecord, TrainConfig, train
from ddpcore.training.loop import RunWriter

HEADER = {"kind": "run", "config": {}, "total_steps": 9}


def epoch(step: int) -> dict[str, Any]:
    return {"kind": "epoch", "epoch": step, "step": step, "accuracy": step / 10, "consensus_distance": None}


def test_what_comes_after_the_step_is_dropped(tmp_path: Path) -> None:
    with RunWriter(tmp_path, HEADER) as out:
        for row in (epoch(1), epoch(2), epoch(3), {"kind": "end", "step": 3}):
            out.write(row)
    assert RunRecord.read(tmp_path).final["step"] == 3
    with RunWriter(tmp_path, {"total_steps": 9}, {"kind": "resume", "step": 2}) as out:
        out.write(epoch(3))
    record = RunRecord.read(tmp_path)
    assert [row["step"] for row in record.epochs] == [1, 2, 3]
    assert (record.header, record.final) == (HEADER, {})
    assert [row["step"] for row in record.resumed] == [2]
    with RunWriter(tmp_path, HEADER):
        pass
    assert RunRecord.read(tmp_path).epochs == []


def test_files_that_are_not_a_record(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no record of a run"):
        RunRecord.read(tmp_path)
    (tmp_path / "record.jsonl").write_text(json.dumps(HEADER) + "\n{\n")
    (problem,) = RunRecord.read(tmp_path).problems
    assert "line 2 is no JSON" in problem
    (tmp_path / "record.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(ValueError, match="no line is of kind run: the file is damaged"):
        train(TrainConfig.from_dict({"run": {"steps": 1}}), out=tmp_path, resume=True)
    assert (tmp_path / "record.jsonl").read_text() == '{"a": 1}\n'
