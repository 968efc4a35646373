"""From a process group to a connection of its ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ddpcore.comm.base import Communicator
from ddpcore.comm.choice import choose_transport
from ddpcore.comm.ipc import CudaIpcCommunicator
from ddpcore.comm.meeting import host_id
from ddpcore.comm.process import ProcessGroupCommunicator
from ddpcore.comm.shared_memory import SharedMemoryCommunicator


def connect(group: dist.ProcessGroup, transport: str, device: torch.device) -> Communicator:
    """Connect the ranks of a group by ``shm``, ``ipc``, ``pg``, or ``auto``: what fits. Collective.

    Where ``auto`` takes the process group, ``description`` says why.

    Raises:
        ValueError: on every rank alike, the transport that was asked for does not connect them.
    """
    hosts: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(hosts, host_id(), group=group)
    choice = choose_transport(transport, world_size=len(hosts), device=device.type, num_hosts=len(set(hosts)))
    reason = choice.reason
    if choice.name == "ipc":
        return CudaIpcCommunicator(group, device)
    if choice.name == "shm":
        try:
            return SharedMemoryCommunicator(group)
        except ValueError as error:
            if transport != "auto":
                raise
            reason = str(error)
    comm = ProcessGroupCommunicator(group)
    comm.description += f" ({reason})"
    return comm
