"""The bench's table, from plain records."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from ddpcore.bench.run import parts
from ddpcore.display.table import print_parts, table_of

ABOUT = {"model": "mlp", "dataset": "mnist", "batch_size": 256, "steps": 30}


def row(**values: Any) -> dict[str, Any]:
    given = {
        "strategy": "ssgd",
        "topology": None,
        "world_size": 4,
        "samples_per_s": 12345.6,
        "step_ms": {"p20": 1.234, "p50": 2.345, "p80": 3.456},
        "exposed_comm_ms": 0.5,
        "bytes_per_step": 1500.0,
        "loss_first": 2.3,
        "loss_last": 1.25,
        "test_error_pct": 7.125,
        "consensus_distance": 0.00123,
        "ratio_to_ddp": 1.5,
    }
    return given | values


def text_of(*rows: dict[str, Any], width: int = 400, **environment: Any) -> str:
    given = {
        "device": "A Processor",
        "cores": 8,
        "threads_per_rank": 2,
        "torch": "2.10",
        "ddpcore": "0.1",
        "commit": "abc123",
        "backend": "gloo",
        "backend_reason": "ranks on the CPU",
        "transport": "shm",
        "transport_reason": "4 ranks on one host",
        "oversubscribed": False,
        "notes": [],
    }
    file = io.StringIO()
    result = {**ABOUT, "environment": given | environment, "rows": list(rows)}
    print_parts(Console(file=file, width=width), *parts(result))
    return file.getvalue()


def test_numbers() -> None:
    text = text_of(row(strategy="dpsgd", topology="ring"))
    line = next(line for line in text.splitlines() if "dpsgd" in line)
    cells = [cell.strip() for cell in line.strip("│┃| ").split("│")]
    assert cells == [
        "dpsgd ring",
        "7.12",
        "1.250",
        "12,346",
        "1.50x",
        "0.50",
        "1.23/2.35/3.46" if "2.35" in line else "1.23/2.34/3.46",
        "1.5",
        "2.300",
        "1.23e-03",
    ]


def test_what_is_not_known_is_a_dash_and_never_a_zero() -> None:
    unknown = dict.fromkeys(
        ["exposed_comm_ms", "bytes_per_step", "test_error_pct", "consensus_distance", "ratio_to_ddp", "loss_first"]
    )
    lines = [line for line in text_of(row(), row(**unknown)).splitlines() if "ssgd" in line]
    assert lines[1].count(" - ") == len(unknown)
    alone = text_of(row(**unknown))
    assert " - " not in alone, "a column that no row has a number for is left out"
    assert "samples/s" in alone
    assert "exposed" not in alone


def test_a_diverged_run_says_so() -> None:
    assert "diverged" in text_of(row(loss_last=None))
    assert "diverged" not in text_of(row())


def test_the_environment() -> None:
    text = text_of(row(), notes=["ddp is left out"])
    for part in ("A Processor", "8 cores", "2 threads a rank", "torch 2.10", "abc123", "gloo: ranks on the CPU"):
        assert part in text
    assert "ddp is left out" in text
    assert "mlp on mnist, global batch 256, 30 steps" in text
    assert "oversubscribed" not in text
    assert "oversubscribed" in text_of(row(), oversubscribed=True)
    assert "installed" in text_of(row(), commit=None)


def test_a_narrow_table_leaves_columns_out_and_names_them() -> None:
    """First those that are the same in all rows, with their text, then the last ones."""
    rows = [
        row(strategy="local_sgd", loss_last=1.0, samples_per_s=2.0),
        row(strategy="dpsgd", topology="one_peer_exponential", exposed_comm_ms=0.25, ratio_to_ddp=2.0),
    ]
    text = text_of(*rows, width=80)
    table = [line for line in text.splitlines() if line[:1] in "┏┃┡│└"]
    assert max(map(len, table)) <= 80
    assert len([line for line in table if line.startswith("│")]) == 2, "no cell is wrapped"
    shown = " ".join(table[1:-1])
    assert all(name in shown for name in ("samples/s", "loss", "exposed", "one_peer_exponential"))
    hidden = next(line for line in text.splitlines() if line.startswith("--wide also shows: "))
    assert "kB/step (1.5 in all rows)" in hidden and "loss first (2.300 in all rows)" in hidden
    assert not any(name in line for line in table for name in ("consensus", "kB/step"))
    assert "--wide" not in text_of(*rows)


def test_a_narrow_table_keeps_what_was_asked_for() -> None:
    columns = {name: lambda row, name=name: row[name] for name in ("name", "first", "type", "last", "wanted")}
    rows = [{"name": f"n{place}", "first": "x" * 30, "type": "float", "last": "y" * 20 + str(place), "wanted": "same"}
            for place in range(2)]  # fmt: skip
    file = io.StringIO()
    table = table_of(columns, rows, left=("name",), asked=("wanted",))
    print_parts(Console(file=file, width=44), table)
    text = file.getvalue()
    assert text.count("same") == 2 and text.count("y" * 20) == 2
    assert f"--wide also shows: first ({'x' * 30} in all rows), type (float in all rows)" in text
    file = io.StringIO()
    print_parts(Console(file=file, width=20), table_of(columns, rows, left=("name",), asked=("wanted",)))
    assert "wanted" in file.getvalue().split("--wide")[0] and "last" in file.getvalue().split("--wide")[1]


def test_a_pipe_shows_all_columns(capsys: pytest.CaptureFixture[str]) -> None:
    columns = {name: lambda row: "x" * 30 for name in ("one", "two", "three", "four")}
    print_parts(None, table_of(columns, [{}], left=("one",)))
    out = capsys.readouterr().out
    assert out.count("x" * 30) == 4 and "--wide" not in out


def test_what_was_seen() -> None:
    text = text_of(
        row(strategy="ddp", ratio_to_ddp=1.0, test_error_pct=5.0),
        row(strategy="ssgd", ratio_to_ddp=1.2, test_error_pct=4.0),
        row(strategy="dpsgd", topology="ring", ratio_to_ddp=1.6, loss_last=None, test_error_pct=None),
    )
    assert "speed: dpsgd ring trains 1.60 times as many samples a second as ddp" in text
    assert "one seed: ssgd 4.0 %, ddp 5.0 %" in text
    assert "dpsgd ring diverged: take a smaller optimizer.lr" in text


def test_one_line_a_strategy() -> None:
    names = ["ddp", "ssgd", "local_sgd", "single"]
    text = text_of(*(row(strategy=name) for name in names))
    for name in names:
        assert len([line for line in text.splitlines() if f"│ {name} " in line]) == 1
    assert "…" not in text


@pytest.mark.parametrize("module", ["ddpcore.display.table", "ddpcore.display.chart"])
def test_tables_and_charts_need_no_torch(module: str) -> None:
    """The module itself imports none; the package's own front page is kept out of it."""
    code = (
        "import sys, types, pathlib, importlib.util\n"
        "spec = importlib.util.find_spec('ddpcore')\n"
        "package = types.ModuleType('ddpcore'); package.__path__ = list(spec.submodule_search_locations)\n"
        "sys.modules['ddpcore'] = package\n"
        f"import {module}\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_transport_is_told_where_there_is_one() -> None:
    assert "transport shm: 4 ranks on one host" in text_of(row())
    assert "transport" not in text_of(row(), transport=None)


def test_names_cannot_write_markup_or_escape_codes() -> None:
    out = io.StringIO()
    console = Console(file=out, width=160)
    rows = [{"name": "[red]x[/red] \x1b[2J\ny"}]
    print_parts(
        console, "a line\x1b[31m", table_of({"name": lambda row: row["name"]}, rows, left=("name",), title="[b]t")
    )
    text = out.getvalue()
    assert "\x1b" not in text and r"a line\x1b[31m" in text
    assert r"[red]x[/red] \x1b[2J\ny" in text and "[b]t" in text
