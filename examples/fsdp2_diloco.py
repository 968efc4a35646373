"""DiLoCo with learners that are larger than a GPU: FSDP2 inside a learner, an outer step between learners.

torchrun --standalone --nproc-per-node 4 examples/fsdp2_diloco.py
"""

import argparse
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ddpcore
from ddpcore.optim import FusedAdamW


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=64, help="of each rank")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    ranks_each = dist.get_world_size() // args.learners
    mesh = init_device_mesh(device, (args.learners, ranks_each), mesh_dim_names=("learners", "shard"))

    torch.manual_seed(0)  # the same model and the same samples on every rank
    inputs = torch.randn(8192, 64)
    labels = (inputs @ torch.randn(64, 10)).argmax(dim=1)
    blocks = [nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(2)]
    model = nn.Sequential(nn.Unflatten(1, (1, 64)), *blocks, nn.Flatten(), nn.Linear(64, 10)).to(device)
    for block in blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])

    optimizer = FusedAdamW(model.parameters(), lr=1e-3)
    outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    strategy = ddpcore.LocalSGD(period=10, outer=outer)
    handle = ddpcore.distribute(model, optimizer, strategy, group=mesh["learners"])

    draw = torch.Generator().manual_seed(1 + dist.get_rank())  # each rank has samples of its own
    for _ in range(args.steps):
        batch = torch.randint(len(inputs), (args.batch_size,), generator=draw)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(handle.model(inputs[batch].to(device)), labels[batch].to(device))
        loss.backward()
        optimizer.step()

    apart = handle.consensus_distance()  # collective, as is the average: every rank calls both
    averaged = handle.evaluation_model().eval()  # sharded: no rank holds the whole model
    with torch.no_grad():
        right = (averaged(inputs[:512].to(device)).argmax(dim=1) == labels[:512].to(device)).float().mean()
    if dist.get_rank() == 0:
        print(f"{args.learners} learners of {ranks_each} ranks: accuracy {right:.3f}, consensus distance {apart:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
