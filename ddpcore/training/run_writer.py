"""Output of a run: the record, and a progress bar in the terminal. Only rank 0 writes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddpcore.records.config import nested
from ddpcore.records.run import MODEL, RECORD
from ddpcore.runtime.progress import ProgressReport
from ddpcore.storage.files import replace_file
from ddpcore.storage.json_lines import JsonLines, read_lines, to_json, write_lines

OnRecord = Callable[[dict[str, Any]], None]


def warn(line: str) -> None:
    """Print a line beside the progress bar."""
    print(f"ddpcore: {line}", file=sys.stderr, flush=True)


class RunWriter:
    """Writes the files and the progress bar of a run. Use it as a context manager, which closes them.

    Args:
        out: the folder.
        header: the first row of a new run; its ``total_steps`` is the length of the progress bar.
        resumed: the row of a resumed run; None for a new run. Rows after its ``step`` are removed from the record. If
            the run was shorter, it gets the new length, and a last row and a model of the shorter run are removed.
        on_record: called with each row, after it was appended to the record.
    """

    def __init__(
        self,
        out: Path,
        header: dict[str, Any],
        resumed: dict[str, Any] | None = None,
        on_record: OnRecord | None = None,
    ) -> None:
        path, step = out / RECORD, 0 if resumed is None else resumed["step"]
        known = read_lines(path)
        for problem in known.problems:
            warn(f"{problem}: the run goes on without it")
        rows = [] if resumed is None else [row for row in known.rows if row.get("step", 0) <= step]
        run, num_steps = next((row for row in rows if row.get("kind") == "run"), None), header["total_steps"]
        if run is None:
            rows.insert(0, header)
        elif run.get("total_steps", num_steps) < num_steps:  # the run is longer now
            (out / MODEL).unlink(missing_ok=True)
            rows = [row for row in rows if row.get("kind") != "end"]
            run |= {"config": {**nested(run["config"]), "run": header["config"]["run"]}, "total_steps": num_steps}
        out.mkdir(parents=True, exist_ok=True)
        write_lines(path, rows if resumed is None else [*rows, resumed])
        self._out = out
        self._record = JsonLines(path)
        self._on_record = on_record
        self._progress = ProgressReport("training", num_steps, completed=step)
        self._step = step

    def __enter__(self) -> RunWriter:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.__exit__()
        self._record.close()

    def advance(self, step: int, text: str) -> None:
        """Update the progress bar and the text beside it."""
        self._progress.advance(step - self._step, text)
        self._step = step

    def write(self, row: dict[str, Any]) -> None:
        """Append a row to the record."""
        self._record.append(row)
        if self._on_record is not None:
            self._on_record(to_json(row))

    def sync(self) -> None:
        """Wait until all rows are on the disk; a checkpoint must not be newer than the record."""
        self._record.sync()

    def write_model(self, content: bytes) -> None:
        """Write the averaged model at the end, in the format of safetensors."""
        replace_file(self._out / MODEL, content)
