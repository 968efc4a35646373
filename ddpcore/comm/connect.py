"""The choice of a backend and of a transport, and the communicator of virtual learners or of the ranks of a group."""

from collections.abc import Collection
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist

from ddpcore.comm.base import Communicator
from ddpcore.comm.elastic import ElasticCommunicator
from ddpcore.comm.fabric import ProcessGroupFabric, SharedMemoryFabric, last_run, new_run
from ddpcore.comm.groups import backends_of, gather_objects
from ddpcore.comm.link import Link, LinkedCommunicator
from ddpcore.comm.membership import LEAST, ON_FAILURE, Membership, Roll
from ddpcore.comm.mixed import MixedCommunicator
from ddpcore.comm.process import ProcessGroupCommunicator
from ddpcore.comm.shared import coordination
from ddpcore.comm.shared.cuda_ipc import CudaIpcCommunicator
from ddpcore.comm.shared.segments import SharedMemoryCommunicator
from ddpcore.comm.virtual import ElasticVirtualCommunicator, VirtualCommunicator
from ddpcore.runtime.launch import TIMEOUT_SECONDS, check_agents, check_timeout

BACKENDS = ("auto", "nccl", "gloo", "virtual")
TRANSPORTS = ("auto", "shm", "ipc", "pg", "mixed")


@dataclass(frozen=True)
class Choice:
    """A backend, ``nccl``, ``gloo`` or ``virtual``, or a transport, of ``TRANSPORTS``; and why, in one clause."""

    name: str
    reason: str


def choose_backend(requested: str, *, world_size: int, device: str, num_gpus: int) -> Choice:
    """Choose NCCL if every rank has a GPU, virtual learners if ranks would share a GPU, and gloo on the CPU.

    A ``requested`` backend other than ``auto`` is only checked. ``device`` is ``cpu`` or ``cuda``, where the model
    trains. ValueError: the requested backend cannot run here; the message names a flag to change.
    """
    if requested not in BACKENDS:
        raise ValueError(f"backend is {requested!r}: choose from {', '.join(BACKENDS)}")
    if requested == "nccl" and device != "cuda":
        raise ValueError("--backend nccl needs a GPU for each rank and the model is on the CPU: use --backend gloo")
    if requested == "nccl" and num_gpus < world_size:
        what = f"--backend nccl needs a GPU for each of {world_size} ranks and {num_gpus} are visible"
        raise ValueError(f"{what}: use --backend virtual, or a smaller --world-size")
    if requested != "auto":
        return Choice(requested, "as requested")
    if device != "cuda":
        return Choice("gloo", "ranks on the CPU")
    if num_gpus >= world_size:
        return Choice("nccl", f"a GPU for each of {world_size} ranks")
    return Choice("virtual", f"{world_size} learners would share {num_gpus} GPU" + ("s" if num_gpus != 1 else ""))


def choose_transport(requested: str, *, world_size: int, device: str, num_hosts: int, may_die: bool = False) -> Choice:
    """Choose shared memory for ranks on the CPU of one Linux host, and for the ranks of each of several hosts.

    The process group connects all other ranks. CUDA IPC is used only if it is requested. A ``requested`` transport
    other than ``auto`` is only checked. With ``may_die`` the others go on when a rank dies (``on_failure="shrink"``).
    ValueError: the requested transport cannot connect these ranks; the message names a flag to change.
    """
    if requested not in TRANSPORTS:
        raise ValueError(f"transport is {requested!r}: choose from {', '.join(TRANSPORTS)}")
    for name, wanted in (("shm", "cpu"), ("ipc", "cuda"), ("mixed", "cpu")):
        if requested == name and device != wanted:
            raise ValueError(f"--transport {name} is for {wanted} and the model is on {device}: use --transport pg")
        if requested == name != "mixed" and num_hosts > 1:
            raise ValueError(f"--transport {name} is for one host and the ranks are on {num_hosts}: use --transport pg")
    if requested == "mixed" and may_die:
        raise ValueError(f"--transport {requested} is for ranks that end together when one dies: use --transport pg")
    if requested != "auto":
        return Choice(requested, "as requested")
    if device != "cpu":
        return Choice("pg", f"ranks on {device}")
    if world_size == 1:
        return Choice("pg", "one rank shares memory with no other")
    if num_hosts == world_size:
        return Choice("pg", f"{world_size} ranks on {num_hosts} hosts")
    if num_hosts > 1 and may_die:
        return Choice("pg", f"ranks on {num_hosts} hosts, which may die")
    if num_hosts > 1:
        how = "ranks of one host share memory, a process group connects hosts"
        return Choice("mixed", f"{world_size} ranks on {num_hosts} hosts: {how}")
    return Choice("shm", f"{world_size} ranks on the CPU of one host")


