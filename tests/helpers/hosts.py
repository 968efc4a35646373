"""Emulated hosts on one machine: a network namespace each, connected to a switch by virtual Ethernet cables (veth).

Ranks of one host reach ranks of another only through the cables. This needs Linux, root, and the tools ``ip``,
``unshare`` and ``nsenter``. The namespaces have no names, so the kernel removes them when their last process ends.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PORT = 29500  # inside a namespace that no other program uses
_TOOLS = ("unshare", "nsenter", "ip")
_SECONDS = 10.0  # until a namespace must exist
_CLONE_NEWNET = 0x40000000  # of <sched.h>


class NotPermitted(Exception):
    """This process cannot create network namespaces; the message is the reason, in one line."""


def check() -> None:
    """Create two hosts and remove them.

    Raises:
        NotPermitted: they cannot be created.
    """
    with networks(2):
        pass


def device(host: int) -> str:
    """The network device of a host, its end of the cable."""
    return f"ddpcore{host}"


def address(host: int) -> str:
    """The address of a host in the network that connects all hosts."""
    return f"10.213.0.{host + 1}"


def enter(keeper: int, host: int) -> None:
    """Move this thread, and all that it starts later, to a host of :func:`networks`, and let gloo use its cable."""
    with Path(f"/proc/{keeper}/ns/net").open() as namespace:
        # os.setns exists only since Python 3.12.
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns failed")
    os.putenv("GLOO_SOCKET_IFNAME", device(host))


@contextmanager
def networks(num_hosts: int) -> Iterator[list[int]]:
    """Create hosts that a switch connects; yield for each the id of the process that keeps its namespace alive.

    Raises:
        NotPermitted: they cannot be created.
    """
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        raise NotPermitted(f"there is no {missing[0]}")
    keepers: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(num_hosts + 1):  # the switch has a namespace, too; cat ends when this process ends
            keepers.append(subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stderr=subprocess.PIPE))
        for keeper in keepers:
            _await_namespace(keeper)
        *hosts, switch = (keeper.pid for keeper in keepers)
        _connect(hosts, switch)
        yield hosts
    finally:
        for keeper in keepers:
            keeper.kill()
            keeper.communicate()


def _connect(hosts: Sequence[int], switch: int) -> None:
    _call(*_inside(switch), "ip", "link", "add", "switch", "up", "type", "bridge")
    for host, keeper in enumerate(hosts):
        port, inside = f"port{host}", _inside(keeper)
        cable = ["type", "veth", "peer", "name", port, "netns", str(switch)]
        _call("ip", "link", "add", device(host), "netns", str(keeper), *cable)
        _call(*inside, "ip", "address", "add", f"{address(host)}/24", "dev", device(host))
        for own in ("lo", device(host)):
            _call(*inside, "ip", "link", "set", own, "up")
        _call(*_inside(switch), "ip", "link", "set", port, "master", "switch", "up")


def _await_namespace(keeper: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _SECONDS
    while os.readlink(f"/proc/{keeper.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        if keeper.poll() is not None or time.monotonic() > deadline:
            errors = keeper.communicate()[1].decode().strip() if keeper.poll() is not None else "it takes too long"
            raise NotPermitted(errors.splitlines()[-1] if errors else "unshare failed")
        time.sleep(0.001)


def _inside(keeper: int) -> list[str]:
    return ["nsenter", "--target", str(keeper), "--net"]


def _call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise NotPermitted((done.stderr.strip() or f"{words[0]} failed").splitlines()[-1])
