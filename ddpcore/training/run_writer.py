"""Output of a run: the record, TensorBoard, and a progress bar in the terminal. Only rank 0 writes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddpcore.options.extras import extra
from ddpcore.records.config import nested
from ddpcore.records.run import MODEL, RECORD, TENSORBOARD
from ddpcore.runtime.progress import ProgressReport
from ddpcore.storage.files import replace_file
from ddpcore.storage.json_lines import JsonLines, read_lines, to_json, write_lines

OnRecord = Callable[[dict[str, Any]], None]


class RunWriter:
    """Writes the files and the progress bar of a run. Use it as a context manager, which closes them.

    Args:
        out: the folder.
        header: the first row of a new run; its ``total_steps`` is the length of the progress bar.
        resumed: the row of a resumed run; None for a new run. Rows after its ``step`` are removed from the record. If
            the run was shorter, it gets the new length, and a last row and a model of the shorter run are removed.
        tensorboard: also write scalars for TensorBoard.
        on_record: called with each row, after it was appended to the record.
    """

    def __init__(
        self,
        out: Path,
        header: dict[str, Any],
        resumed: dict[str, Any] | None = None,
        *,
        tensorboard: bool = False,
        on_record: OnRecord | None = None,
    ) -> None:
        path, step = out / RECORD, 0 if resumed is None else resumed["step"]
        known = read_lines(path)
        for problem in known.problems:
            self.warn(f"{problem}: the run goes on without it")
        rows = [] if resumed is None else [row for row in known.rows if row.get("step", 0) <= step]
        was = next((row.get("total_steps") for row in rows if row.get("kind") == "run"), None)
        if was is not None and was < header["total_steps"]:  # the run is longer now
            (out / MODEL).unlink(missing_ok=True)
            rows = [_longer(row, header) for row in rows if row.get("kind") != "end"]
        if not any(row.get("kind") == "run" for row in rows):
            rows.insert(0, header)
        out.mkdir(parents=True, exist_ok=True)
        rows += [] if resumed is None else [resumed]
        write_lines(path, rows)
        self._out = out
        self._record = JsonLines(path)
        self._on_record = on_record
        self._board = load_tensorboard()(str(out / TENSORBOARD), purge_step=step + 1) if tensorboard else None
        self._progress = ProgressReport("training", header["total_steps"], completed=step)
        self._step = step

    def __enter__(self) -> RunWriter:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.__exit__()
        self._record.close()
        if self._board is not None:
            self._board.close()

    def advance(self, step: int, text: str) -> None:
        """Update the progress bar and the text beside it."""
        self._progress.advance(step - self._step, text)
        self._step = step

    def write(self, row: dict[str, Any]) -> None:
        """Append a row to the record; the numbers of an epoch also go to TensorBoard."""
        self._record.append(row)
        if self._on_record is not None:
            self._on_record(to_json(row))
        if self._board is not None and row["kind"] == "epoch":
            for name, value in to_json(row).items():
                if isinstance(value, int | float) and name != "step":
                    self._board.add_scalar(name, value, row["step"])
            self._board.flush()

    def warn(self, line: str) -> None:
        """Print a line beside the progress bar."""
        print(f"ddpcore: {line}", file=sys.stderr, flush=True)

    def sync(self) -> None:
        """Wait until all rows are on the disk; a checkpoint must not be newer than the record."""
        self._record.sync()

    def write_model(self, content: bytes) -> None:
        """Write the averaged model at the end, in the format of safetensors."""
        replace_file(self._out / MODEL, content)


def _longer(row: dict[str, Any], header: dict[str, Any]) -> dict[str, Any]:
    """The first row of a run with the length of a new header; another row as it is."""
    if row.get("kind") != "run":
        return row
    config = {**nested(row["config"]), "run": header["config"]["run"]}
    return {**row, "config": config, "total_steps": header["total_steps"]}


def load_tensorboard() -> Any:
    """The class ``SummaryWriter``. Raises MissingPackage if TensorBoard is not installed."""
    with extra("train"):
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  it imports much
    return SummaryWriter
