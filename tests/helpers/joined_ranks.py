"""Whole runs that a rank joins while deaths are not in the record yet: ``joined_ranks FOLDER``."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch
import torch._dynamo  # as in elastic_ranks
import torch.distributed as dist

from ddpcore import training
from ddpcore.runtime.launch import World
from ddpcore.training import TrainConfig
from ddpcore.training.config import merged
from ddpcore.training.trainer import Trainer
from helpers.elastic_ranks import WHOLE, fork_and_wait

JOIN = 24  # after this step the others wait until a rank, the fifth process, asks to join
# The steps after which ranks are killed. An epoch has 17 steps, and the record is written after step 20, too.
DEATHS: tuple[Mapping[int, int], ...] = (
    {0: 21, 3: 40},  # the new rank has the id of the one that wrote, and does not write
    {0: 21, 1: 29},  # it is the next that writes
    {0: 10, 1: 21, 2: 40},  # the same, and the one that wrote last had another id
)


def run_joined(out: Path, deaths: Mapping[int, int]) -> tuple[dict[int, int], str]:
    """How the processes end, and what they say."""
    out.mkdir()
    log, store_file, flag = (out.with_suffix(suffix) for suffix in (".log", ".store", ".flag"))
    config = TrainConfig.from_dict(merged(WHOLE, {"strategy": {"topology": "ring"}, "run": {"epochs": 3}}))
    step = Trainer.step

    def step_or_die(self: Trainer) -> torch.Tensor:
        losses = step(self)
        if self.num_steps == deaths.get(self.learners[0]):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.num_steps == JOIN:
            flag.touch()
            while not self.handle.comm._fabric.roll.asked:
                time.sleep(0.02)
        return losses

    def run(rank: int) -> None:
        os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 1)
        os.dup2(1, 2)
        try:
            if rank == 4:
                while not flag.exists():
                    time.sleep(0.02)
                training.join_run(out)
                return
            Trainer.step = step_or_die  # type: ignore[method-assign]
            store = dist.FileStore(str(store_file), 4)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
            training.train(config, out=out, world=World(rank, 4, rank, 4))
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    return fork_and_wait(5, run), log.read_text()


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    torch.save([run_joined(folder / f"run{one}", deaths) for one, deaths in enumerate(DEATHS)], folder / "ended.pt")
