"""``ddpcore experiments list | run STUDY | compare RUNS... | landscape RUNS...``."""

import sys
from collections.abc import Sequence

from ddpcore.options.extras import extra
from ddpcore.runtime import launch
from ddpcore.storage.files import plain


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0, or 1 if a run failed, 2 if the command is wrong, 130 if a signal stopped it."""
    try:
        with extra("bench"):
            from ddpcore.experiments.commands import parse  # noqa: PLC0415  a missing package is one line
        command, options = parse(argv)
        return command(options)
    except (ValueError, OSError) as error:
        code, message = 2, str(error)
    except launch.RankFailed as error:
        code, message = 1, f"{str(error).splitlines()[-1]}: go on with --resume"
    except launch.Stopped as error:
        code, message = 130, str(error).replace("resume=True", "--resume")
    except KeyboardInterrupt:
        return 130
    print(f"ddpcore experiments: {plain(message)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
