"""The function that builds the communicator of virtual learners or of the ranks of a process group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ddpcore.comm.base import Communicator
from ddpcore.comm.choice import choose_transport
from ddpcore.comm.door import run_in
from ddpcore.comm.elastic import ElasticCommunicator
from ddpcore.comm.elastic_group import ProcessGroupFabric
from ddpcore.comm.elastic_virtual import ElasticVirtualCommunicator
from ddpcore.comm.errors import TIMEOUT_SECONDS
from ddpcore.comm.fabric import Fabric
from ddpcore.comm.link import Link, LinkedCommunicator
from ddpcore.comm.membership import LEAST, ON_FAILURE, Membership
from ddpcore.comm.mixed import MixedCommunicator
from ddpcore.comm.process import ProcessGroupCommunicator, gather_objects
from ddpcore.comm.shared import coordination
from ddpcore.comm.shared.cuda_ipc import CudaIpcCommunicator
from ddpcore.comm.shared.elastic import SharedMemoryFabric
from ddpcore.comm.shared.host import SharedMemoryCommunicator
from ddpcore.comm.shared.symmetric import SymmetricCommunicator
from ddpcore.comm.virtual import VirtualCommunicator
from ddpcore.runtime.launch import check_agents


def connect(
    group: dist.ProcessGroup | None,
    transport: str,
    device: torch.device,
    timeout: float = TIMEOUT_SECONDS,
    link: Link | None = None,
    learners: int | None = None,
    on_failure: str = ON_FAILURE[0],
    membership: Membership | None = None,
) -> Communicator:
    """Build the communicator that connects the learners. Collective over the ranks of the group.

    Args:
        group: the process group; None for virtual learners in this process.
        transport: ``shm``, ``ipc``, ``symmetric``, ``pg``, ``mixed`` or ``auto``. If ``auto`` chooses ``pg``, the
            communicator's ``description`` contains the reason.
        device: the device of the model.
        timeout: seconds that a living rank may let the others wait.
        link: a network to emulate between ranks on the CPU; None for no emulation.
        learners: number of virtual learners of each process; None for one real learner on each rank.
        on_failure: what the living do when a rank dies: ``raise`` an error, or go on without it (``shrink``).
        membership: the members that are left of a run, in the order of ranks; None: all ranks begin a run.

    Raises:
        ValueError: raised on every rank: the requested transport cannot connect the ranks, or a number is out of range.
    """
    if on_failure != ON_FAILURE[0]:
        return _connect_elastic(group, transport, device, timeout, link, learners, membership)
    if membership is not None:
        raise ValueError("membership is of a run with on_failure='shrink': pass that, or leave membership= out")
    if group is None or learners is not None:
        num_rows = 1 if learners is None else learners
        return VirtualCommunicator(num_rows) if group is None else ProcessGroupCommunicator(group, num_rows, timeout)
    if link is not None and device.type != "cpu":
        raise ValueError(f"link is for ranks on the CPU and the model is on {device.type}: leave it out")
    comm = _connect_ranks(group, transport, device, timeout)
    return comm if link is None else LinkedCommunicator(comm, link)


def _connect_elastic(
    group: dist.ProcessGroup | None,
    transport: str,
    device: torch.device,
    timeout: float,
    link: Link | None,
    learners: int | None,
    membership: Membership | None,
) -> Communicator:
    """The connection of learners that may die."""
    if link is not None:
        raise ValueError("on_failure='shrink' cannot emulate a link: leave link= out")
    num = learners if group is None else dist.get_world_size(group)
    if learners is not None and group is not None:
        raise ValueError("on_failure='shrink' takes one learner on each rank: leave learners= or group= out")
    assert num is not None
    if membership is not None and (group is None or len(membership.members) != num):
        raise ValueError(
            f"the run has {len(membership.members)} learners left, {list(membership.members)}: start as many ranks"
        )
    if membership is None and num <= LEAST:
        raise ValueError(f"on_failure='shrink' needs {LEAST} learners after a death and there are {num}: start more")
    if group is None:
        return ElasticVirtualCommunicator(num)
    check_agents()
    ids, first = (None, 0) if membership is None else (membership.members, membership.first)
    hosts = gather_objects(group, coordination.host_id(), "the search for a transport", timeout)
    choice = choose_transport(transport, world_size=num, device=device.type, num_hosts=len(set(hosts)), may_die=True)
    if choice.name == "ipc":
        raise ValueError("on_failure='shrink' does not work over CUDA IPC: take transport='pg'")
    if choice.name == "shm":
        fabric: Fabric = SharedMemoryFabric(group, timeout, ids)
    else:
        fabric = ProcessGroupFabric(group, device, timeout, ids)
    return ElasticCommunicator(fabric, first=first)


def _connect_ranks(group: dist.ProcessGroup, transport: str, device: torch.device, timeout: float) -> Communicator:
    hosts = gather_objects(group, coordination.host_id(), "the search for a transport", timeout)
    choice = choose_transport(transport, world_size=len(hosts), device=device.type, num_hosts=len(set(hosts)))
    reason = choice.reason
    if choice.name == "ipc":
        return CudaIpcCommunicator(group, device, timeout)
    if choice.name == "symmetric":
        return SymmetricCommunicator(group, device, timeout)
    if choice.name in ("shm", "mixed"):
        try:
            if choice.name == "mixed":
                return MixedCommunicator(group, hosts, timeout)
            return SharedMemoryCommunicator(group, timeout)
        except coordination.Unreachable as error:
            if transport != "auto":
                raise
            reason = str(error)
    comm = ProcessGroupCommunicator(group, timeout=timeout)
    comm.description += f" ({reason})"
    return comm


def find_run(store: dist.Store, device: torch.device, timeout: float) -> ElasticCommunicator:
    """The connection of a new rank to a run with ``on_failure="shrink"``, before :meth:`ElasticCommunicator.enter`.

    Args:
        store: that of the process group of the run.
        device: the device of the model.
        timeout: seconds to wait for the run.

    Raises:
        RuntimeError: there is no such run.
    """
    roll, kind, first = run_in(store, timeout)
    fabric: Fabric
    if kind == "shm":
        fabric = SharedMemoryFabric.of_newcomer(roll)
    else:
        fabric = ProcessGroupFabric.of_newcomer(roll, kind, device)
    return ElasticCommunicator(fabric, first=first)
