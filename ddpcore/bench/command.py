"""Functions of all commands: resolve a config on this machine, start ranks, print and write a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ddpcore.bench.config import BenchConfig, Options, ResolvedConfig, resolve
from ddpcore.bench.result import Kind
from ddpcore.display.table import console_of, print_parts
from ddpcore.runtime import launch
from ddpcore.runtime.launch import World
from ddpcore.storage.json_lines import to_json, write_json
from ddpcore.storage.limits import shown


def start_ranks(worker: Callable[..., None], resolved: ResolvedConfig, *args: Any) -> Callable[[], None]:
    """A function that runs ``worker(world, resolved, *args)`` on every rank."""
    return lambda: launch.run(
        worker,
        (resolved, *args),
        world_size=resolved.world_size,
        backend=resolved.choice.backend,
        timeout=resolved.training.strategy.timeout,
        on_failure=resolved.training.strategy.on_failure,
        forks=True,
    )


def publish(result: dict[str, Any], kind: Kind, options: Options) -> None:
    """Print a result, write it to the JSON file if there is one, and draw it if asked."""
    plain = to_json(result)
    print_parts(console_of(wide=options.wide), *kind.parts(plain))
    if options.json is not None:
        write_json(options.json, plain)
        print(f"wrote {shown(options.json)}")
    if options.plot is not None:
        kind.draw(plain, options.plot)
        print(f"wrote {shown(options.plot)}")


def resolve_here(config: BenchConfig, torchrun: World | None) -> ResolvedConfig:
    """The config on this machine, for torchrun's ranks or the ranks that will be started.

    Raises:
        ValueError: see :func:`ddpcore.bench.config.resolve`.
    """
    world_size = config.world_size or (4 if torchrun is None else torchrun.world_size)
    return resolve(config, world_size=world_size, num_gpus=torch.cuda.device_count(), num_hosts=num_hosts(torchrun))


def num_hosts(torchrun: World | None) -> int:
    """The number of machines on which the ranks run."""
    return 1 if torchrun is None else -(-torchrun.world_size // torchrun.local_world_size)


def resolve_ranks(config: BenchConfig, torchrun: World | None) -> ResolvedConfig:
    """Like :func:`resolve_here`, for commands that measure communication between ranks.

    Raises:
        ValueError: see there; or there is only one rank, or the learners would be virtual.
    """
    resolved = resolve_here(config, torchrun)
    if resolved.world_size < 2:
        raise ValueError("--world-size is 1 and communication needs two ranks: take 2 or more")
    if resolved.choice.backend == "virtual":
        raise ValueError(
            f"{resolved.choice.reason} and this command needs real ranks: take the device cpu, or fewer ranks"
        )
    return resolved
