"""One of three real ranks that measure their speed, by a clock of the test, and train with batches by it.

Rank 2 needs twice as long for a sample.
"""

from __future__ import annotations

import torch

from ddpcore.records.run import RunRecord
from ddpcore.runtime.launch import World
from ddpcore.training import build, train
from helpers import images
from helpers.ranks import join

LEARNERS = 3
COMMON = {  # without dropout, whose masks differ from rank to rank
    "data": {"batch_size": 15},
    "strategy": {"name": "dpsgd", "topology": "ring", "learners": LEARNERS},
    "model": {"dropout": 0.0},
}


def main() -> None:
    path, rank, world_size = join()
    out = path.parent / "run"
    build.seconds_of = lambda placement, dataset, size: size * (2.0 if rank == 2 else 1.0)
    world = World(rank=rank, world_size=world_size, local_rank=rank)
    config = images.config(COMMON, data={"balance": True})
    train(config, out=out, world=world, dataset=images.images())
    build.seconds_of = None  # type: ignore[assignment]  a run that goes on does not measure again
    train(config, out=out, world=world, dataset=images.images(), resume=True)
    header = RunRecord.read(out).header
    model = (out / "model.safetensors").read_bytes()
    torch.save((header["config"]["data"]["learners_batch"], header["communication"], model), path)


if __name__ == "__main__":
    main()
