"""One of four ranks that all train on one device: on the CPU, and on the first GPU if there is one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from helpers.oracle import Case, train
from helpers.ranks import join

WORLD_SIZE = 4
CASES = [
    Case("ssgd", "all_gather", WORLD_SIZE, "fused"),
    Case("ssgd", "all_reduce", WORLD_SIZE, "torch"),
    Case("noisy_ssgd", "all_gather", WORLD_SIZE, "fused"),
    Case("local_sgd", "all_gather", WORLD_SIZE, "fused"),
    Case("dpsgd", "ring", WORLD_SIZE, "fused"),
    Case("dpsgd", "random_pair", WORLD_SIZE, "torch"),
    Case("dpsgd_atc", "random_pair", WORLD_SIZE, "fused"),
    Case("push_sum", "one_peer_exponential", WORLD_SIZE, "fused"),
]
AVERAGING = ("ssgd", "noisy_ssgd", "local_sgd")  # gloo sends no CUDA tensor from one rank to another
TRANSPORTS = {"cpu": ("shm", "pg"), "cuda": ("ipc", "pg")}
ALONE = [Case("ssgd", "all_gather", 1, "fused"), Case("dpsgd", "ring", 1, "fused")]


def runs(device: str, transport: str) -> list[Case]:
    """The cases that a transport carries on a device."""
    return [case for case in CASES if (device, transport) != ("cuda", "pg") or case.strategy in AVERAGING]


def main() -> None:
    path, rank, _ = join()
    seen: dict[Any, Any] = {}
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        for transport in TRANSPORTS[device]:
            for case in runs(device, transport):
                seen[device, transport, tuple(case)] = train(case, dist.group.WORLD, transport=transport, device=device)
        first = dist.new_group([0], backend="nccl" if device == "cuda" else "gloo")
        for case in ALONE if rank == 0 else ():
            try:
                seen[device, "alone", tuple(case)] = train(case, first, transport="pg", device=device)
            except Exception as error:  # without NCCL the other cases have their results all the same
                seen[device, "alone", tuple(case)] = error
    torch.save(seen, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
