"""One of two real ranks that record their steps. Rank 1 sleeps before each step, so rank 0 waits for it."""

from __future__ import annotations

import time
from typing import Any

import torch

from ddpcore.runtime.launch import World
from ddpcore.storage.json_lines import read_lines
from ddpcore.training import train
from ddpcore.training.trainer import Trainer
from helpers import images
from helpers.ranks import join

SECONDS = 0.1


def main() -> None:
    path, rank, world_size = join()
    out = path.parent / "run"
    step = Trainer.step

    def slow(self: Trainer) -> Any:
        time.sleep(SECONDS if rank == 1 else 0)
        return step(self)

    Trainer.step = slow  # type: ignore[method-assign]
    world = World(rank=rank, world_size=world_size, local_rank=rank)
    config = images.config(learners=2, strategy="dpsgd", topology="ring", record_steps=True)
    train(config, out=out, world=world, dataset=images.images())
    torch.save(read_lines(out / "steps" / f"rank-{rank}.jsonl").rows, path)


if __name__ == "__main__":
    main()
