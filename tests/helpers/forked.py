"""Processes forked from one that has imported ddpcore and done nothing else: a fresh start without its seconds.

The standard library's fork server holds that one process. Only the import is shared: environment, folder, arguments
and output are a process's own, and the ranks that ``launch`` would spawn in one are forked likewise. What is
tested of a start itself (``test_launch.py``, and one test of each command line) goes by ``subprocess`` and ``spawn``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import math
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from ddpcore.runtime import launch

ROOT = Path(__file__).resolve().parent.parent.parent
# torch imports its compiler in the first step of an optimizer: four seconds that each process would spend again.
PRELOADED = ["torch._dynamo", "ddpcore.bench.run", "ddpcore.bench.predict", "ddpcore.experiments.compare", "networkx"]

DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


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


def writers(logs: Path) -> list[int]:
    """The living processes that write to this log: one that was started with it, and its ranks."""
    found, log = [], os.path.realpath(logs / "out")
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if entry.name.isdigit() and os.readlink(entry / "fd" / "1") == log:
                found.append(int(entry.name))
    return found


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


class Imported:
    """A process, forked from the server, that runs some imports once and then forks what needs them.

    Args:
        imports: statements, such as ``import lightning``.
        env: the environment of the imports.
    """

    def __init__(self, imports: str, env: Mapping[str, str]) -> None:
        self._logs = tempfile.TemporaryDirectory()
        self._pipe, theirs = multiprocessing.Pipe()
        args = (Path(self._logs.name), dict(env), os.getcwd(), _fork_on_demand, (theirs, imports))
        self._process = server().Process(target=_become, args=args)
        self._process.start()
        theirs.close()

    def start(self, words: Sequence[str], logs: Path, env: Mapping[str, str], cwd: Path) -> Forked:
        """As :func:`start`."""
        return Forked(self, self.ask((logs, dict(env), str(cwd), _run, (list(words),))))

    def ask(self, request: Any) -> Any:
        """The answer to a request: a process to fork, or the number of one whose exit code is asked for."""
        try:
            self._pipe.send(request)
            return self._pipe.recv()
        except (EOFError, OSError):
            said = "".join(output(Path(self._logs.name)))
            raise RuntimeError(f"a process that forks others has ended: {said}") from None

    def close(self) -> None:
        """End it, and with it what it has forked."""
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self._logs.cleanup()


_kept: dict[str, Imported] = {}


def imported(imports: str, env: Mapping[str, str]) -> Imported:
    """The process that has these imports. The last one is kept, because the tests of a file ask for the same."""
    if imports not in _kept:
        _end_kept()
        _kept[imports] = Imported(imports, env)
    return _kept[imports]


@atexit.register
def _end_kept() -> None:
    while _kept:
        _kept.popitem()[1].close()


class Forked:
    """A process that another one has forked, with the methods of ``multiprocessing.Process`` that tests use."""

    def __init__(self, parent: Imported, pid: int) -> None:
        self._parent, self.pid, self._code = parent, pid, None

    @property
    def exitcode(self) -> int | None:
        self._code = self._parent.ask(self.pid) if self._code is None else self._code
        return self._code

    def kill(self) -> None:
        if self.exitcode is None:  # asked for its exit code, the parent frees the number of a process that has ended
            os.kill(self.pid, signal.SIGKILL)

    def join(self, timeout: float = math.inf) -> None:
        """Wait until it has ended."""
        deadline = time.monotonic() + timeout
        while self.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.02)


def _fork_on_demand(pipe: Connection, imports: str) -> None:
    """In the process of :class:`Imported`, until it is killed."""
    exec(imports, {})
    is_linux = sys.platform == "linux"
    assert not is_linux or len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot fork safely"
    codes: dict[int, int | None] = {}
    while True:
        request = pipe.recv()
        if isinstance(request, int):
            if codes[request] is None:
                ended, status = os.waitpid(request, os.WNOHANG)
                codes[request] = os.waitstatus_to_exitcode(status) if ended else None
            pipe.send(codes[request])
            continue
        if (pid := os.fork()) == 0:
            if is_linux:
                ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
            pipe.close()
            _become(*request)
        codes[pid] = None
        pipe.send(pid)


class Ranks:
    """In the place of ``multiprocessing`` in ``launch``: forks from the server what would be spawned."""

    Pipe = staticmethod(multiprocessing.Pipe)
    parent_process = staticmethod(multiprocessing.parent_process)

    def __init__(self, logs: Path) -> None:
        self._logs = logs

    def get_context(self, method: str) -> Ranks:
        assert method in ("spawn", "forkserver"), f"launch starts ranks by {method!r}, which this does not stand in for"
        return self

    def set_forkserver_preload(self, modules: list[str]) -> None:
        """The server has imported them."""

    def Process(self, target: Callable[..., None], args: tuple[Any, ...]) -> ForkServerProcess:
        return server().Process(target=_become, args=(self._logs, dict(os.environ), os.getcwd(), target, args))


def _become(logs: Path, env: dict[str, str], cwd: str, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    gc.freeze()  # what was imported is no garbage: to search it takes half a second and writes to all its pages
    assert Path(launch.__file__).is_relative_to(ROOT), f"{launch.__file__} is of another checkout"
    for number, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(logs / stream, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", launch.num_cores())))
    launch.multiprocessing = Ranks(logs)
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
            warnings.filterwarnings("ignore", ".*found in sys.modules after import of package", RuntimeWarning)
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(str(Path(words[0]).resolve()), run_name="__main__")  # ranks import it from any folder
    except SystemExit as error:
        code = error.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    for callback in launch.before_exit:
        callback()
    os._exit(code if isinstance(code, int) else 1)  # not by way of the server's own clean-up
