"""A real rank that runs idioms, as a plain loop and in the worlds of ranks of ``distribute``.

The further words: whether it runs ``fast`` idioms or ``all``, and the strategies.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from helpers.idioms.run import execute
from helpers.idioms.table import FAST, IDIOMS, worlds
from helpers.ranks import join


def main() -> None:
    path, _, world_size = join()
    which, *strategies = sys.argv[4:]
    seen: dict[tuple[str, str, str], Any] = {}
    for name in FAST if which == "fast" else IDIOMS:
        for strategy in strategies:
            for world in ("plain", *where) if (where := worlds(name, strategy, world_size)) else ():
                if world != "virtual":
                    seen[name, strategy, world] = execute(IDIOMS[name], strategy, world)
                    dist.barrier()
    torch.save(seen, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
