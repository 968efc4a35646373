"""The table of operations and transports, from plain records."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from ddpcore.bench.comm import parts
from ddpcore.display.table import print_parts

ENVIRONMENT = {
    "device": "a machine", "cores": 2, "threads_per_rank": 1, "torch": "2", "ddpcore": "0", "commit": None,
    "backend": "gloo", "backend_reason": "ranks on the CPU", "transport": None, "transport_reason": None,
    "oversubscribed": False, "notes": [],
}  # fmt: skip


def row(op: str, transport: str, size: int) -> dict[str, Any]:
    return {
        "op": op, "transport": transport, "size_bytes": size, "count": size // 4, "type": "float",
        "time_us": {"p50": 1234.56, "p99": 2000.0}, "algbw_gb_per_s": 1.0, "busbw_gb_per_s": 1.5, "num_wrong": 3,
        "repeats": 9,
    }  # fmt: skip


def test_columns_and_order() -> None:
    """As nccl-tests has them; by operation and then by size, transports beside each other."""
    rows = [row(op, by, size) for size in (2**15, 2**21) for op in ("mix", "exchange") for by in ("shm", "pg")]
    file = io.StringIO()
    print_parts(Console(file=file, width=400), *parts({"environment": ENVIRONMENT, "world_size": 4, "rows": rows}))
    lines = [line for line in file.getvalue().splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    assert cells[0] == ["mix", "shm", "32.00 KiB", "8,192", "float", "1,234.6", "2,000.0", "1.00", "1.50", "3"]
    assert [(one[0], one[2], one[1]) for one in cells] == [
        (op, size, by) for op in ("mix", "exchange") for size in ("32.00 KiB", "2.00 MiB") for by in ("shm", "pg")
    ]
