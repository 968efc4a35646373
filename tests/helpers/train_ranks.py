"""One of several real ranks: trains through, and resumed from the middle of an epoch.

Two do so with every strategy, or with those of ``RUNS`` that the further words name.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist

import ddpcore
from ddpcore.models import MODELS
from ddpcore.runtime.launch import World
from ddpcore.training import Interrupted, TrainConfig, train
from ddpcore.training.config import merged
from helpers import images
from helpers.ranks import join

RUNS = {
    **images.STRATEGIES,
    "ddp": {"strategy": "ddp", "optimizer": {"name": "torch_sgd", "momentum": 0.9}},
    "process group": {"strategy": {"name": "dpsgd", "transport": "pg"}},
    "plain": merged(images.PLAIN, {"model": images.HESSIAN["model"]}),  # of the size of "watched"
    "watched": images.WATCHED,
    # a crash after step 3: the batch has grown, grows now, and grows later
    **{name: {"strategy": "dpsgd", "data": {"batch_growth": [[step, 24]]}} for name, step in images.GROWTHS.items()},
    "two each": {"strategy": {"name": "dpsgd", "learners": 4}, "run": {"evaluation_batch_norm": "recalibrate"}},
}


def crash_after(step: int, out: Path) -> None:
    """Rank 0 leaves the folder as a crash after the checkpoint of this step would have."""
    if dist.get_rank() == 0:
        record = out / "record.jsonl"
        record.write_text("".join(line for line in record.open() if '"end"' not in line))
        (out / "model.safetensors").unlink()
        for later in (out / "checkpoints").iterdir():
            if int(later.name.removeprefix("step-")) > step:
                shutil.rmtree(later)
    dist.barrier()


def contents(out: Path) -> dict[str, bytes]:
    files = [out / "model.safetensors", *sorted((out / "checkpoints" / "step-00000006").glob("*.safetensors"))]
    return {path.name: path.read_bytes() for path in files}


def accuracy(out: Path, config: TrainConfig) -> float:
    """Of the model that the run has left, on the whole test split, by one process."""
    dataset = images.images()
    model = MODELS.build(
        config.model.name, input_shape=dataset.input_shape, num_classes=dataset.num_classes, **config.model.options
    )
    model.load_state_dict(safetensors.torch.load_file(out / "model.safetensors"))
    inputs, labels = dataset.test.batch(torch.arange(len(dataset.test)))
    with torch.no_grad():
        return float((model.eval()(inputs).argmax(dim=1) == labels).double().mean())


def interrupted(out: Path, world: World) -> dict[str, Any]:
    """Rank 1 alone hears the signal, before the first step is taken."""
    seen: dict[str, Any] = {}
    dataset = images.images()

    def ask(module: Any, inputs: Any) -> None:
        hook.remove()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    hook = torch.nn.modules.module.register_module_forward_pre_hook(ask)
    config = images.config(strategy={"learners": 2, "name": "ssgd"})
    try:
        train(config, out=out, world=world, dataset=dataset)
    except Interrupted as error:
        seen["message"] = str(error)
    dist.barrier()
    seen["record"] = train(config, out=out, world=world, resume=True, dataset=dataset)
    seen["model"] = (out / "model.safetensors").read_bytes()
    return seen


def averaged_statistics(rank: int) -> list[float]:
    """Two virtual learners on each rank; the running mean of learner j is j."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(1))
    handle = ddpcore.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), ddpcore.SSGD(), learners=2, group=dist.group.WORLD
    )
    for number, one in enumerate(handle.models):
        one[0].running_mean.fill_(2.0 * rank + number)
    return handle.evaluation_model()[0].running_mean.tolist()


def main() -> None:
    path, rank, world_size = join()
    world = World(rank, world_size, rank, world_size)
    seen: dict[str, Any] = {}
    names = sys.argv[4:] or [*RUNS]
    for name in names if world_size == 2 else ["ddp"]:
        fields = RUNS[name]
        out = path.parent / name
        config = images.config(merged({"strategy": {"learners": world_size}}, fields))
        through = train(config, out=out, world=world, dataset=images.images())
        ends = [contents(out)]
        dist.barrier()
        crash_after(3, out)
        torch.manual_seed(99)
        resumed = train(config, out=out, world=world, resume=True, dataset=images.images())
        seen[name] = {"through": through, "resumed": resumed, "contents": [*ends, contents(out)]}
        seen[name]["accuracy"] = accuracy(out, config)
    if world_size == 2:
        seen["interrupted"] = interrupted(path.parent / "interrupted", world)
        seen["statistics"] = averaged_statistics(rank)
    torch.save(seen, path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
