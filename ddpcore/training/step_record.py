"""The record of single steps, which a run writes with ``record_steps``: one file for each rank, in ``steps/``."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddpcore.records.run import STEPS, rank_of, step_file
from ddpcore.storage.json_lines import JsonLines, read_lines, write_lines
from ddpcore.training.trainer import Trainer


class StepRecorder:
    """Writes a line for each step of this rank. Use it as a context manager, which writes the last lines.

    A line holds ``step``; ``learners`` of this rank and the ``loss`` of each; ``batch_size`` of a complete batch,
    if it grows in the run; ``seconds`` since the last step ended (without evaluations, checkpoints and checks of
    the loss); ``exposed``, the seconds in which the rank averaged or waited for others and did nothing else;
    ``compute``, the other seconds; ``overlapped``, the part of ``compute`` in which a transfer was started and not
    yet needed, so that at most this much communication was hidden; and ``waits``, the seconds that it waited for
    each other rank (only over shared memory). With ``ddp``, PyTorch averages, so ``exposed``, ``compute`` and
    ``overlapped`` are None. On a GPU each step waits for the device, so that the times are those of the work and
    not of its start.

    Args:
        out: the folder of the run.
        rank: of this process.
        trainer: takes the steps.
    """

    def __init__(self, out: Path, rank: int, trainer: Trainer) -> None:
        path = out / STEPS / step_file(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        _keep(path, trainer.num_steps)
        membership = trainer.handle.comm.membership
        if membership is not None and rank == membership.members[0]:  # also of ranks that are gone
            for other in path.parent.glob(step_file("*")):
                if rank_of(other) not in membership.members:
                    _keep(other, trainer.num_steps)
        self._file = JsonLines(path)
        self._trainer = trainer
        self._spans = trainer.handle.spans
        self._lines: list[tuple[dict[str, Any], Tensor]] = []
        self.resume()

    def __enter__(self) -> StepRecorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.flush()
        self._file.close()
        if self._spans is not None:
            self._spans.stop()

    def resume(self) -> None:
        """Begin to measure a step: at the start, and after a pause for an evaluation, a checkpoint or a check."""
        if self._spans is not None:
            self._spans.start()
        self._waited = dict(self._trainer.handle.comm.waited)
        self._began = time.perf_counter()

    def add(self, losses_L: Tensor) -> None:
        """Note the step that has just ended. Losses stay on the device until :meth:`flush`."""
        if losses_L.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._began
        exposed = None if self._spans is None else self._spans.seconds
        waited, batches = self._trainer.handle.comm.waited, self._trainer.batches
        line = {
            "step": self._trainer.num_steps,
            "learners": list(self._trainer.learners),
            **({"batch_size": batches.batch_size_at(self._trainer.num_steps - 1)} if batches.growth else {}),
            "seconds": seconds,
            "compute": None if exposed is None else max(0.0, seconds - exposed),
            "exposed": exposed,
            "overlapped": None if self._spans is None else self._spans.overlapped,
            "waits": {rank: total - self._waited.get(rank, 0.0) for rank, total in waited.items()},
        }
        self._lines.append((line, losses_L.detach().clone()))
        self.resume()

    def flush(self) -> None:
        """Write the noted steps. It waits for the device."""
        for line, losses in self._lines:
            self._file.append({**line, "loss": losses})
        self._lines.clear()


def _keep(path: Path, step: int) -> None:
    """Keep the lines up to a step, from which the run goes on."""
    known = read_lines(path)
    for problem in known.problems:
        print(f"ddpcore: {problem}: the run goes on without it", file=sys.stderr, flush=True)
    steps = (line for line in known.rows if isinstance(line.get("step"), int))
    write_lines(path, [line for line in steps if line["step"] <= step])
