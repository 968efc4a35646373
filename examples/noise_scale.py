"""Would a larger batch still help? Measure the gradient noise scale during training on one device.

Far below the noise scale, twice the batch needs about half as many steps. Far above it, almost as many as before.

python examples/noise_scale.py
"""

import argparse

import torch
from torch import nn

from ddpcore.diagnostics import NoiseStatistics
from ddpcore.optim import FusedSGD


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=50, help="steps from one record to the next")
    parser.add_argument("--batch-size", type=int, default=32, help="of one backward pass")
    parser.add_argument("--passes", type=int, default=4, help="backward passes of a step; at least two")
    args = parser.parse_args()

    torch.manual_seed(0)
    inputs = torch.randn(8192, 32)
    labels = (inputs @ torch.randn(32, 10)).argmax(dim=1)
    flipped = torch.rand(len(labels)) < 0.1  # some wrong labels: gradients keep their noise
    labels[flipped] = torch.randint(10, (int(flipped.sum()),))
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)

    # Without a handle of ddpcore.distribute, the backward passes of a step take the place of learners.
    # loss_divisor is the number by which the loop divides each loss.
    statistics = NoiseStatistics(
        model, optimizer, every=args.every, batch_size=args.batch_size, loss_divisor=args.passes
    )
    for _ in range(args.steps):
        optimizer.zero_grad()
        for _ in range(args.passes):
            batch = torch.randint(len(inputs), (args.batch_size,))
            loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
            (loss / args.passes).backward()
        optimizer.step()

    for record in statistics.records:
        whole = record.whole
        if not record.valid:
            print(f"step {record.step}: {record.reason}")
            continue
        interval = "unknown" if whole.interval is None else "{:.0f} to {:.0f}".format(*whole.interval)
        print(f"step {record.step}: noise scale {whole.noise_scale:.0f} samples, 95 % interval {interval}")


if __name__ == "__main__":
    main()
