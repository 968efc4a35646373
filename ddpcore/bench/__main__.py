"""``python -m ddpcore.bench [COMMAND]``: without a command, it compares strategies; see ``--help``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from ddpcore.bench import buckets, comm, demo, optim, predict, run, stats, topology
from ddpcore.bench.config import BenchConfig, Options
from ddpcore.options import command_line
from ddpcore.runtime import launch
from ddpcore.runtime.launch import World

# prepare(options, torchrun's world or None) checks both on this machine and returns a function that runs the command.
# It raises ValueError, in one line, before any process starts.
Prepare = Callable[[Any, World | None], Callable[[], None]]
COMMANDS: dict[str, tuple[type[Options], Prepare]] = {
    "": (BenchConfig, run.prepare),
    "buckets": (buckets.BucketsConfig, buckets.prepare),
    "comm": (comm.CommConfig, comm.prepare),
    "demo": (demo.DemoConfig, demo.prepare),
    "optim": (optim.OptimConfig, optim.prepare),
    "predict": (predict.PredictConfig, predict.prepare),
    "stats": (stats.StatsConfig, stats.prepare),
    "topology": (topology.TopologyConfig, topology.prepare),
}
FURTHER = "|".join(filter(None, COMMANDS))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0, or 1 if a rank failed, 2 if the command line is wrong, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words.pop(0) if words and not words[0].startswith("-") else ""
    program = "ddpcore.bench"
    started = False
    try:
        if name not in COMMANDS:
            known = FURTHER.replace("|", ", ")
            raise ValueError(f"unknown command {name!r}: choose from {known}, or give only flags")
        options, prepare = COMMANDS[name]
        program = f"{program} {name}".rstrip()
        prog, epilog = f"python -m {program}", "" if name else f"Further benches: python -m ddpcore.bench {FURTHER}"
        torchrun = launch.torchrun_world()
        if torchrun is not None:
            program += f", rank {torchrun.rank}"
        given = command_line.parse(options, words, prog=prog, description=options.__doc__ or "", epilog=epilog)
        start = prepare(given, torchrun)
        started = True
        start()
    except KeyboardInterrupt:
        return 130
    except (ValueError, launch.RankFailed) as error:
        if started and not isinstance(error, launch.UsageError | launch.RankFailed):
            raise
        print(f"{program}: {error}", file=sys.stderr)
        return 1 if isinstance(error, launch.RankFailed) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
