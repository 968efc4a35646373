"""Calls a function in a process of its own, within 20 s of the processor and 500 MB of memory beyond what was there."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

CPU_SECONDS = 20  # it takes at most 3 s on a core of its own, and more on a busy machine
MEGABYTES = 500
WALL_SECONDS = 120.0  # for a process that waits, on a FIFO say; a busy machine takes long for the 20 s


def refused(call: Callable[[], object]) -> str:
    """The message of the ValueError that the call raises. AssertionError for all else."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_run, args=(call, theirs))
    child.start()
    theirs.close()
    child.join(WALL_SECONDS)
    hangs = child.is_alive()
    child.kill()
    child.join()
    assert not hangs, "it waits forever"
    assert child.exitcode == 0 and ours.poll(), f"it ended with {child.exitcode}: -24 is more than {CPU_SECONDS} s"
    message, megabytes = ours.recv()
    assert message.isprintable() and message, f"no printable line: {message!r}"
    assert megabytes < MEGABYTES, f"it took {megabytes} MB"
    return message


def _run(call: Callable[[], object], out: Connection) -> None:
    torch.set_num_threads(1)  # a fork has none of the threads of its parent, and OpenMP would wait for them
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 2**20
    try:
        call()
        message = ""
    except ValueError as error:
        message = str(error)
    out.send((message, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024 - before))
