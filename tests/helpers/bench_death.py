"""A bench of three ranks, of which one is killed in the middle of a strategy."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ddpcore.bench.config import BenchConfig, resolve
from ddpcore.bench.run import run_rank
from ddpcore.runtime.launch import World
from ddpcore.training import Trainer
from helpers.elastic_ranks import fork_and_wait

STEPS, DEATH = 21, 12  # the rank is killed when it begins this step of dpsgd, counted from 0


def run(folder: Path) -> dict[int, int]:
    """Run, and return how each rank ended."""
    config = BenchConfig(
        settings=(
            f"run.steps={STEPS}",
            "data.batch_size=60",
            "run.device=cpu",
            "strategy.on_failure=shrink",
        ),
        world_size=3,
        strategies=("dpsgd", "ssgd"),
        json=folder / "bench.json",
    )
    resolved = resolve(config, world_size=3, num_gpus=0)
    step = Trainer.step

    def step_or_die(trainer: Trainer) -> torch.Tensor:
        if trainer.num_steps == DEATH and "DPSGD" in repr(getattr(trainer.handle, "strategy", "")):
            os.kill(os.getpid(), signal.SIGKILL)
        return step(trainer)

    def run_one(rank: int) -> None:
        if rank == 0:
            Trainer.step = step_or_die  # type: ignore[method-assign]
        os.dup2(os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY), 1)
        os.dup2(1, 2)
        store = dist.FileStore(str(folder / "store"), 3)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
        run_rank(World(rank, 3, rank, 3), resolved)
        sys.stdout.flush()

    return fork_and_wait(3, run_one)


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    torch.save(run(folder), folder / "codes.pt")
