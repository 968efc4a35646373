"""Gossip under Ray Train: if a worker dies, Ray starts all again, and they go on from the last checkpoint.

pip install "ray[train]"
python examples/ray_train.py --out runs/ray                            two CPU workers of a local cluster
python examples/ray_train.py --out runs/died --dies-at 25              worker 1 dies once: the same weights
python examples/ray_train.py --out runs/ray --workers 3 --steps 60     goes on with another number of workers
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed.checkpoint as dcp
from ray.train.torch import TorchTrainer
from torch import nn

import ddpcore
from ddpcore.optim import FusedSGD


def train(options: dict[str, Any]) -> None:
    """What each worker runs. Ray has started the process group."""
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    inputs = torch.randn(1024, 16)
    labels = (inputs @ torch.randn(16, 4)).argmax(dim=1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = ddpcore.distribute(model, optimizer, ddpcore.DPSGD(ddpcore.Ring()))

    first = 0
    if (saved := ray.train.get_checkpoint()) is not None:
        with saved.as_directory() as folder:
            found = {"run": ddpcore.RunState(handle, saved=folder), "step": 0}
            dcp.load(found, checkpoint_id=folder)
        first = found["step"]
        print(f"rank {rank} continues after step {first}", flush=True)

    for step in range(first, options["steps"]):
        died = Path(options["out"]) / "died"
        if rank == 1 and step == options["dies_at"] and not died.exists():
            died.touch()
            os._exit(1)
        samples = torch.randint(1024, (32,), generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = nn.functional.cross_entropy(handle.model(inputs[samples]), labels[samples])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % options["save_every"] == 0:
            with tempfile.TemporaryDirectory() as folder:  # each worker writes its files, and Ray joins the folders
                dcp.save({"run": ddpcore.RunState(handle), "step": step + 1}, checkpoint_id=folder)
                ray.train.report({"step": step + 1}, checkpoint=ray.train.Checkpoint.from_directory(folder))
    total = sum(p.double().sum().item() for p in model.parameters())
    print(f"rank {rank}: the sum of all weights is {total!r}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/ray"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--dies-at", type=int, help="worker 1 ends at this step, once")
    args = parser.parse_args()
    options = vars(args) | {"out": str(args.out.resolve())}
    args.out.mkdir(parents=True, exist_ok=True)
    ray.init(num_cpus=args.workers, include_dashboard=False)  # without arguments: the cluster of RAY_ADDRESS
    again, folder = ray.train.FailureConfig(max_failures=1), str(args.out.resolve().parent)
    run = ray.train.RunConfig(name=args.out.name, storage_path=folder, failure_config=again)
    scaling = ray.train.ScalingConfig(num_workers=args.workers)
    TorchTrainer(train, train_loop_config=options, scaling_config=scaling, run_config=run).fit()


if __name__ == "__main__":
    main()
