"""The tables that the report shows of ``benchmarks/bench_optim.py``, from plain records."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from ddpcore.bench.step_times import parts
from ddpcore.display.table import print_parts

COMPARISON = "FusedSGD / torch SGD"


def row(implementation: str, **values: Any) -> dict[str, Any]:
    ours = implementation == "FusedSGD"
    given = {
        "comparison": COMPARISON,
        "implementation": implementation,
        "list": "lenet5",
        "ms": {"p20": 0.125, "p50": 0.25, "p80": 0.5},
        "ratio": {"p20": 0.4, "p50": 0.5, "p80": 0.625},
        "bytes_per_param": 20 if ours else None,
        "bytes_per_param_uncached": 28 if ours else None,
        "gb_per_s": 12.5 if ours else None,
        "copy_gb_per_s": 25.0,
    }
    return given | values


def text_of(*rows: dict[str, Any], comparisons: tuple[str, ...] = (COMPARISON,)) -> str:
    environment = {
        "device": "A Processor", "threads": 2, "cores": 8, "torch": "2.10", "ddpcore": "0.1", "commit": None,
        "dtype": "float32", "notes": ["left out: [bench]"],
    }  # fmt: skip
    lists = [
        {"list": "lenet5", "title": "LeNet-5", "parameters": 69656, "num_tensors": 10},
        {"list": "bert-base", "title": "BERT-base", "parameters": 109482240, "num_tensors": 199},
    ]
    file = io.StringIO()
    result = {"environment": environment, "lists": lists, "comparisons": list(comparisons), "rows": list(rows)}
    print_parts(Console(file=file, width=400), *parts(result))
    return file.getvalue()


def test_numbers() -> None:
    text = text_of(row("FusedSGD"), row("torch SGD", ms={"p20": 0.4, "p50": 0.512, "p80": 0.6}))
    for part in ("A Processor, 2 of 8 cores", "installed", "float32", "left out: [bench]", "69,656 in 10"):
        assert part in text
    assert "0.40/0.50/0.62 (0.25 / 0.512)" in text
    cells = [cell.strip() for cell in text.splitlines()[-2].strip("│").split("│")]
    assert cells == ["FusedSGD", "LeNet-5", "0.125/0.25/0.5", "20 to 28", "12.5", "25.0", "50%"]


def test_times_of_a_busy_machine_are_called_so() -> None:
    calm = {"p20": 0.4, "p50": 0.512, "p80": 0.6}
    text = text_of(row("FusedSGD"), row("torch SGD", ms=calm))
    assert "busy machine: in 1 of 2 rows the p80 is more than twice the p20" in text
    assert "busy" not in text_of(row("FusedSGD", ms=calm), row("torch SGD", ms=calm))


def test_what_was_not_measured_is_a_dash() -> None:
    """A list without any measurement has no column."""
    text = text_of(row("FusedSGD"), row("torch SGD"), comparisons=(COMPARISON, "peer / FusedSGD"))
    (line,) = (line for line in text.splitlines() if "peer / FusedSGD" in line)
    assert line.count(" - ") == 1
    assert "BERT-base" not in text


def test_a_step_is_listed_once() -> None:
    again = row("FusedSGD", comparison="peer / FusedSGD", gb_per_s=99.0)
    text = text_of(row("FusedSGD"), row("torch SGD"), again, comparisons=(COMPARISON, "peer / FusedSGD"))
    assert "99.0" not in text