@dataclass(frozen=True, kw_only=True)
class Connection:
    """How learners exchange bytes, and what they do when one of them does not answer.

    Args:
        transport: how ranks exchange bytes: ``shm``, ``ipc``, ``pg``, ``mixed`` or ``auto``, see docs/transports.md.
        timeout: seconds that a living rank may let the others wait. Other calls of the group keep their own timeout.
        link: a network to emulate between ranks on the CPU; None for no emulation.
        bucket_bytes: size of the largest bucket of averaged gradients, in bytes.
        first_bucket_bytes: size of the first bucket, in bytes.
        on_failure: when a rank dies the others ``raise`` an error, or ``shrink`` and go on, see docs/reliability.md.
        membership: to resume a run with ``shrink`` with the learners that are left of it, see docs/reliability.md.

    ValueError: the timeout is out of range, ``on_failure`` has no such value, or ``membership`` does not fit to it.
    """

    transport: str = "auto"
    timeout: float = TIMEOUT_SECONDS
    link: Link | None = None
    bucket_bytes: int = 25 * 2**20
    first_bucket_bytes: int = 2**20
    on_failure: str = ON_FAILURE[0]
    membership: Membership | None = None

    def __post_init__(self) -> None:
        check_timeout(self.timeout)
        if self.on_failure not in ON_FAILURE:
            raise ValueError(f"on_failure is {self.on_failure!r}: choose from {', '.join(ON_FAILURE)}")
        if self.membership is not None and self.on_failure == ON_FAILURE[0]:
            raise ValueError("membership is of a run with on_failure='shrink': pass that, or leave membership= out")

    def given(self, names: Collection[str] | None = None) -> str:
        """The fields that differ from their defaults, as ``connection=Connection(a=, b=)``; empty if there are none."""
        chosen = [item for item in fields(self) if names is None or item.name in names]
        found = [f"{item.name}=" for item in chosen if getattr(self, item.name) != item.default]
        return f"connection=Connection({', '.join(found)})" if found else ""


def connect(
    group: dist.ProcessGroup | None,
    device: torch.device,
    connection: Connection | None = None,
    learners: int | None = None,
) -> Communicator:
    """Build the communicator that connects the learners. Collective over the ranks of the group.

    Args:
        group: the process group; None for virtual learners in this process.
        device: of the model.
        connection: None for the defaults. Where ``auto`` chooses ``pg``, ``description`` has the reason.
        learners: number of virtual learners of each process; None for one real learner on each rank.

    ValueError, on every rank: the requested transport cannot connect the ranks, or a number is out of range.
    """
    connection = connection or Connection()
    transport, timeout, link = connection.transport, connection.timeout, connection.link
    if connection.on_failure != ON_FAILURE[0]:
        return _connect_elastic(group, device, connection, learners)
    if group is None or learners is not None:
        num_rows = 1 if learners is None else learners
        return VirtualCommunicator(num_rows) if group is None else ProcessGroupCommunicator(group, num_rows, timeout)
    if link is not None and device.type != "cpu":
        raise ValueError(f"link is for ranks on the CPU and the model is on {device.type}: leave it out")
    comm = _connect_ranks(group, transport, device, timeout)
    return comm if link is None else LinkedCommunicator(comm, link)


def _connect_elastic(
    group: dist.ProcessGroup | None, device: torch.device, connection: Connection, learners: int | None
) -> Communicator:
    transport, timeout, membership = connection.transport, connection.timeout, connection.membership
    if connection.link is not None:
        raise ValueError("on_failure='shrink' cannot emulate a link: leave link= out")
    num = learners if group is None else dist.get_world_size(group)
    if learners is not None and group is not None:
        raise ValueError("on_failure='shrink' takes one learner on each rank: leave learners= or group= out")
    assert num is not None
    if membership is not None and (group is None or len(membership.members) != num):
        what = f"the run has {len(membership.members)} learners left, {list(membership.members)}"
        raise ValueError(f"{what}: start as many ranks")
    if membership is None and num <= LEAST:
        raise ValueError(f"on_failure='shrink' needs {LEAST} learners after a death and there are {num}: start more")
    if group is None:
        return ElasticVirtualCommunicator(num)
    check_agents()
    hosts = gather_objects(group, coordination.host_id(), "the search for a transport", timeout)
    choice = choose_transport(transport, world_size=num, device=device.type, num_hosts=len(set(hosts)), may_die=True)
    if choice.name == "ipc":
        raise ValueError("on_failure='shrink' does not work over CUDA IPC: take transport='pg'")
    ids = tuple(range(num)) if membership is None else membership.members
    coordinator = None
    if choice.name == "shm":
        try:
            coordinator = coordination.Coordinator(group, timeout, ids)
        except coordination.Unreachable:
            if transport != "auto":
                raise
    roll, kind = Roll(new_run(group, timeout), timeout), backends_of(group)[device.type]
    fabric = ProcessGroupFabric(roll, kind, device) if coordinator is None else SharedMemoryFabric(roll, coordinator)
    fabric.take(ids[dist.get_rank(group)], ids)
    return ElasticCommunicator(fabric, first=0 if membership is None else membership.first)


def _connect_ranks(group: dist.ProcessGroup, transport: str, device: torch.device, timeout: float) -> Communicator:
    hosts = gather_objects(group, coordination.host_id(), "the search for a transport", timeout)
    choice = choose_transport(transport, world_size=len(hosts), device=device.type, num_hosts=len(set(hosts)))
    reason = choice.reason
    try:
        if choice.name == "ipc":
            return CudaIpcCommunicator(group, device, timeout)
        if choice.name == "mixed":
            return MixedCommunicator(group, hosts, timeout)
        if choice.name == "shm":
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

    ``store`` is the store of the run's process group. RuntimeError: it has no such run after ``timeout`` seconds.
    """
    roll = Roll(last_run(store, timeout), timeout)
    run = roll.wait_for("run")
    kind, first = run["kind"], run["first"]
    coordinator = coordination.Coordinator(None, timeout) if kind == "shm" else None
    fabric = ProcessGroupFabric(roll, kind, device) if coordinator is None else SharedMemoryFabric(roll, coordinator)
    return ElasticCommunicator(fabric, first=first)
