"""Local steps with DiLoCo's outer step: AdamW on each learner, Nesterov's momentum on their average.

python examples/diloco.py                                              virtual learners, one process
torchrun --standalone --nproc-per-node 4 examples/diloco.py            real ranks
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import ddpcore


def outer_optimizer(averages: list[torch.Tensor]) -> torch.optim.Optimizer:
    """The old average minus the new one is the gradient of this optimizer (Douillard et al. 2023)."""
    return torch.optim.SGD(averages, lr=0.7, momentum=0.9, nesterov=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learners", type=int, default=4, help="of one process, without torchrun")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--period", type=int, default=30, help="local steps between two averages")
    args = parser.parse_args()

    on_ranks = dist.is_torchelastic_launched()
    if on_ranks:
        dist.init_process_group("gloo")
    rank, num_learners = (dist.get_rank(), dist.get_world_size()) if on_ranks else (0, args.learners)

    torch.manual_seed(0)
    inputs = torch.randn(4096, 32)
    labels = (inputs @ torch.randn(32, 10)).argmax(dim=1)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)  # the inner optimizer: any of torch.optim
    strategy = ddpcore.LocalSGD(period=args.period, outer=outer_optimizer)
    handle = ddpcore.distribute(model, optimizer, strategy, learners=None if on_ranks else num_learners)

    torch.manual_seed(1)
    for step in range(args.steps):
        batch = torch.randint(len(inputs), (num_learners, 32))  # all learners' samples
        x, y = (inputs[batch[rank]], labels[batch[rank]]) if on_ranks else (inputs[batch], labels[batch])
        # cross_entropy takes [..., classes] as rows; with reduction="sum" the learners' losses add up.
        loss = nn.functional.cross_entropy(handle.model(x).flatten(0, -2), y.flatten(), reduction="sum") / 32
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % args.period == 0:
            averaged = handle.evaluation_model()  # collective
            accuracy = (averaged(inputs).argmax(dim=1) == labels).float().mean().item()
            if rank == 0:
                print(f"step {step + 1}: accuracy of the averaged model {accuracy:.3f}")
    if on_ranks:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
