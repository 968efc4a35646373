"""The table of the statistics bench."""

from __future__ import annotations

import io

from rich.console import Console

from ddpcore.bench.stats import parts
from ddpcore.display.table import print_parts


def test_a_line_each():
    quantiles = {"p20": 1.0, "p50": 2.0, "p80": 3.0}
    off = {
        "statistics": "off",
        "step_ms": quantiles,
        "overhead_pct": quantiles,
        "measuring_pct": None,
        "num_records": 0,
    }
    rows = [off, {**off, "statistics": "all", "measuring_pct": quantiles, "num_records": 7}]
    config = {"model": "mlp", "strategy": "ssgd", "world_size": 2, "backend": "gloo", "batch_size": 4, "every": 5}
    file = io.StringIO()
    print_parts(Console(file=file, width=400), *parts({"config": config, "rows": rows}))
    text = file.getvalue()
    assert "mlp, ssgd, 2 learners (gloo), batch 4 each, a record every 5 steps" in text
    assert "2.00 [1.00, 3.00]" in text and "+2.0 % [+1.0, +3.0]" in text and "2.00 %" in text
    assert "-" in next(line for line in text.splitlines() if "off" in line)
