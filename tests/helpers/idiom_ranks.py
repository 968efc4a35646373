"""One of two real ranks that run every idiom, as a plain loop and with ``distribute``, for the strategies named."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from helpers.idioms.run import execute
from helpers.idioms.table import IDIOMS
from helpers.ranks import join


def main() -> None:
    path, _, _ = join()
    seen: dict[tuple[str, str, str], Any] = {}
    for name, one in IDIOMS.items():
        for strategy in sys.argv[4:]:
            for world in ("plain", "ranks"):
                seen[name, strategy, world] = execute(one, strategy, world)
                dist.barrier()
    torch.save(seen, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
