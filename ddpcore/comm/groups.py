"""Process groups: time limits and named errors of their calls, groups of their own, objects that ranks gather."""

import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

Fact = tuple[str, str]
"""The name of something that all ranks must have in common, and its value on this rank as text."""
CHANNELS: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
"""Groups for ddpcore's messages, by the program's group: over one group gloo would mix both's without a word."""
_ALONE = "run a pass of one rank alone under torch.no_grad(), step() and evaluation_model() on all"
CALL_ALIKE = f"all ranks must call the same: {_ALONE}"
_LATE = re.compile(r"timed? ?out", re.IGNORECASE)  # in an error of gloo, NCCL or a store


def size_of(tensor: Tensor) -> str:
    """``5000 float32``."""
    return f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"


def bytes_of(tensor: Tensor) -> Tensor:
    """The same memory as ``[bytes]``: backends lack dtypes, such as int16, and move bytes of all."""
    return tensor.view(-1).view(torch.uint8)


def at(step: int | None) -> str:
    """`` at step 3``, or nothing."""
    return "" if step is None else f" at step {step}"


def check_has_average(rows: Tensor) -> None:
    """Raise ValueError if rows of this dtype have no average. Call it before anything is sent, on all ranks."""
    dtype = rows.dtype
    if not (dtype.is_floating_point or dtype.is_complex) or dtype.itemsize < 2:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(f"{name} has no average: convert the values to float32, or to another dtype of 16 to 64 bits")


@contextmanager
def time_limit(group: dist.ProcessGroup, seconds: float) -> Iterator[None]:
    """Inside, all calls of the group that start may take so many seconds."""
    before = _timeout_of(group)
    group.set_timeout(timedelta(seconds=seconds))
    try:
        yield
    finally:
        group.set_timeout(before)


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend of each type of device. ``dist.get_backend`` does not know it if the program has named none."""
    return {one.type: group._get_backend(one).name() for one in group._device_types}


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(group._device_types[0]).options._timeout


class Call(AbstractContextManager[None]):
    """Limits the time of calls of a process group, and names the call, this rank and its peers in their errors.

    It can be entered repeatedly. The group's own timeout returns on leaving, so other calls of the group keep it.

    Args:
        what: the call, such as ``the exchange of 5000 float32 at step 3``.
        peers: ranks of the group that take part; None means all.
        timeout: seconds that the calls may take; None: the timeout of the group.
    """

    def __init__(
        self, group: dist.ProcessGroup, what: str, peers: Iterable[int] | None = None, timeout: float | None = None
    ) -> None:
        self._rank = group.rank()
        others = range(group.size()) if peers is None else peers
        self.what, self._peers = what, sorted({rank for rank in others if rank != self._rank})
        self._group, self._timeout = group, None if timeout is None else timedelta(seconds=timeout)

    def __enter__(self) -> None:
        self._before = _timeout_of(self._group)
        if self._timeout is not None:
            self._group.set_timeout(self._timeout)

    def wait(self, work: dist.Work, moved: Tensor) -> None:
        """Wait inside the call. gloo takes the limit of a message here, and NCCL's works have it from their start."""
        with self:
            if self._timeout is not None and backends_of(self._group)[moved.device.type] == "gloo":
                work.wait(self._timeout)
            else:
                work.wait()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._group.set_timeout(self._before)
        if isinstance(error, RuntimeError):
            first = str(error).partition("\n")[0]
            seconds = (self._timeout or self._before).total_seconds()
            reason = "died, left, or did not come in time: see which rank failed first, and why"
            if _LATE.search(str(error)):
                reason = f"did not come within {seconds:g} s: see what it does, or give a longer timeout"
            what = f"{self.what} failed on rank {self._rank}"
            raise RuntimeError(f"{what}: a rank of {self._peers} {reason} ({first})") from error


def own_client(store: dist.Store) -> dist.Store:
    """The same store by a connection of its own, if it has connections: a wait of the program blocks its own."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.clone() if hasattr(store, "clone") else store


def own_group(
    backends: Mapping[str, str], store: dist.Store, rank: int, num: int, connect_seconds: float
) -> dist.ProcessGroup:
    """A group of ``num`` ranks, of which this is ``rank``. Collective over these.

    Calls of ``torch.distributed`` do not take it; its methods, such as ``allreduce``, do the same.

    Args:
        backends: ``gloo`` or ``nccl`` for each type of device, such as ``cpu``. ValueError: another one.
        store: a place that no other group uses.
        connect_seconds: until all have come, over gloo; NCCL connects in the first call. RuntimeError: one did not.
    """
    if unknown := sorted(set(backends.values()).difference(("gloo", "nccl"))):
        raise ValueError(f"groups of ranks need gloo or nccl and the process group has {unknown[0]}: start it so")
    group = dist.ProcessGroup(store, rank, num)
    for backend in dict.fromkeys(backends.values()):
        place, kind = dist.PrefixStore(backend, store), dist.ProcessGroup.BackendType.GLOO
        if backend == "nccl":
            kind = dist.ProcessGroup.BackendType.NCCL
            own: Any = dist.ProcessGroupNCCL(place, rank, num, dist.ProcessGroupNCCL.Options())
        else:
            own = dist.ProcessGroupGloo(place, rank, num, timeout=timedelta(seconds=connect_seconds))
        for device in [device for device, known in backends.items() if known == backend]:
            group._register_backend(torch.device(device), kind, own)
        group._set_default_backend(kind)
    return group


def default_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group, or the default group for None. ValueError: torch.distributed is not initialised."""
    if not dist.is_initialized():
        start = "start the script with torchrun and call torch.distributed.init_process_group()"
        raise ValueError(f"torch.distributed is not initialised: {start}, or pass learners= for virtual learners")
    chosen = dist.group.WORLD if group is None else group
    assert chosen is not None
    return chosen


def meet(group: dist.ProcessGroup, what: str) -> None:
    """Over gloo, wait until all ranks make this call, because gloo could add the numbers of another call. Collective.

    For calls outside a step. ValueError: a rank makes another such call. RuntimeError: a rank does not come, as when
    it trains.
    """
    if backends_of(group).get("cpu") != "gloo":
        return
    channel = CHANNELS.get(group, group)
    gloo: Any = channel._get_backend(torch.device("cpu"))
    own = torch.tensor([crc32(what.encode())], device="cpu")
    everyone = own.new_empty(group.size())
    with time_limit(channel, _timeout_of(group).total_seconds()):
        gloo.barrier().wait()
        channel.allgather([[*everyone.split(1)]], [own]).wait()
    if others := (everyone != own).nonzero().flatten().tolist():
        raise ValueError(f"{what} on this rank meets another call on ranks {others}: use one order on all ranks")


def gather_objects(group: dist.ProcessGroup | None, value: Any, what: str, timeout: float | None = None) -> list[Any]:
    """Return the values of all ranks, by rank; None is one process. Collective. ``what`` names it in an error."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    with Call(group, what, timeout=timeout):
        meet(group, what)
        dist.all_gather_object(values, value, group=group)
    return values


def barrier(what: str) -> None:
    """Wait for all ranks of the default group, if there is one. ``what`` names the wait in an error. Collective."""
    if dist.is_initialized():
        with Call(default_group(None), what):
            dist.barrier()
