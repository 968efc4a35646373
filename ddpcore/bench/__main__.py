"""``python -m ddpcore.bench``: strategies side by side, alone or under torchrun; further benches by first word."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch

from ddpcore import launch
from ddpcore.bench import optim, stats, topology
from ddpcore.bench.config import parse, resolve
from ddpcore.bench.run import build_dataset, run_rank

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "optim": optim.main,
    "stats": stats.main,
    "topology": topology.main,
}
"""Further benches by the first word of the command line. Each raises ValueError where it cannot be run as it stands."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a bench; returns 0, or 1 where a rank failed, or 2 where the command cannot be run as it stands."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words and not words[0].startswith("-"):
        return _run_command(words[0], words[1:])
    return _run_strategies(words)


def _run_command(name: str, argv: Sequence[str]) -> int:
    try:
        if name not in COMMANDS:
            raise ValueError(f"unknown command {name!r}: choose from {', '.join(COMMANDS)}, or pass flags alone")
        return COMMANDS[name](argv)
    except ValueError as error:
        print(f"ddpcore.bench{' ' + name if name in COMMANDS else ''}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run_strategies(argv: Sequence[str]) -> int:
    speaker = "ddpcore.bench"
    try:
        joined = launch.torchrun_world()
        if joined is not None:
            speaker += f", rank {joined.rank}"
        config = parse(argv)
        started = 4 if joined is None else joined.world_size
        world_size = started if config.world_size is None else config.world_size
        num_hosts = 1 if joined is None else -(-joined.world_size // joined.local_world_size)
        plan = resolve(config, world_size=world_size, num_gpus=torch.cuda.device_count(), num_hosts=num_hosts)
        if config.download and joined is not None:
            raise ValueError("--download under torchrun: ranks would write the same files, run once without torchrun")
        build_dataset(plan, first=True)  # before any process starts, so that a damaged file is one line
    except ValueError as error:
        print(f"{speaker}: {error}", file=sys.stderr)
        return 2
    try:
        launch.run(run_rank, (plan,), world_size=world_size, backend=plan.choice.backend)
    except launch.UsageError as error:
        print(f"{speaker}: {error}", file=sys.stderr)
        return 2
    except launch.RankFailed as error:
        print(f"ddpcore.bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
