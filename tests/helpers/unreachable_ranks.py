"""Ranks that may die and cannot reach each other's memory: what connects them, for each transport."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ddpcore import Connection
from ddpcore.comm.connect import connect
from ddpcore.comm.shared import coordination
from helpers.ranks import join


def _unreachable(*_: Any) -> None:
    raise coordination.Unreachable("there is no memory that ranks share")


def main() -> None:
    path, _, _ = join()
    coordination.Coordinator = _unreachable  # type: ignore[assignment,misc]
    found = {}
    for transport in ("auto", "shm"):
        try:
            connection = Connection(transport=transport, on_failure="shrink")
            found[transport] = connect(dist.group.WORLD, torch.device("cpu"), connection).description
        except coordination.Unreachable as error:
            found[transport] = str(error)
    torch.save(found, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
