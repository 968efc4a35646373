"""Real learners on the GPUs of one host, through device memory that they share by CUDA IPC."""

import os
import pickle
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ddpcore.comm.shared.memory import Memory
from ddpcore.comm.shared.segments import SegmentCommunicator
from ddpcore.runtime.launch import TIMEOUT_SECONDS, before_exit

SHARED_MEMORY = Path("/dev/shm")
COUNTER = 4  # index of the name of torch's reference counter file in a handle of shared memory
_counters: set[str] = set()


class CudaMemory(Memory):
    """Device memory. Flags are in host memory, so the device must finish its writes before a flag is posted."""

    def __init__(self, device: torch.device) -> None:
        self.device = device  # the memory of other ranks is opened on it too, and read over NVLink or PCIe

    @override
    def allocate(self, num_bytes: int) -> tuple[Tensor, bytes]:
        own = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        _synchronize(self.device)  # the zeros must be written before another rank opens the buffer
        handle = _share(own)
        _counters.add(os.fsdecode(handle[COUNTER]))
        return own, pickle.dumps(handle)

    @override
    def open(self, pid: int, handle: bytes, num_bytes: int) -> Tensor:
        _, *rest = pickle.loads(handle)  # a handle is valid in every process, so pid is not needed
        return _open(self.device, *rest)[:num_bytes]

    @override
    def publish(self) -> None:
        _synchronize(self.device)  # kernels of another process cannot wait for this stream


class CudaIpcCommunicator(SegmentCommunicator):
    """Learner j is rank j of the group. Every rank has a GPU, ``device``, of one host, and the GPUs reach each other.

    ValueError: there is no process group; or, on every rank, the ranks cannot reach each other's memory.
    """

    transport = "ipc"

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, timeout: float = TIMEOUT_SECONDS) -> None:
        super().__init__(group, CudaMemory(device), timeout, "CUDA IPC on one host")


def forget() -> None:
    """Remove the files in which torch counts the readers of this process's memory; before ``os._exit`` alone."""
    while _counters:
        (SHARED_MEMORY / _counters.pop().lstrip("/")).unlink(missing_ok=True)


before_exit.append(forget)


# The three CUDA calls are functions of their own, so that tests can replace them.


def _share(own: Tensor) -> tuple:
    return own.untyped_storage()._share_cuda_()


def _open(device: torch.device, *handle: object) -> Tensor:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.empty(0, dtype=torch.uint8, device=device).set_(torch.UntypedStorage._new_shared_cuda(index, *handle))


def _synchronize(device: torch.device) -> None:
    torch.cuda.current_stream(device).synchronize()
