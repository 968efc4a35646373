"""The sweep of bucket sizes as text, from plain records."""

from __future__ import annotations

import io
import math
from typing import Any

from rich.console import Console

from ddpcore.bench.buckets import parts, recommendation
from ddpcore.bench.command import size_name
from ddpcore.display.table import print_parts

ENVIRONMENT = {
    "device": "a machine", "cores": 2, "threads_per_rank": 1, "torch": "2", "ddpcore": "0", "commit": None,
    "backend": "gloo", "backend_reason": "ranks on the CPU", "transport": "shm", "transport_reason": "one host",
    "oversubscribed": False, "notes": ["a note"],
}  # fmt: skip
ROW = {
    "strategy": "ssgd", "bucket_mb": 5.0, "same_buckets_mb": [], "num_buckets": 2, "bucket_bytes": [2**20, 3 * 2**20],
    "num_sent": 1, "sent_bytes": [2**22],
    "step_ms": {"p20": 1.0, "p50": 2.0, "p80": 3.0}, "comm_ms": 4.0, "exposed_comm_ms": 1.0, "overlap_pct": 75.0,
}  # fmt: skip
ADVICE = {
    "strategy": "ssgd", "bucket_mb": 5.0, "fastest_mb": 5.0, "default_mb": 25.0, "margin_pct": 12.34, "noise_pct": 3.0,
    "beyond_noise": True, "rounds": 9,
}  # fmt: skip


def text_of(*rows: dict[str, Any], recommended: list[dict[str, Any]]) -> str:
    file = io.StringIO()
    result = {"model": "vit", "world_size": 4, "batch_size": 32, "rounds": 9, "environment": ENVIRONMENT}
    print_parts(Console(file=file, width=400), *parts(result | {"rows": list(rows), "recommended": recommended}))
    return file.getvalue()


def test_sizes() -> None:
    assert [size_name(mb) for mb in (0.25, 25.0, math.inf, None)] == ["0.25 MiB", "25 MiB", "one bucket", "one bucket"]


def test_cells_and_the_last_line() -> None:
    lines = text_of(ROW, ROW | {"bucket_mb": None, "overlap_pct": None}, recommended=[ADVICE]).splitlines()
    first, second = ([cell.strip() for cell in line.strip("│").split("│")] for line in lines if "ssgd " in line[:9])
    assert first == ["ssgd", "5 MiB", "2 (<= 3)", "1 (<= 4)", "1.00/2.00/3.00", "4.00", "1.00", "75 %"]
    assert (second[1], second[-1]) == ("one bucket", "-")
    assert lines[-1] == recommendation([ADVICE])
    assert "a note" in lines


def test_recommendations() -> None:
    assert recommendation([ADVICE]) == (
        "recommended: ssgd 5 MiB (12.3 % faster than the default 25 MiB, beyond the noise of 3.0 %)"
    )
    kept = ADVICE | {"bucket_mb": 25.0, "beyond_noise": False, "noise_pct": 20.0}
    best = kept | {"strategy": "ddp", "fastest_mb": 25.0, "margin_pct": 0.0}
    assert recommendation([kept, best]) == (
        "recommended: ssgd 25 MiB (the default; 5 MiB was 12.3 % faster, within the noise of 20.0 %); "
        "ddp 25 MiB (the default, and the fastest)"
    )
