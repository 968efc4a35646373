"""From several learners to one model file: average, recalibrate batch normalization, save, load without ddpcore.

python examples/average_for_deployment.py
"""

import argparse
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

import ddpcore
from ddpcore.optim import FusedSGD


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/averaged.safetensors"))
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    torch.manual_seed(0)
    inputs = torch.randn(4096, 32)
    labels = (inputs @ torch.randn(32, 10)).argmax(dim=1)
    model = make_model()
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = ddpcore.distribute(model, optimizer, ddpcore.DPSGD(ddpcore.Ring()), learners=args.learners)
    for _ in range(args.steps):
        batch = torch.randint(len(inputs), (args.learners, 32))
        logits = handle.model(inputs[batch])
        optimizer.zero_grad()
        (nn.functional.cross_entropy(logits.flatten(0, 1), labels[batch].flatten(), reduction="sum") / 32).backward()
        optimizer.step()

    def accuracy(module: nn.Module) -> float:
        with torch.no_grad():
            return (module.eval()(inputs).argmax(dim=1) == labels).float().mean().item()

    # The statistics of averaged weights are not the average of the learners' statistics: compute them again.
    averaged = handle.evaluation_model(batch_norm="recalibrate", batches=inputs[:2048].split(256))
    print(f"average of the statistics: accuracy {accuracy(handle.evaluation_model()):.4f}")
    print(f"recalibrated statistics:   accuracy {accuracy(averaged):.4f}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(averaged.state_dict(), args.out)

    # A program that loads this file does not need ddpcore: the file is a state dict of the plain model.
    deployed = make_model()
    deployed.load_state_dict(safetensors.torch.load_file(args.out))
    assert accuracy(deployed) == accuracy(averaged)
    print(f"{args.out}: {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
