"""How a new rank finds a run in progress: the address of its store."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ddpcore.records.run import ADDRESS
from ddpcore.storage.json_lines import read_json, write_json
from ddpcore.storage.limits import shown

CONNECT_SECONDS = 20.0  # a store that does not answer for so long is gone


def write_address(out: Path) -> None:
    """Write where new ranks find the store of the default process group."""
    store = c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        write_json(out / ADDRESS, {"host": store.host, "port": store.port})
    elif isinstance(store, dist.FileStore):
        write_json(out / ADDRESS, {"path": store.path})  # type: ignore[attr-defined]


def store_of(out: Path) -> dist.Store:
    """A new client of the store of the run in a folder. ValueError: none is in progress there that a rank can join."""
    if not (out / ADDRESS).exists():
        raise ValueError(f"{shown(out)} has no run in progress with real ranks and on_failure='shrink': start that")
    address = read_json(out / ADDRESS)
    if "path" in address:
        return dist.FileStore(address["path"], -1)
    try:
        return dist.TCPStore(
            address["host"], address["port"], is_master=False, timeout=timedelta(seconds=CONNECT_SECONDS)
        )
    except RuntimeError as error:
        raise ValueError(
            f"{shown(out)}: the store at {address['host']}:{address['port']} does not answer: the run has ended, or "
            "this is another machine and the run was not started by torchrun"
        ) from error
