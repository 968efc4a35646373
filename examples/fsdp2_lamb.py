"""Fused LAMB on a model that FSDP2 shards: trust ratios and clipping are those of whole tensors.

torchrun --standalone --nproc-per-node 4 examples/fsdp2_lamb.py
torchrun --standalone --nproc-per-node 2 examples/fsdp2_lamb.py     continues on two ranks
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ddpcore.optim import FusedLAMB, param_groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=1024, help="of all ranks together")
    parser.add_argument("--folder", type=Path, default=Path("runs/fsdp2_lamb"), help="of the checkpoint")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    mesh = init_device_mesh(device, (world_size,))

    torch.manual_seed(0)  # the same model and the same samples on every rank
    inputs = torch.randn(8192, 64)
    labels = (inputs @ torch.randn(64, 10)).argmax(dim=1)
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh)
    # All trust ratios of a step take one all-reduce, and the norm for clipping one more.
    optimizer = FusedLAMB(param_groups(model, weight_decay=0.01), lr=0.02, max_grad_norm=1.0)

    done = 0
    if args.folder.exists():
        weights, state = get_state_dict(model, optimizer)  # it takes a step with gradients of zero, to create states
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=args.folder)  # saved by any number of ranks
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        done = int(next(iter(optimizer.state.values()))["step"])

    for step in range(done, done + args.steps):
        batch = torch.randint(len(inputs), (args.batch_size,), generator=torch.Generator().manual_seed(step))
        mine = batch.chunk(world_size)[rank]
        loss = nn.functional.cross_entropy(model(inputs[mine].to(device)), labels[mine].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == done or step == done + args.steps - 1:
            dist.all_reduce(loss.detach())
            if rank == 0:
                print(f"step {step + 1}: loss {loss.item() / world_size:.3f}")

    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=args.folder)
    ratios = optimizer.trust_ratios()
    if rank == 0:
        for name, trust in ratios.items():
            print(f"{name}: trust ratio {trust.ratio:.3g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
