"""A real rank that runs idioms, as a plain loop and in a world of ``distribute``.

The further words: the world, the distance in the table from one idiom that runs to the next, and the strategies.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from helpers.idioms.run import execute
from helpers.idioms.table import IDIOMS
from helpers.ranks import join

# A process group cannot detect that ranks are at different operations.
UNSEEN_BY_A_GROUP = re.compile("came to operation|one rank alone")


def runs(world: str, distance: int, strategies: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The idioms that run in this world, and the strategies."""
    for name, one in [*IDIOMS.items()][::distance]:
        for strategy in strategies if "ranks" in one.worlds else ():
            if world != "pg" or not UNSEEN_BY_A_GROUP.search(one.message(strategy) or ""):
                yield name, strategy


def main() -> None:
    path, _, _ = join()
    world, distance, *strategies = sys.argv[4:]
    seen: dict[tuple[str, str, str], Any] = {}
    own = set(runs(world, int(distance), strategies))
    for name, one in [*IDIOMS.items()][:: int(distance)]:
        for strategy in strategies:
            for kind in ("plain", *([world] if (name, strategy) in own else [])):
                seen[name, strategy, kind] = execute(one, strategy, kind)
                dist.barrier()
    torch.save(seen, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
