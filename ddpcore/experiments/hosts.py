"""Two emulated hosts on one machine: a network namespace each, connected by a virtual Ethernet cable (veth).

Ranks of one host reach those of the other only through the cable. This needs Linux, root, and the tools ``ip``,
``unshare`` and ``nsenter``. The namespaces have no names, so the kernel removes them when their last process ends.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpcore.runtime import launch
from ddpcore.runtime.launch import World

NUM_HOSTS = 2
PORT = 29500  # inside a namespace that no other program uses
_CABLE = ("ddpcore0", "ddpcore1")
_ADDRESS = "10.213.0.{}"
_SECONDS = 10.0  # until a namespace must exist
_CLONE_NEWNET = 0x40000000  # of <sched.h>


class NotPermitted(Exception):
    """This process cannot create network namespaces; the message is the reason, in one line."""


def check() -> None:
    """Create two hosts and remove them.

    Raises:
        NotPermitted: they cannot be created.
    """
    with _hosts():
        pass


def run(worker: Callable[..., None], args: tuple[Any, ...], *, world_size: int) -> None:
    """Run ``worker(world, *args)`` on every rank over gloo, with half of the ranks on each host.

    Raises:
        ValueError: ``world_size`` is odd.
        RankFailed: see :func:`ddpcore.runtime.launch.run`.
        Stopped: see there.
        NotPermitted: see :func:`check`.
    """
    if world_size % NUM_HOSTS or world_size < NUM_HOSTS:
        raise ValueError(f"world_size is {world_size}: {NUM_HOSTS} hosts need an even number of ranks, half on each")
    with _hosts() as keepers:
        launch.run(_join_host, (keepers, worker, args), world_size=world_size, backend="none")


def _join_host(world: World, keepers: Sequence[int], worker: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Enter the namespace of this rank's host, connect to the other ranks, and run the worker."""
    per_host = world.world_size // NUM_HOSTS
    host, local_rank = divmod(world.rank, per_host)
    with Path(f"/proc/{keepers[host]}/ns/net").open() as namespace:
        # Moves this thread and all that it starts later; os.setns exists only since Python 3.12.
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns failed")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[host::NUM_HOSTS] or cores)  # with two cores or more, hosts share none
    torch.set_num_threads(launch.threads_per_rank(per_host))
    os.putenv("GLOO_SOCKET_IFNAME", _CABLE[host])
    store = dist.TCPStore(_ADDRESS.format(1), PORT, world.world_size, is_master=world.rank == 0)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.world_size)
    worker(World(world.rank, world.world_size, local_rank, per_host), *args)
    dist.destroy_process_group()


@contextmanager
def _hosts() -> Iterator[list[int]]:
    """Create two connected namespaces; yield for each the id of the process that keeps it alive."""
    keepers: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(NUM_HOSTS):  # cat ends when this process ends
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
            errors = keeper.communicate()[1].decode().strip() if keeper.poll() is not None else "it takes too long"
            raise NotPermitted(errors.splitlines()[-1] if errors else "unshare failed")
        time.sleep(0.001)


def _inside(keeper: int) -> list[str]:
    return ["nsenter", "--target", str(keeper), "--net"]


def _call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise NotPermitted((done.stderr.strip() or f"{words[0]} failed").splitlines()[-1])
