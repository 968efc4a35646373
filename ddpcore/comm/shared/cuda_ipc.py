"""Real learners on the GPUs of one host, through device memory that they share by CUDA IPC."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ddpcore.comm.process import default_group
from ddpcore.comm.shared.host import TIMEOUT_SECONDS
from ddpcore.comm.shared.segments import SegmentCommunicator
from ddpcore.runtime import launch

SHARED_MEMORY = Path("/dev/shm")
COUNTER = 4  # the place of the counters' name in what torch says of memory that is shared
_counters: set[str] = set()


class CudaMemory:
    """Device memory. Flags are the host's, so what they stand for is done before they are posted.

    Args:
        device: the GPU of this rank. The others' memory is opened on it too: it is then read and written over NVLink or
            PCIe by kernels that run here.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocate(self, num_bytes: int) -> tuple[Tensor, bytes]:
        """See :class:`~ddpcore.comm.shared.memory.Memory`."""
        own = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        _synchronize(self.device)  # the zeros are there before anybody opens them
        handle = _share(own)
        _counters.add(os.fsdecode(handle[COUNTER]))
        return own, pickle.dumps(handle)

    def open(self, pid: int, handle: bytes, num_bytes: int) -> Tensor:
        """See :class:`~ddpcore.comm.shared.memory.Memory`. The handle names the memory in any process."""
        _, *rest = pickle.loads(handle)
        return _open(self.device, *rest)[:num_bytes]

    def publish(self) -> None:
        """Wait for the stream: a neighbour's kernels cannot wait for this one's."""
        _synchronize(self.device)

    def follow(self, rank: int) -> None:
        """Nothing: the other has waited for its stream before it posted."""


class CudaIpcCommunicator(SegmentCommunicator):
    """Learner j is rank j of the group; every rank has a GPU of one host, and the GPUs reach each other.

    Args:
        group: a process group, for setting up; None is the default one, which must be initialised.
        device: the GPU of this rank.
        timeout: seconds that a rank which lives may let the others wait. One that is gone is noticed within a second.

    Raises:
        ValueError: the ranks do not reach each other's memory, on every rank alike; there is no process group.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, timeout: float = TIMEOUT_SECONDS) -> None:
        group = default_group(group)
        super().__init__(
            group, CudaMemory(device), timeout, f"CUDA IPC on one host, {dist.get_world_size(group)} ranks"
        )


def forget() -> None:
    """Remove the files in which torch counts who has memory of this process open; for one that ends by ``os._exit``.

    torch does so itself where a process ends in its own way, and takes a missing file for an error there.
    """
    while _counters:
        (SHARED_MEMORY / _counters.pop().lstrip("/")).unlink(missing_ok=True)


launch.before_exit.append(forget)


# The three calls of CUDA, apart so that tests can stand in for them.


def _share(own: Tensor) -> tuple:
    return own.untyped_storage()._share_cuda_()


def _open(device: torch.device, *handle: object) -> Tensor:
    index = torch.cuda.current_device() if device.index is None else device.index
    storage = torch.UntypedStorage._new_shared_cuda(index, *handle)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _synchronize(device: torch.device) -> None:
    torch.cuda.current_stream(device).synchronize()
