"""``ddpcore report``, see :mod:`ddpcore.report.command`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ddpcore.options.extras import MissingPackage, extra


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, see :func:`ddpcore.report.command.run_command`. Returns 2 if a package is missing."""
    try:
        with extra("report"):
            from ddpcore.report.command import run_command  # noqa: PLC0415  a missing package is one line
    except MissingPackage as error:
        print(f"ddpcore report: {error}", file=sys.stderr)
        return 2
    return run_command(argv)


if __name__ == "__main__":
    sys.exit(main())
