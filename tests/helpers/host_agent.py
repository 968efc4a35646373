"""An agent of torchrun on an emulated host: ``host_agent.py KEEPER HOST NUM_HOSTS PER_HOST SCRIPT WORDS...``."""

from __future__ import annotations

import os
import sys

from torch.distributed.run import main

from helpers import hosts

PORT = 29400


def words(host: int, num_hosts: int, per_host: int) -> list[str]:
    """As in docs/multihost.md; ``is_host`` and ``local-addr`` because a namespace has no name of its own."""
    return [
        *("--nnodes", str(num_hosts), "--nproc-per-node", str(per_host)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts.address(0)}:{PORT}", "--rdzv-id", "test"),
        *("--rdzv-conf", f"is_host={int(host == 0)}", "--local-addr", hosts.address(host)),
    ]


if __name__ == "__main__":
    keeper, host, num_hosts, per_host = map(int, sys.argv[1:5])
    hosts.enter(keeper, host)
    os.environ["GLOO_SOCKET_IFNAME"] = hosts.device(host)
    main([*words(host, num_hosts, per_host), *sys.argv[5:]])
