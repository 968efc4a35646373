"""``benchmarks/summarize.py``: the summary and the rows of a run of ``run_gpu.sh``."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

_spec = importlib.util.spec_from_file_location("summarize", ROOT / "benchmarks" / "summarize.py")
summarize = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(summarize)


def lines(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spread = {"p20": 0.5, "p50": 0.75, "p80": 1.0}
    lines(
        tmp_path / "kernels.jsonl",
        {"case": "sgd_step_", "numel": 1000, "dtype": "float32", "seconds": spread, "gb_per_s": 10.0, "commit": "aa"}
        | {"fraction_of_copy": 0.9, "ratio": spread, "baseline": "torch"},
    )
    side = {
        "comparison": "A / B",
        "list": "lenet5",
        "dtype": "float32",
        "ms": spread,
        "ratio": spread,
        "device": "cuda",
    }
    environment = {"device": "A GPU", "commit": None}
    result = {"environment": environment, "rows": [{**side, "implementation": name} for name in "AB"]}
    (tmp_path / "optim-float32.json").write_text(json.dumps(result))
    (tmp_path / "gpu.csv").write_text(
        "name, driver_version, clocks.current.sm [MHz]\nA GPU, 1.2, 900\nA GPU, 1.2, 1000\nA GPU, 1.2, 1700\n"
    )
    lines(
        tmp_path / "steps.jsonl",
        {"step": "build", "status": "ok", "seconds": 5, "limit": 9, "note": ""},
        {"step": "pytest", "status": "timeout", "seconds": 9, "limit": 9, "note": "see"},
    )
    monkeypatch.setattr("sys.argv", ["summarize", str(tmp_path), "--commit", "bb"])
    monkeypatch.setattr(
        summarize,
        "machine",
        lambda device: dict.fromkeys(("device", "torch", "cuda", "python", "commit")) | {"kernels": ["cpu", "cuda"]},
    )
    summarize.main()
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["commit"] for row in rows] == ["aa", "bb", "bb"]
    assert rows[1]["device"] == "cuda" and rows[1]["device_name"] == "A GPU"
    for row in rows:
        assert row["gpu"]["driver_version"] == "1.2"
        assert row["gpu"]["clocks.current.sm [MHz]"] == {"min": 900, "median": 1000, "max": 1700}
    text = (tmp_path / "summary.md").read_text()
    assert "Cut short or not begun: pytest." in text
    assert "| sgd_step_ | 1,000 | float32 | 750.0000 | 10.0 | 90% | 0.75 [0.50-1.00] | torch |" in text
    assert text.count("| A / B |") == 1
    assert "commit bb" in text
    assert "compiled kernels: cpu, cuda" in text


def test_rows_that_were_cut_are_left_out(tmp_path: Path) -> None:
    """A clock cut from 1700 to 17 is no sample, nor is a line of fewer columns; a row behind a cut one is lost too."""
    clocks = tmp_path / "gpu.csv"
    clocks.write_text("name, clocks.sm [MHz]\nA GPU, 900\nUnknown Error\nA GPU, 17")
    assert summarize.clocks(clocks) == {"name": "A GPU", "clocks.sm [MHz]": {"min": 900, "median": 900, "max": 900}}
    rows = tmp_path / "kernels.jsonl"
    rows.write_text('{"case": 1}\n{"case": 2, "nu{"case": 3}\n{"case": 4}\n{"case": 5, "numel": 1')
    assert summarize.json_lines(rows) == [{"case": 1}, {"case": 4}]


def test_an_empty_folder_has_a_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["summarize", str(tmp_path)])
    summarize.main()
    assert "nothing" in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "results.jsonl").read_text() == ""
