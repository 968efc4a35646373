"""Gossip on the workers of Ray Train: a worker dies, Ray starts all again, and they go on from the last checkpoint.

python examples/ray_train.py --dies-at 25        needs pip install 'ray[train]'
"""

import argparse
import os
import tempfile
from pathlib import Path

import ray.train
import torch
import torch.distributed.checkpoint as dcp
from ray.train.torch import TorchTrainer
from torch import nn

import ddpcore
from ddpcore.optim import FusedSGD


def train(config: dict) -> None:
    """What every worker runs. Ray has made the process group."""
    torch.manual_seed(0)
    inputs = torch.randn(1024, 16)
    labels = (inputs @ torch.randn(16, 4)).argmax(dim=1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = ddpcore.distribute(model, optimizer, ddpcore.DPSGD(ddpcore.RandomPair(seed=0)))
    rank, first = ray.train.get_context().get_world_rank(), 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            dcp.load({"run": ddpcore.RunState(handle, saved=folder)}, checkpoint_id=folder)
        first = handle.learner.step
    for step in range(first, config["steps"]):
        if step == config["dies_at"] and first == 0 and rank == 1:
            os._exit(1)  # as if its machine had failed
        chosen = torch.randint(1024, (32,), generator=torch.Generator().manual_seed(2 * step + rank))
        loss = nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 10 == 0:
            report = {"step": step + 1, "began_at": first, "loss": loss.item()}
            with tempfile.TemporaryDirectory() as folder:  # each worker adds the file of its own state
                dcp.save({"run": ddpcore.RunState(handle)}, checkpoint_id=folder)
                ray.train.report(report, checkpoint=ray.train.Checkpoint.from_directory(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--dies-at", type=int, default=-1, help="worker 1 dies once before this step")
    parser.add_argument("--folder", type=Path, default=Path("runs/ray_train"))
    args = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": args.steps, "dies_at": args.dies_at},
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers),
        run_config=ray.train.RunConfig(
            storage_path=str(args.folder.absolute()), failure_config=ray.train.FailureConfig(max_failures=1)
        ),
    )
    last = trainer.fit().metrics
    print(f"step {last['step']}, begun at step {last['began_at']}, loss {last['loss']:.2f}")


if __name__ == "__main__":
    main()
