"""``ddpcore launch --slurm``: a Slurm job that starts torchrun on each node, and goes on after it was requeued."""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ddpcore.options.command_line import parse
from ddpcore.options.fields import check, field
from ddpcore.storage.files import plain

PROGRAM = "ddpcore launch"
RESUMES = "train"  # the command that takes --resume


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Write a Slurm job, or submit it, that runs a command of ddpcore on several nodes: the words after --."""

    EXAMPLE = "ddpcore launch --slurm --nodes 4 --gpus 8 -- train --out runs/first model=mlp data=digits run.epochs=20"

    slurm: bool = field(False, "make a Slurm job, the only kind so far", action="store_true")
    nodes: int = field(1, "number of nodes", least=1)
    gpus: int = field(0, "GPUs and ranks of each node", least=0)
    ranks: int = field(0, "ranks of each node without GPUs", least=0)
    time: str | None = field(None, "time limit of Slurm, such as 12:00:00")
    partition: str | None = field(None, "partition of Slurm")
    port: int = field(29400, "free port on the first node", least=1024)
    submit: bool = field(False, "submit the job with sbatch instead of printing it", action="store_true")

    def __post_init__(self) -> None:
        check(self)
        if not self.slurm:
            raise ValueError("name the kind of the job: --slurm")
        if bool(self.gpus) == bool(self.ranks):
            raise ValueError("say how many ranks a node has: --gpus N, or --ranks N on nodes without GPUs")


def job(options: LaunchOptions, words: Sequence[str]) -> str:
    """The text of the job.

    ``train`` gets ``--resume``, which begins if there is no checkpoint. Slurm requeues the job if a node fails. It
    sends SIGTERM two minutes before the time limit, and then a run saves a checkpoint. ValueError: no command.
    """
    if not words or words[0].startswith("-"):
        raise ValueError("the command is missing: add it after --, such as -- train --out runs/first model=mlp")
    resumes = [*words[:1], "--resume", *words[1:]] if words[0] == RESUMES and "--resume" not in words else list(words)
    each = options.gpus or options.ranks
    lines = [
        "#!/bin/bash",
        "#SBATCH --job-name=ddpcore",
        f"#SBATCH --nodes={options.nodes}",
        "#SBATCH --ntasks-per-node=1",
        *([f"#SBATCH --gpus-per-node={options.gpus}"] if options.gpus else []),
        *([f"#SBATCH --time={options.time}"] if options.time else []),
        *([f"#SBATCH --partition={options.partition}"] if options.partition else []),
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=TERM@120",
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        f'srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node {each} --rdzv-backend c10d \\',
        f'    --rdzv-id "$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}" --rdzv-endpoint "$head:{options.port}" \\',
        f"    -m ddpcore {shlex.join(resumes)}",
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run. Returns 0, the status of sbatch, or 2 if the command is wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    place = words.index("--") if "--" in words else len(words)
    try:
        options = parse(LaunchOptions, words[:place], prog=PROGRAM)
        text = job(options, words[place + 1 :])
        if not options.submit:
            print(text, end="")
            return 0
        return subprocess.run(["sbatch"], input=text, text=True, check=False).returncode
    except FileNotFoundError:
        message = "sbatch is not on this machine: submit from a login node, or leave --submit out"
    except ValueError as error:
        message = str(error)
    print(f"{PROGRAM}: {plain(message)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
