"""From a process group to a connection of its ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ddpcore.comm.base import Communicator
from ddpcore.comm.choice import choose_transport
from ddpcore.comm.link import Link, LinkedCommunicator
from ddpcore.comm.process import ProcessGroupCommunicator
from ddpcore.comm.shared.coordination import Unreachable, host_id
from ddpcore.comm.shared.cuda_ipc import CudaIpcCommunicator
from ddpcore.comm.shared.host import TIMEOUT_SECONDS, SharedMemoryCommunicator


def connect(
    group: dist.ProcessGroup,
    transport: str,
    device: torch.device,
    timeout: float = TIMEOUT_SECONDS,
    link: Link | None = None,
) -> Communicator:
    """Connect the ranks of a group by ``shm``, ``ipc``, ``pg``, or ``auto``: what fits. Collective.

    Where ``auto`` takes the process group, ``description`` says why. ``timeout`` is for ``shm`` and ``ipc``: seconds
    that a rank which lives may let the others wait. A process group has its own. ``link`` is a network to emulate.

    Raises:
        ValueError: on every rank alike, the transport that was asked for does not connect them; a bad timeout.
    """
    if link is not None and device.type != "cpu":
        raise ValueError(f"link is for ranks on the CPU and the model is on {device.type}: leave it out")
    comm = _connect(group, transport, device, timeout)
    return comm if link is None else LinkedCommunicator(comm, link)


def _connect(group: dist.ProcessGroup, transport: str, device: torch.device, timeout: float) -> Communicator:
    hosts: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(hosts, host_id(), group=group)
    choice = choose_transport(transport, world_size=len(hosts), device=device.type, num_hosts=len(set(hosts)))
    reason = choice.reason
    if choice.name == "ipc":
        return CudaIpcCommunicator(group, device, timeout)
    if choice.name == "shm":
        try:
            return SharedMemoryCommunicator(group, timeout)
        except Unreachable as error:
            if transport != "auto":
                raise
            reason = str(error)
    comm = ProcessGroupCommunicator(group)
    comm.description += f" ({reason})"
    return comm
