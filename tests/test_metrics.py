"""Metrics by hand-made examples; records that any JSON reader accepts."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from ddpcore import metrics


def test_error_pct() -> None:
    logits = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.4, 0.6], [0.3, 0.7]])
    assert metrics.error_pct(logits, torch.tensor([1, 0, 1, 1])) == 0.0
    assert metrics.error_pct(logits, torch.tensor([1, 0, 0, 1])) == 25.0
    assert metrics.error_pct(logits, torch.tensor([0, 1, 0, 0])) == 100.0


def test_a_diverged_model_is_all_wrong() -> None:
    labels = torch.tensor([0, 1, 0])
    assert metrics.error_pct(torch.full((3, 2), math.nan), labels) == 100.0
    one_nan = torch.tensor([[math.nan, 1.0], [0.0, 1.0], [1.0, 0.0]])
    assert metrics.error_pct(one_nan, labels) == pytest.approx(100 / 3)


@pytest.mark.parametrize(("logits", "labels"), [((4, 2), (3,)), ((4,), (4,)), ((4, 2), (4, 1)), ((0, 2), (0,))])
def test_error_pct_refuses_shapes_that_do_not_fit(logits: tuple[int, ...], labels: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="error_pct"):
        metrics.error_pct(torch.zeros(logits), torch.zeros(labels, dtype=torch.int64))


def test_quantiles() -> None:
    assert metrics.quantiles([5, 1, 4, 2, 3, 6]) == {"p20": 2.0, "p50": 3.5, "p80": 5.0}
    assert metrics.quantiles(iter([7.0])) == {"p20": 7.0, "p50": 7.0, "p80": 7.0}
    assert all(type(value) is float for value in metrics.quantiles(np.arange(5)).values())
    with pytest.raises(ValueError, match="at least one"):
        metrics.quantiles([])


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
    with metrics.Record(path) as record:
        record.append(Row(math.nan, (3,)))
        assert path.read_text() == '{"loss": null, "shape": [3]}\n'  # before close
        record.append({"step": 1, "text": "two\nlines"})
        with metrics.Record(path) as second:
            second.append({"step": 2})
        record.append({"step": 3})
    with metrics.Record(path) as again:
        again.append({"step": 4})
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row.get("step") for row in rows] == [None, 1, 2, 3, 4]
    record.close()


def test_a_row_that_cannot_be_written_leaves_no_trace(tmp_path: Path) -> None:
    with metrics.Record(tmp_path / "one.jsonl") as record:
        with pytest.raises(TypeError):
            record.append({"fine": 1, "bad": object()})
        record.append({"fine": 2})
    assert (tmp_path / "one.jsonl").read_text() == '{"fine": 2}\n'
