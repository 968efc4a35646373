"""``python -m ddpcore.bench``: one command, alone or under torchrun."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from ddpcore import launch
from ddpcore.bench.config import parse, resolve
from ddpcore.bench.run import build_dataset, run_rank


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; returns 0, or 1 where a rank failed, or 2 where the command cannot be run as it stands."""
    speaker = "ddpcore.bench"
    try:
        joined = launch.torchrun_world()
        if joined is not None:
            speaker += f", rank {joined.rank}"
        config = parse(argv)
        started = 4 if joined is None else joined.world_size
        world_size = started if config.world_size is None else config.world_size
        plan = resolve(config, world_size=world_size, num_gpus=torch.cuda.device_count())
        build_dataset(plan)  # before any process starts, so that a damaged file is one line
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
