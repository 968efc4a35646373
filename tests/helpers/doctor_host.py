"""A host with everything wrong, for ``ddpcore doctor``: ``doctor_host FOLDER HOST KEEPER``. Host 0 is well.

The other's link carries 100 Mb/s, its /dev/shm has 1 MB, its CUDA_HOME is wrong, its kernels are not built, and its
rank is 200 ms late.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ddpcore.bench import __main__ as bench
from ddpcore.bench import doctor
from helpers import hosts

NEW_MOUNTS, NEW_NAME = 0x00020000, 0x04000000  # CLONE_NEWNS, CLONE_NEWUTS
MBIT, SLOW_SECONDS = 100, 0.2


def spoil(device: str) -> None:
    limited = ["tbf", "rate", f"{MBIT}mbit", "burst", "64kb", "limit", "1mb"]
    subprocess.run(["tc", "qdisc", "replace", "dev", device, "root", *limited], check=True)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"], check=True)
    os.environ["CUDA_HOME"] = "/nowhere"
    work, machine = doctor.work, doctor.machine

    def slow(*words: Any) -> float:
        start = time.perf_counter()
        work(*words)
        time.sleep(SLOW_SECONDS)
        return time.perf_counter() - start

    doctor.work = slow
    doctor.machine = lambda device: {**machine(device), "kernels": []}


def main() -> None:
    folder, host, keeper = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    hosts.enter(keeper, host)
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_MOUNTS | NEW_NAME):
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(f"node{host}")
    os.environ |= {"RANK": str(host), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29400"}
    os.environ["GLOO_SOCKET_IFNAME"] = hosts.device(host)
    if host == 1:
        spoil(hosts.device(host))
    words = ["doctor", "--parameters", "30", "--step-ms", "100", "--json", str(folder / "found.json")]
    sys.exit(bench.main(words))


if __name__ == "__main__":
    main()
