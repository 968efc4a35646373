"""A folder as a crash leaves it, and what a resumed run has in common with one that never stopped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ddpcore.training import RunRecord


def back_to(step: int, out: Path) -> None:
    """Put the folder into the state after a crash that followed the checkpoint of this step."""
    record = out / "record.jsonl"
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    record.write_text("".join(json.dumps(row) + "\n" for row in rows if row["kind"] != "end"))
    (out / "model.safetensors").unlink()
    for later in (out / "checkpoints").iterdir():
        if int(later.name.removeprefix("step-")) > step:
            shutil.rmtree(later)


def without_times(record: RunRecord) -> list[dict[str, Any]]:
    times = ("seconds", "samples_per_s", "evaluation_seconds", "total_seconds")
    return [{key: value for key, value in row.items() if key not in times} for row in [*record.epochs, record.final]]
