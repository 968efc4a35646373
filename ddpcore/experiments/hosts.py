"""Two hosts on one machine: a network namespace each, with a cable (veth) between them. Needs Linux and root.

Ranks of one host reach those of the other through the cable alone. The namespaces have no names: they are gone when
their processes are, however those end. ``python -m ddpcore.experiments.hosts`` is one rank, started here and only here.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ddpcore.runtime import launch

NUM_HOSTS = 2
PORT = 29500  # in a namespace of its own, where no one else can have it
_CABLE = ("ddpcore0", "ddpcore1")
_ADDRESS = "10.213.0.{}"
_SECONDS = 10.0  # for a namespace to be made, and for ranks to end
_POLL_SECONDS = 0.05
_STOPPED = 75  # exit code of a rank that a signal has asked to stop


class NotPermitted(Exception):
    """Namespaces cannot be made here; the message says why in one line."""


def check() -> None:
    """Make two hosts and let them go; NotPermitted where that cannot be done."""
    with _hosts():
        pass


def run(worker: Callable[..., None], args: tuple[Any, ...], *, world_size: int) -> None:
    """As :func:`ddpcore.runtime.launch.run` over gloo, with the ranks on two hosts, half on each.

    Raises:
        RankFailed: a rank did; all have ended.
        Stopped: the ranks have, as a signal asked.
        NotPermitted: see :func:`check`.
    """
    cores = sorted(os.sched_getaffinity(0))
    each = world_size // NUM_HOSTS
    with _hosts() as namespaces, ExitStack() as stack:
        ranks: list[subprocess.Popen[bytes]] = []
        errors = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(world_size)]
        stack.callback(lambda: _end(ranks))
        for rank in range(world_size):
            host, local = divmod(rank, each)
            place: dict[str, object] = {
                "RANK": rank,
                "WORLD_SIZE": world_size,
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": each,
            }
            place |= {"MASTER_ADDR": _ADDRESS.format(1), "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": _CABLE[host]}
            variables = [f"{name}={value}" for name, value in place.items()]
            command = ["env", *variables, sys.executable, "-m", "ddpcore.experiments.hosts"]
            started = subprocess.Popen(
                [*_inside(namespaces[host]), *command],
                stdin=subprocess.PIPE,
                stderr=errors[rank],
                start_new_session=True,  # Ctrl-C is for the parent, which decides
            )
            ranks.append(started)
            mine = cores[host::NUM_HOSTS] or cores  # hosts share no core where there are enough
            assert started.stdin is not None
            pickle.dump((mine, worker, args, world_size), started.stdin)
            started.stdin.flush()
        with launch.signals_passed_on(ranks):
            _wait(ranks, errors)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], errors: Sequence[Any]) -> None:
    while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
        time.sleep(_POLL_SECONDS)
    if not any(rank.poll() for rank in ranks):
        return
    time.sleep(launch.GRACE_SECONDS)  # for ranks that fail together
    codes = [rank.poll() for rank in ranks]
    killed = [(number, code) for number, code in enumerate(codes) if code is not None and code < 0]
    number, code = killed[0] if killed else next((n, c) for n, c in enumerate(codes) if c)
    if code == _STOPPED:
        raise launch.Stopped(_text(errors[number]).splitlines()[-1])
    raise launch.RankFailed(_cause(number, code, _text(errors[number])))


def _cause(rank: int, code: int, said: str) -> str:
    """In the words of :mod:`ddpcore.runtime.launch`."""
    return f"rank {rank} was ended by {signal.Signals(-code).name}" if code < 0 else f"rank {rank} failed:\n{said}"


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode(errors="replace")).strip()


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        if rank.stdin is not None:
            rank.stdin.close()  # for which a rank ends itself
    deadline = time.monotonic() + launch.KILL_SECONDS
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


@contextmanager
def _hosts() -> Iterator[list[int]]:
    """Two namespaces with a cable, as the processes that keep them."""
    keepers: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(NUM_HOSTS):  # cat ends when this process does
            keepers.append(subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stderr=subprocess.PIPE))
        for keeper in keepers:
            _await_namespace(keeper)
        first, second = (str(keeper.pid) for keeper in keepers)
        cable = ["type", "veth", "peer", "name", _CABLE[1], "netns", second]
        _call("ip", "link", "add", _CABLE[0], "netns", first, *cable)
        for host, keeper in enumerate(keepers):
            inside = _inside(keeper.pid)
            _call(*inside, "ip", "address", "add", f"{_ADDRESS.format(host + 1)}/30", "dev", _CABLE[host])
            for device in ("lo", _CABLE[host]):
                _call(*inside, "ip", "link", "set", device, "up")
        yield [keeper.pid for keeper in keepers]
    except FileNotFoundError as error:
        raise NotPermitted(f"there is no {error.filename}") from None
    finally:
        for keeper in keepers:
            keeper.kill()
            keeper.communicate()


def _await_namespace(keeper: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _SECONDS
    while os.readlink(f"/proc/{keeper.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        if keeper.poll() is not None or time.monotonic() > deadline:
            said = keeper.communicate()[1].decode().strip() if keeper.poll() is not None else "it takes too long"
            raise NotPermitted(said.splitlines()[-1] if said else "unshare failed")
        time.sleep(0.001)


def _inside(keeper: int) -> list[str]:
    return ["nsenter", "--target", str(keeper), "--net"]


def _call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise NotPermitted((done.stderr.strip() or f"{words[0]} failed").splitlines()[-1])


def _rank() -> None:
    """This process is one rank: what it is to do comes through standard input, whose end is that of the parent."""
    cores, worker, args, world_size = pickle.load(sys.stdin.buffer)

    def watch() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    os.sched_setaffinity(0, cores)
    code = 0
    try:
        launch.run(worker, args, world_size=world_size, backend="gloo")
    except launch.Stopped as stopped:
        print(stopped, file=sys.stderr)
        code = _STOPPED
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once, as a rank of launch: threads outlive the process group, and wait for others


if __name__ == "__main__":
    _rank()
