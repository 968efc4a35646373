"""One of three real ranks that trains with and without an emulated link, over each transport."""

from __future__ import annotations

from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist

from ddpcore.comm.reductions import all_reduce_bytes
from ddpcore.runtime.launch import World
from ddpcore.training.build import LearnerPlacement, build_trainer
from ddpcore.training.config import merged
from helpers import images
from helpers.ranks import join

STRATEGIES = ("ssgd", "dpsgd", "ring", "combined", "stale", "int8", "local_sgd")
LINK = "1Mb/s,500ms"  # slower than anything that the ranks compute
NUM_STEPS = 6


def trained(name: str, transport: str, link: str | None, world: World) -> dict[str, Any]:
    fields = merged(
        images.STRATEGIES[name], {"strategy": {"learners": world.world_size, "transport": transport, "link": link}}
    )
    place = LearnerPlacement.of(images.config(fields), world)
    trainer = build_trainer(place, images.images())
    comm = trainer.handle.comm
    begin = comm.now()
    for _ in range(NUM_STEPS):
        trainer.step()
    seconds = comm.now() - begin
    state = trainer.handle.evaluation_model().state_dict()
    num_bytes = 4 * sum(parameter.numel() for parameter in trainer.handle.model.parameters())
    return {
        "model": safetensors.torch.save({key: value.contiguous() for key, value in state.items()}),
        "bytes_sent": comm.bytes_sent,
        "seconds": seconds,
        "step_bytes": all_reduce_bytes(num_bytes, world.world_size) if name == "ssgd" else 2 * num_bytes,
        "communication": comm.description,
    }


def main() -> None:
    path, rank, world_size = join()
    world = World(rank, world_size, rank, world_size)
    seen = {
        (name, transport, link): trained(name, transport, link, world)
        for name in STRATEGIES
        for transport in ("shm", "pg")
        for link in (None, LINK)
    }
    torch.save(seen, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
