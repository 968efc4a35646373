"""From DistributedDataParallel to gossip: the same loop, another strategy.

torchrun --standalone --nproc-per-node 4 examples/ddp_to_gossip.py --strategy ddp
torchrun --standalone --nproc-per-node 4 examples/ddp_to_gossip.py --strategy dpsgd
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn

import ddpcore
from ddpcore.optim import FusedSGD

STRATEGIES = {
    "ddp": ddpcore.DDP,  # torch's DistributedDataParallel
    "ssgd": ddpcore.SSGD,  # the same algorithm, over shared memory on one host
    "dpsgd": lambda: ddpcore.DPSGD(ddpcore.RandomPair(seed=0)),  # each rank averages weights with one other rank
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", choices=STRATEGIES, default="dpsgd")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=256, help="of one rank")
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(device)

    torch.manual_seed(0)  # the data are the same on all ranks; each rank takes every n-th sample
    inputs, teacher = torch.randn(8192, 64), torch.randn(64, 10)
    labels = (inputs @ teacher).argmax(dim=1)
    inputs, labels = inputs.to(device), labels.to(device)
    own_inputs, own_labels = inputs[rank::world_size], labels[rank::world_size]

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    # Before: model = DistributedDataParallel(model)
    handle = ddpcore.distribute(model, optimizer, STRATEGIES[args.strategy]())

    torch.manual_seed(1 + rank)  # from here on each rank draws its own batches
    for step in range(args.steps):
        if step == args.steps // 10:  # the first steps also set up connections
            began = time.perf_counter()
        batch = torch.randint(len(own_inputs), (args.batch_size,), device=device)
        loss = nn.functional.cross_entropy(handle.model(own_inputs[batch]), own_labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    milliseconds = 1000 * (time.perf_counter() - began) / (args.steps - args.steps // 10)
    # Both calls are collective: every rank makes them.
    averaged, distance = handle.evaluation_model(), handle.consensus_distance()
    accuracy = (averaged(inputs).argmax(dim=1) == labels).float().mean().item()
    if rank == 0:
        print(f"{args.strategy}, {world_size} ranks, {handle.comm.description}")
        print(f"accuracy of the averaged model {accuracy:.3f}, consensus distance {distance:.3g}")
        print(f"{milliseconds:.2f} ms a step: compare --strategy {'dpsgd' if args.strategy == 'ddp' else 'ddp'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
