"""A real rank that runs idioms, as a plain loop and in a world of ``distribute``.

The further words: the world, the distance in the table from one idiom that runs to the next, and the strategies.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import torch
import torch.distributed as dist

from helpers.idioms.run import execute
from helpers.idioms.table import IDIOMS
from helpers.ranks import join

# A process group cannot detect that ranks are at different operations.
UNSEEN_BY_A_GROUP = re.compile("came to operation|one rank alone")


def names(distance: int) -> list[str]:
    """The idioms of real ranks that run."""
    return [name for name, one in IDIOMS.items() if "ranks" in one.worlds][::distance]


def main() -> None:
    path, _, _ = join()
    world, distance, *strategies = sys.argv[4:]
    seen: dict[tuple[str, str, str], Any] = {}
    for name in names(int(distance)):
        one = IDIOMS[name]
        for strategy in strategies:
            if world == "pg" and UNSEEN_BY_A_GROUP.search(one.message(strategy) or ""):
                continue
            for kind in ("plain", world):
                seen[name, strategy, kind] = execute(one, strategy, kind)
                dist.barrier()
    torch.save(seen, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
