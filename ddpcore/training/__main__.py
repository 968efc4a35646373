"""The command ``ddpcore train --out DIR KEY=VALUE...``: a whole training run."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ddpcore.options.command_line import SETTINGS, parse
from ddpcore.options.fields import check, field, parse_settings
from ddpcore.records.run import CHECKPOINTS, RunRecord
from ddpcore.runtime import launch
from ddpcore.storage.files import plain, shown
from ddpcore.training.build import backend_here, check_connection
from ddpcore.training.checkpoint import members_left
from ddpcore.training.config import TrainConfig, describe_fields, merged
from ddpcore.training.run import join_run, train_rank

PROGRAM = "ddpcore train"


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train as a TrainConfig says: --out runs/first model=mlp data=digits strategy=ssgd strategy.learners=4 run.steps=9

    An option of a part is a key of its section, such as optimizer.momentum=0.9. --fields prints all fields.
    """

    EXAMPLE = "ddpcore train --out runs/first model=mlp data=digits run.epochs=20"

    settings: Sequence[str] = SETTINGS
    out: Path | None = field(None, "folder of record, checkpoints and model", metavar="DIR")
    world_size: int = field(1, "start this many ranks; with 1 all learners are virtual", least=1)
    resume: bool = field(False, "continue from the last checkpoint in --out", action="store_true")
    join: bool = field(False, "join the run in --out as a new rank; it needs on_failure=shrink", action="store_true")
    fields: str | None = field(None, "print all fields, or those with this word", nargs="?", const="", metavar="WORD")

    def __post_init__(self) -> None:
        check(self)
        if self.out is None and self.fields is None:
            raise ValueError("--out is missing: name the folder of the run, such as --out runs/first")
        if self.join and (self.settings or self.resume or self.world_size > 1):
            raise ValueError("--join takes all settings from the run in --out: leave everything else out")


def main(argv: Sequence[str] | None = None) -> int:
    """Run. Returns 0, or 1 if a rank failed, 2 if the command is wrong, 130 if a signal stopped the run."""
    try:
        options = parse(TrainOptions, argv, prog=PROGRAM)
        if options.fields is not None:
            return _print_fields(options.fields)
        assert options.out is not None, "it is missing only with --fields"
        if options.join:
            num = RunRecord.read(options.out).header["config"]["strategy"]["learners"]
            torch.set_num_threads(launch.threads_per_rank(num))
            join_run(options.out)
        else:
            _start(options, options.out)
        if (world := launch.torchrun_world()) is None or world.rank == 0:
            final = RunRecord.read(options.out).final
            accuracy = "no test split" if final["accuracy"] is None else f"accuracy {100 * final['accuracy']:.2f} %"
            ended = "diverged at" if final["diverged"] else "finished"
            print(f"{ended} step {final['step']}, {accuracy}: ddpcore report {shown(options.out)}")
        return 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        code, message = 2, str(error)
    except MemoryError as error:
        code, message = 1, str(error)
    except launch.RankFailed as error:
        code, message = 1, str(error).splitlines()[-1]
    except RuntimeError as error:  # of a rank that joins
        if not options.join:
            raise
        code, message = 1, str(error).partition("\n")[0]
    except launch.Stopped as error:
        code, message = 130, str(error)
    print(f"{PROGRAM}: {plain(message.replace('resume=True', '--resume'))}", file=sys.stderr)
    return code


def _print_fields(word: str) -> int:
    if not (found := describe_fields(word)):
        raise ValueError(f"--fields {word}: no field has this word in its key or text: take another, or none for all")
    for key, text in found:
        print(f"{key}: {text}")
    return 0


def _start(options: TrainOptions, out: Path) -> None:
    torchrun = launch.torchrun_world()
    world_size = options.world_size if torchrun is None else torchrun.world_size
    left = members_left(out / CHECKPOINTS) if options.resume and world_size > 1 else None
    learners = world_size if left is None else left.first
    config = TrainConfig.from_dict(merged({"strategy": {"learners": learners}}, parse_settings(options.settings)))
    if left is not None and torchrun is None and len(left.members) != world_size:
        world_size = len(left.members)
        print(f"{PROGRAM}: the run goes on with the learners {list(left.members)} that are left", file=sys.stderr)
    num_hosts = launch.hosts_here()
    backend = "virtual" if world_size == 1 else backend_here(config, world_size, num_hosts).name
    if backend == "virtual" and world_size > 1:
        shared = f"{world_size} ranks would share {torch.cuda.device_count()} GPU"
        raise ValueError(f"{shared}: leave --world-size out, or run.device=cpu")
    check_connection(config, world_size, num_hosts)
    launch.run(
        train_rank,
        (config, out, options.resume),
        world_size=world_size,
        backend=backend,
        timeout=config.strategy.timeout,
        on_failure=config.strategy.on_failure,
    )


if __name__ == "__main__":
    sys.exit(main())
