"""``python -m ddpcore.bench``: strategies side by side, alone or under torchrun; further benches by first word."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from ddpcore import launch
from ddpcore.bench import buckets, comm, optim, predict, run, stats, topology
from ddpcore.bench.job import Job

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "optim": optim.main,
    "stats": stats.main,
    "topology": topology.main,
}
"""Benches in this process, by the first word. Each raises ValueError where it cannot be run as it stands."""
ON_RANKS: dict[str, Callable[[Sequence[str], launch.World | None], Job]] = {
    "": run.prepare,
    "buckets": buckets.prepare,
    "comm": comm.prepare,
    "predict": predict.prepare,
}
"""Benches on ranks: what to start, from the words and the place that torchrun gave. ValueError likewise."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a bench; returns 0, or 1 where a rank failed, or 2 where the command cannot be run as it stands."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words.pop(0) if words and not words[0].startswith("-") else ""
    speaker = "ddpcore.bench"
    try:
        if name and name not in {*COMMANDS, *ON_RANKS}:
            known = ", ".join(sorted({*COMMANDS, *ON_RANKS} - {""}))
            raise ValueError(f"unknown command {name!r}: choose from {known}, or pass flags alone")
        speaker = f"{speaker} {name}".rstrip()
        if name in COMMANDS:
            return COMMANDS[name](words)
        joined = launch.torchrun_world()
        if joined is not None:
            speaker += f", rank {joined.rank}"
        job = ON_RANKS[name](words, joined)
    except ValueError as error:
        print(f"{speaker}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return _start(job, speaker)


def _start(job: Job, speaker: str) -> int:
    try:
        launch.run(job.worker, job.args, world_size=job.world_size, backend=job.backend)
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
