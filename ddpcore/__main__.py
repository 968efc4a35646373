"""``ddpcore COMMAND``: the commands of ddpcore, each with ``--help``. ``python -m ddpcore COMMAND`` is the same."""

import os
import runpy
import sys
from collections.abc import Sequence
from difflib import get_close_matches

# command -> module, words that come before the user's, one line of help
COMMANDS = {
    "demo": ("ddpcore.bench", ("demo",), "one minute: why averaging weights trains at larger learning rates"),
    "doctor": ("ddpcore.bench", ("doctor",), "what is wrong with hosts and their network, and which strategy suits"),
    "launch": ("ddpcore.integrations.slurm", (), "write or submit a Slurm job that runs a command of ddpcore"),
    "bench": ("ddpcore.bench", (), "compare strategies, optimizers, bucket sizes and transports on this machine"),
    "train": ("ddpcore.training", (), "a whole training run from one config"),
    "experiments": ("ddpcore.experiments", (), "repeat published studies, and compare with their numbers"),
    "report": ("ddpcore.report", (), "a page of figures from runs and benches"),
}
HELP = f"""\
examples:
  ddpcore demo
  ddpcore bench --world-size 4
  ddpcore train --out runs/first model=mlp data=digits run.epochs=20

commands (ddpcore COMMAND --help, ddpcore --version):
{"".join(f"  {name:12} {about}" + chr(10) for name, (_, _, about) in COMMANDS.items())}"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit status, or 2 if there is no such command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    name = words[0]
    if name == "--version":
        print(f"ddpcore {sys.modules['ddpcore'].__version__}")  # Python has imported the package before this file
        return 0
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        remedy = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(COMMANDS)}"
        print(f"ddpcore: unknown command {name!r}: {remedy}", file=sys.stderr)
        return 2
    module, first, _ = COMMANDS[name]
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # as python -m does, so that module:attribute may name a file of this folder
    sys.argv = [f"ddpcore {name}", *first, *words[1:]]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except ImportError as error:
        if not isinstance(error, ValueError):  # MissingPackage of options/extras.py is both
            raise
        print(f"ddpcore {name}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
