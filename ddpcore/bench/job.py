"""What a bench on ranks starts, settled and checked before any process does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ddpcore.bench.config import BenchConfig, Plan, resolve
from ddpcore.launch import World


@dataclass(frozen=True, kw_only=True)
class Job:
    """The arguments of :func:`ddpcore.launch.run`."""

    worker: Callable[..., None]
    args: tuple[Any, ...]
    world_size: int
    backend: str


def settle(config: BenchConfig, joined: World | None) -> Plan:
    """The plan on this machine, of the world that torchrun made or of the one that will be started.

    Raises:
        ValueError: the config does not fit it.
    """
    started = 4 if joined is None else joined.world_size
    world_size = started if config.world_size is None else config.world_size
    num_hosts = 1 if joined is None else -(-joined.world_size // joined.local_world_size)
    return resolve(config, world_size=world_size, num_gpus=torch.cuda.device_count(), num_hosts=num_hosts)


def settle_real(config: BenchConfig, joined: World | None) -> Plan:
    """The same where what ranks say to each other is measured, which virtual learners and a single rank do not.

    Raises:
        ValueError: ranks would share a GPU, or there is one alone, too.
    """
    plan = settle(config, joined)
    if plan.world_size < 2:
        raise ValueError("--world-size is 1 and one rank has nobody to talk to: take 2 or more")
    if plan.choice.backend == "virtual":
        raise ValueError(f"{plan.choice.reason} and real ranks are measured: use --device cpu, or fewer ranks")
    return plan
