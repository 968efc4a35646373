"""The ranks of ``ipc_ranks_cuda`` without a GPU: memory of the host stands in for that of the device."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from ddpcore.comm.shared import cuda_ipc as ipc
from ddpcore.comm.shared.memory import HostMemory
from helpers.ipc_ranks_cuda import main

host = HostMemory()
handles: dict[int, bytes] = {}


class StandInMemory(ipc.CudaMemory):
    """Only where zeros come from differs: a CPU tensor can be shared only if it was made for it."""

    def allocate(self, num_bytes: int) -> tuple[Tensor, bytes]:
        own, handle = host.allocate(num_bytes)
        handles[own.data_ptr()] = handle
        ipc._synchronize(self.device)
        return own, ipc.pickle.dumps(ipc._share(own))


def share(own: Tensor) -> tuple:
    return 0, handles[own.data_ptr()], os.getpid(), own.numel()


def reopen(device: torch.device, handle: bytes, pid: int, num_bytes: int) -> Tensor:
    return host.open(pid, handle, num_bytes)


if __name__ == "__main__":
    ipc._share, ipc._open, ipc._synchronize = share, reopen, lambda device: None
    ipc.CudaMemory = StandInMemory
    main(torch.device("cpu"))
