"""One of two real ranks that record their steps, on a clock of the test.

It moves by a second at the start of each step, in each forward pass, and in each wait of rank 0 for rank 1.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from ddpcore.comm.shared import coordination
from ddpcore.runtime.launch import World
from ddpcore.storage.json_lines import read_lines
from ddpcore.training import train, trainer
from ddpcore.training.trainer import Trainer
from helpers import images
from helpers.ranks import join

now = [0.0]


def moved(seconds: float, call: Any) -> Any:
    def moves_and_calls(*args: Any, **options: Any) -> Any:
        now[0] += seconds
        return call(*args, **options)

    return moves_and_calls


def main() -> None:
    path, rank, world_size = join()
    out = path.parent / "run"
    time.perf_counter = lambda: now[0]
    flags: Any = coordination.Flags
    flags.wait = moved(1.0 if rank == 0 else 0.0, flags.wait)
    for owner, name in ((Trainer, "step"), (trainer, "learner_losses")):
        setattr(owner, name, moved(1.0, getattr(owner, name)))
    world = World(rank=rank, world_size=world_size, local_rank=rank)
    config = images.config(strategy={"name": "dpsgd", "topology": "ring", "learners": 2}, run={"record_steps": True})
    train(config, out=out, world=world, dataset=images.images())
    torch.save(read_lines(out / "steps" / f"rank-{rank}.jsonl").rows, path)


if __name__ == "__main__":
    main()
