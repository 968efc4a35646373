"""``ddpcore bench [COMMAND]``: without a command, it compares strategies; see ``--help``."""

import sys
from collections.abc import Sequence

from ddpcore.options import command_line
from ddpcore.options.extras import MissingPackage, extra
from ddpcore.runtime import launch
from ddpcore.storage.files import plain


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0, or 1 if a rank failed, 2 if the command line is wrong, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words.pop(0) if words and not words[0].startswith("-") and "=" not in words[0] else ""
    program = f"ddpcore {name}" if name in ("demo", "doctor") else "ddpcore bench"
    started = False
    try:
        with extra("bench"):
            from ddpcore.bench.commands import COMMANDS  # noqa: PLC0415  a missing package is one line
        if name == "optim":
            raise ValueError("optim is a script of the sources now: run python benchmarks/bench_optim.py")
        if name not in COMMANDS:
            known = ", ".join(filter(None, COMMANDS))
            raise ValueError(f"unknown command {name!r}: choose from {known}, or give flags and KEY=VALUE")
        kind = COMMANDS[name]
        if program == "ddpcore bench":
            program = f"{program} {name}".rstrip()
        abouts = [f"{one}: {(of.options.__doc__ or '').splitlines()[0]}" for one, of in COMMANDS.items() if one]
        prog, epilog = program, "" if name else f"further benches, see ddpcore bench NAME --help: {' '.join(abouts)}"
        if (torchrun := launch.torchrun_world()) is not None:
            program += f", rank {torchrun.rank}"
        start = kind.prepare(command_line.parse(kind.options, words, prog=prog, epilog=epilog), torchrun)
        started = True
        start()
    except KeyboardInterrupt:
        return 130
    except (ValueError, launch.RankFailed) as error:
        if started and not isinstance(error, launch.UsageError | launch.RankFailed | MissingPackage):
            raise
        print(f"{program}: {plain(str(error))}", file=sys.stderr)
        return 1 if isinstance(error, launch.RankFailed) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
