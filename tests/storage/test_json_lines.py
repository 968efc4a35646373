"""Lines that any JSON reader accepts."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from ddpcore.storage import json_lines as metrics


def test_json_number() -> None:
    assert metrics.json_number(1.5) == 1.5
    assert [metrics.json_number(x) for x in (math.nan, math.inf, -math.inf)] == [None] * 3


@dataclass(frozen=True)
class Row:
    loss: float
    shape: tuple[int, ...]


def test_to_json_reaches_everything() -> None:
    value = {
        "row": Row(math.nan, (1, 2)),
        "list": [Row(0.5, ()), math.inf, {"deep": -math.inf}],
        3: np.float32(0.25),
        "array": np.array([1.0, math.nan]),
        "tensor": torch.tensor([[1, 2]]),
        "scalar": torch.tensor(math.nan),
        "float64": np.float64(math.nan),
        "bool": np.bool_(True),
        "path": Path("a") / "b",
        "set": {3, 1, 2},
        "plain": [None, True, 2, "text"],
    }
    assert metrics.to_json(value) == {
        "row": {"loss": None, "shape": [1, 2]},
        "list": [{"loss": 0.5, "shape": []}, None, {"deep": None}],
        "3": 0.25,
        "array": [1.0, None],
        "tensor": [[1, 2]],
        "scalar": None,
        "float64": None,
        "bool": True,
        "path": "a/b",
        "set": [1, 2, 3],
        "plain": [None, True, 2, "text"],
    }
    json.dumps(metrics.to_json(value), allow_nan=False)
    for stranger in (object(), 1j, Row):
        with pytest.raises(TypeError, match="cannot write"):
            metrics.to_json({"x": stranger})


def test_record_appends_a_line_that_is_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "one.jsonl"
    with metrics.JsonLines(path) as record:
        record.append(Row(math.nan, (3,)))
        assert path.read_text() == '{"loss": null, "shape": [3]}\n'  # before close
        record.append({"step": 1, "text": "two\nlines"})
        with metrics.JsonLines(path) as second:
            second.append({"step": 2})
        record.append({"step": 3})
    with metrics.JsonLines(path) as again:
        again.append({"step": 4})
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row.get("step") for row in rows] == [None, 1, 2, 3, 4]
    record.close()


def test_a_row_that_cannot_be_written_leaves_no_trace(tmp_path: Path) -> None:
    with metrics.JsonLines(tmp_path / "one.jsonl") as record:
        with pytest.raises(TypeError):
            record.append({"fine": 1, "bad": object()})
        record.append({"fine": 2})
    assert (tmp_path / "one.jsonl").read_text() == '{"fine": 2}\n'


def test_the_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    metrics.write_json(path, {"a": float("nan"), "b": [1, 2.5]})
    assert json.loads(path.read_text()) == {"a": None, "b": [1, 2.5]}
    with pytest.raises(TypeError):
        metrics.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": None, "b": [1, 2.5]}, "the old file survives a failed write"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.json"]


def test_rows_end_at_newlines_alone(tmp_path: Path) -> None:
    """JSON allows other characters inside a text at which Python would split lines."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": "one\u2028two\x85"}\n{"b": 2}\n{"c": ')
    assert list(metrics.rows(path)) == [{"a": "one\u2028two\x85"}, {"b": 2}]
