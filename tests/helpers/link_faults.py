"""Ranks on four emulated hosts, one on each, whose links are bad: ``link_faults FOLDER WORLD_SIZE RANK KEEPER``."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ddpcore
from ddpcore.optim import FusedSGD
from ddpcore.strategies.compression import Int8
from helpers import hosts
from helpers.host_ranks import train
from helpers.ranks import join

SIZES = 400, 100  # 160 KB, much more than a queue below holds
STRATEGIES: dict[str, Any] = {
    "ssgd": ddpcore.SSGD,
    "local_sgd": lambda: ddpcore.LocalSGD(2),
    "ring": lambda: ddpcore.DPSGD(ddpcore.Ring(1)),
    "int8": lambda: ddpcore.DPSGD(ddpcore.RandomPair(seed=3), compression=Int8()),
    "push_sum": lambda: ddpcore.PushSum(ddpcore.OnePeerExponential()),
}
# What delays and loses packets; the second, where the kernel lacks netem: a full queue drops what comes.
IMPAIRED = {
    "netem": ["netem", "delay", "2ms", "1ms", "loss", "2%"],
    "tbf": ["tbf", "rate", "100mbit", "burst", "5kb", "limit", "10kb"],
}
CUT_AT, CUT_SECONDS = 2, 0.7
TIMEOUT = 2.0


def impair(device: str) -> str | None:
    """Delay and lose packets that leave a device. Returns how; None if the kernel cannot."""
    for name, words in IMPAIRED.items():
        command = ["tc", "qdisc", "replace", "dev", device, "root", *words]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return name
    return None


def repair(device: str) -> int:
    """Undo :func:`impair`. Returns the number of packets that were lost."""
    show = subprocess.run(["tc", "-s", "-j", "qdisc", "show", "dev", device], capture_output=True, check=True)
    subprocess.run(["tc", "qdisc", "del", "dev", device, "root"], check=True)
    return sum(one["drops"] for one in json.loads(show.stdout) if one["kind"] in IMPAIRED)


def set_link(device: str, state: str) -> None:
    subprocess.run(["ip", "link", "set", device, state], check=True)


def cut_for_a_while(rank: int, device: str) -> dict[str, Any]:
    """Rank 1 loses its network in the middle of a run, and gets it back."""
    start = 0.0

    def before_step(step: int) -> None:
        nonlocal start
        if step == CUT_AT:
            dist.barrier()
            start = time.monotonic()
            if rank == 1:
                set_link(device, "down")
                threading.Timer(CUT_SECONDS, set_link, (device, "up")).start()

    weights = train(STRATEGIES["ring"], 4, SIZES, rank, before_step)
    return {"weights": weights, "seconds": time.monotonic() - start}


def cut(rank: int, device: str) -> dict[str, str]:
    """Rank 1 loses its network for good: what each rank says, in an exchange and in an average."""
    runs = {}
    for name in ("ring", "ssgd"):
        model = nn.Linear(40, 10)
        optimizer = FusedSGD(model.parameters(), lr=0.1)
        group = dist.new_group(list(range(4)))
        ddpcore.distribute(
            model,
            optimizer,
            STRATEGIES[name](),
            group=group,
            connection=ddpcore.Connection(transport="pg", timeout=TIMEOUT),
        )
        runs[name] = model, optimizer
    dist.barrier()
    time.sleep(0.2)  # the last packets of the barrier have left
    if rank == 1:
        set_link(device, "down")
    said = {}
    for name, (model, optimizer) in runs.items():
        start = time.monotonic()
        try:
            for _ in range(3):
                model(torch.ones(2, 40)).sum().backward()
                optimizer.step()
        except RuntimeError as error:
            said[name] = str(error)
        said[f"{name} seconds"] = time.monotonic() - start
    return said


def main() -> None:
    rank, keeper = int(sys.argv[3]), int(sys.argv[4])
    hosts.enter(keeper, rank)
    path, rank, world_size = join()
    device = hosts.device(rank)
    how = impair(device)
    dist.barrier()
    weights = {name: train(make, world_size, SIZES, rank) for name, make in STRATEGIES.items()}
    dist.barrier()
    lost = 0 if how is None else repair(device)
    found = {"weights": weights, "how": how, "lost": lost, "while": cut_for_a_while(rank, device)}
    torch.save({**found, "cut": cut(rank, device)}, path)


if __name__ == "__main__":
    main()
