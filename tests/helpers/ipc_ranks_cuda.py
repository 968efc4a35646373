"""One of two ranks that share one GPU and read each other's memory on it."""

from __future__ import annotations

import torch
import torch.distributed as dist

import ddpcore
from ddpcore.comm import CudaIpcCommunicator
from helpers.ranks import join


def main(device: torch.device) -> None:
    path, rank, _ = join()
    comm = CudaIpcCommunicator(None, device, timeout=60.0)
    seen: dict = {}
    rows = comm.allocate((1, 100), torch.float32, device)
    rows.fill_(float(rank))
    comm.average_(rows).wait()
    seen["average"] = rows.cpu()
    staged = torch.full((1, 10), float(rank), device=device)
    comm.average_(staged).wait()
    seen["staged"] = staged.cpu()
    seen["gathered"] = comm.gather(torch.tensor([[rank]], device=device)).cpu()
    same = torch.full((1, 2), float(rank), device=device)
    comm.broadcast_(same)
    seen["broadcast"], seen["mixed"] = same.cpu(), []
    weights = torch.empty(1, 100, device=device)
    for step in range(5):
        weights.fill_(10.0 * step + rank)
        comm.exchange(weights, ddpcore.Complete(), step).mixture().apply_(weights)
        seen["mixed"].append(weights.cpu().clone())
    torch.save(seen, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(torch.device("cuda", 0))
