"""Eight learners in one process: compare algorithms on a laptop, without processes or a network.

python examples/virtual_learners.py
"""

import argparse

import torch
from torch import nn

import ddpcore
from ddpcore.data import load_dataset
from ddpcore.optim import FusedSGD

STRATEGIES = {
    "ssgd": ddpcore.SSGD,
    "dpsgd on a ring": lambda: ddpcore.DPSGD(ddpcore.Ring()),
    "dpsgd, random pairs": lambda: ddpcore.DPSGD(ddpcore.RandomPair(seed=0)),
    "local_sgd, period 8": lambda: ddpcore.LocalSGD(period=8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learners", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32, help="of one learner")
    parser.add_argument("--lr", type=float, default=0.2)
    args = parser.parse_args()

    dataset = load_dataset("digits")  # 1797 images of 8 x 8, part of the package
    test_inputs, test_labels = dataset.test.batch(torch.arange(len(dataset.test)))
    for name, make in STRATEGIES.items():
        torch.manual_seed(1)  # all strategies begin with the same weights and see the same batches
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = FusedSGD(model.parameters(), lr=args.lr, momentum=0.9)
        handle = ddpcore.distribute(model, optimizer, make(), learners=args.learners)

        for _ in range(args.steps):
            batch = torch.randint(len(dataset.train), (args.learners, args.batch_size))  # a row for each learner
            inputs, labels = dataset.train.batch(batch)
            logits = handle.model(inputs.flatten(2))  # [learners, batch, classes]
            optimizer.zero_grad()
            # The sum of the learners' losses: each learner gets the gradient of its own loss.
            losses = [nn.functional.cross_entropy(z, y) for z, y in zip(logits, labels, strict=True)]
            sum(losses).backward()
            optimizer.step()

        averaged = handle.evaluation_model()
        accuracy = (averaged(test_inputs.flatten(1)).argmax(dim=1) == test_labels).float().mean().item()
        print(
            f"{name}: loss {sum(losses).item() / args.learners:.3f}, accuracy {accuracy:.3f}, "
            f"consensus distance {handle.consensus_distance():.3g}, {handle.comm.bytes_sent} bytes sent"
        )


if __name__ == "__main__":
    main()
