"""Processes forked from one that has imported ddpcore and done nothing else: a fresh start without its seconds.

The standard library's fork server holds that one process. Only the import is shared: environment, folder, arguments
and output are a process's own, and the ranks that ``launch`` would spawn in one are forked likewise. What is
tested of a start itself (``test_launch.py``, and one test of each command line) goes by ``subprocess`` and ``spawn``.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from ddpcore.runtime import launch

ROOT = Path(__file__).resolve().parent.parent.parent
# torch imports its compiler in the first step of an optimizer: four seconds that each process would spend again.
PRELOADED = ["torch._dynamo", "ddpcore.bench.run", "ddpcore.bench.predict", "ddpcore.experiments.compare", "networkx"]


@functools.cache
def server() -> ForkServerContext:
    """The one of this session; it ends with this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def start(words: Sequence[str], logs: Path, env: Mapping[str, str], cwd: Path) -> ForkServerProcess:
    """``python WORDS``, which are ``-m MODULE ...`` or ``FILE ...``; what it says goes to two files in ``logs``."""
    process = server().Process(target=_become, args=(logs, dict(env), str(cwd), _run, (list(words),)))
    process.start()
    return process


def output(logs: Path) -> tuple[str, str]:
    """Standard output and standard error of a process and of the ranks that it started."""
    found = ((logs / stream).read_text() if (logs / stream).exists() else "" for stream in ("out", "err"))
    return tuple(map(without_gloo, found))


def without_gloo(text: str) -> str:
    """A text without the lines that gloo prints in torch 2.10."""
    return re.sub(r"^\[Gloo\] Rank .*\n", "", text, flags=re.MULTILINE)


def run(words: Sequence[str], cwd: Path, env: Mapping[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run([sys.executable, *words], capture_output=True, text=True, ...)``."""
    with tempfile.TemporaryDirectory() as name:
        process = start(words, Path(name), env, cwd)
        process.join(timeout)
        code = process.exitcode
        process.kill()
        process.join()
        out, err = output(Path(name))
        if code is None:
            raise subprocess.TimeoutExpired(list(words), timeout, out, err)
        return subprocess.CompletedProcess(list(words), code, out, err)


class _Ranks:
    """In the place of ``multiprocessing`` in ``launch``: forks from the server what would be spawned."""

    Pipe = staticmethod(multiprocessing.Pipe)
    parent_process = staticmethod(multiprocessing.parent_process)

    def __init__(self, logs: Path) -> None:
        self._logs = logs

    def get_context(self, method: str) -> _Ranks:
        assert method in ("spawn", "forkserver"), f"launch starts ranks by {method!r}, which this does not stand in for"
        return self

    def set_forkserver_preload(self, modules: list[str]) -> None:
        """The server has imported them."""

    def Process(self, target: Callable[..., None], args: tuple[Any, ...]) -> ForkServerProcess:
        return server().Process(target=_become, args=(self._logs, dict(os.environ), os.getcwd(), target, args))


def _become(logs: Path, env: dict[str, str], cwd: str, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    assert Path(launch.__file__).is_relative_to(ROOT), f"{launch.__file__} is of another checkout"
    for number, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(logs / stream, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", launch.num_cores())))
    launch.multiprocessing = _Ranks(logs)
    # The server that made this process is there for its ranks, too; it would start one of its own.
    forkserver._forkserver.ensure_running = lambda: None
    function(*args)


def _run(words: list[str]) -> None:
    code: Any = 0
    # What the interpreter does when it starts: the script's folder, or the current one, and PYTHONPATH come first.
    first = os.getcwd() if words[0] == "-m" else str(Path(words[0]).resolve().parent)
    path = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(str(Path(words[0]).resolve()), run_name="__main__")  # ranks import it from any folder
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    for callback in launch.before_exit:
        callback()
    os._exit(code if isinstance(code, int) else 1)  # not by way of the server's own clean-up
