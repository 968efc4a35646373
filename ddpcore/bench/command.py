"""What the commands share: a config resolved on this machine, the start of ranks, and a published result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ddpcore.bench.config import BenchConfig, ResolvedConfig, resolve
from ddpcore.runtime import launch
from ddpcore.runtime.launch import World
from ddpcore.storage.json_lines import to_json, write_json


def start_ranks(worker: Callable[..., None], resolved: ResolvedConfig, *args: Any) -> Callable[[], None]:
    """What runs ``worker(world, resolved, *args)`` on every rank."""
    return lambda: launch.run(
        worker, (resolved, *args), world_size=resolved.world_size, backend=resolved.choice.backend
    )


def publish(result: dict[str, Any], print_result: Callable[[dict[str, Any]], None], file: Path | None) -> None:
    """Print a result, and write it to the JSON file if there is one."""
    plain = to_json(result)
    print_result(plain)
    if file is not None:
        write_json(file, plain)


def resolve_here(config: BenchConfig, torchrun: World | None) -> ResolvedConfig:
    """The config on this machine, with the ranks of torchrun or those that will be started.

    Raises:
        ValueError: see :func:`ddpcore.bench.config.resolve`.
    """
    default = 4 if torchrun is None else torchrun.world_size
    return resolve(
        config,
        world_size=default if config.world_size is None else config.world_size,
        num_gpus=torch.cuda.device_count(),
        num_hosts=num_hosts(torchrun),
    )


def num_hosts(torchrun: World | None) -> int:
    """Machines that the ranks are on."""
    return 1 if torchrun is None else -(-torchrun.world_size // torchrun.local_world_size)


def resolve_ranks(config: BenchConfig, torchrun: World | None) -> ResolvedConfig:
    """As :func:`resolve_here`, for commands that measure communication between ranks.

    Raises:
        ValueError: also if there is only one rank, or if the learners would be virtual.
    """
    resolved = resolve_here(config, torchrun)
    if resolved.world_size < 2:
        raise ValueError("--world-size is 1 and one rank has nobody to talk to: take 2 or more")
    if resolved.choice.backend == "virtual":
        raise ValueError(f"{resolved.choice.reason} and real ranks are measured: use --device cpu, or fewer ranks")
    return resolved
