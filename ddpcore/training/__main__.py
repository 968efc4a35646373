"""``python -m ddpcore.training``, see :mod:`ddpcore.training.command`."""

import sys

from ddpcore.training.command import main

if __name__ == "__main__":
    sys.exit(main())
