"""Trials that mostly wait, such as for a late rank, at the same time."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch


def in_lanes(trials: Mapping[str, Any], run: Callable[[Any], Any], num: int = 3) -> dict[str, Any]:
    """``run`` of each trial by its name. This process forks ``num`` others, of which each runs a part, one by one.

    RuntimeError: one of these has failed; standard error says why.
    """
    if len(trials) < 2:
        return {name: run(trial) for name, trial in trials.items()}
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for lane in range(num):
            if (pid := os.fork()) == 0:
                _run_lane(dict([*trials.items()][lane::num]), run, Path(folder) / f"{lane}.pt")
            pids.append(pid)
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]  # of all, also after one that failed
        if any(statuses):
            raise RuntimeError("a process that runs trials has failed: see above")
        found = [torch.load(Path(folder) / f"{lane}.pt", weights_only=False) for lane in range(num)]
    return {name: next(one[name] for one in found if name in one) for name in trials}


def _run_lane(trials: Mapping[str, Any], run: Callable[[Any], Any], path: Path) -> None:
    """In the forked process, which ends here."""
    code = 1
    try:
        torch.save({name: run(trial) for name, trial in trials.items()}, path)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)
