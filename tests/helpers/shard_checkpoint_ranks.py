"""Ranks that train with FSDP2: four save a checkpoint, and then two, or one without FSDP2, load it and go on."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ddpcore.optim import FusedAdamW, FusedLAMB, FusedLARS, FusedOptimizer, FusedSGD, param_groups
from helpers.ranks import join

BUILDERS = {
    "sgd": lambda groups: FusedSGD(groups, lr=0.1, momentum=0.9, max_grad_norm=0.5),
    "lars": lambda groups: FusedLARS(groups, lr=0.1),
    "lamb": lambda groups: FusedLAMB(groups, lr=0.05, max_grad_norm=0.5),
    "rounded": lambda groups: FusedAdamW(groups, lr=0.05, state_dtype=torch.bfloat16),
}
SAMPLES = 8


def build(name: str, world_size: int) -> tuple[nn.Module, FusedOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    if world_size > 1:
        mesh = init_device_mesh("cpu", (world_size,))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    return model, BUILDERS[name](param_groups(model, 0.01))


def train(model: nn.Module, optimizer: FusedOptimizer, steps: range, rank: int, world_size: int) -> None:
    for step in steps:
        inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(step))
        model(inputs.chunk(world_size)[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def states_of(model: nn.Module, optimizer: FusedOptimizer) -> dict[str, dict[str, Tensor]]:
    found = get_optimizer_state_dict(model, optimizer)["state"]
    return {name: {key: whole(value) for key, value in state.items()} for name, state in found.items()}


def run(rank: int, world_size: int) -> dict[tuple[str, str], Any]:
    """Four ranks train and save; others load. Then all train on."""
    found: dict[tuple[str, str], Any] = {}
    for name in BUILDERS:
        folder = os.path.join(os.environ["DDPCORE_TEST_CHECKPOINTS"], name)
        model, optimizer = build(name, world_size)
        if world_size == 4:
            train(model, optimizer, range(3), rank, world_size)
            parts = get_state_dict(model, optimizer)
            dcp.save({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=folder)
            states = optimizer.state.values()
            found[name, "kinds"] = [type(v).__name__ for state in states for key, v in state.items() if key != "step"]
            full = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
            fresh = build(name, world_size)
            set_optimizer_state_dict(*fresh, full, options=StateDictOptions(full_state_dict=True))
            found[name, "from full"] = states_of(*fresh)
        else:
            parts = get_state_dict(model, optimizer)
            state = {"model": parts[0], "optimizer": parts[1]}
            dcp.load(state, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        found[name, "states"] = states_of(model, optimizer)
        found[name, "before"] = {key: whole(value) for key, value in model.named_parameters()}
        train(model, optimizer, range(3, 5), rank, world_size)
        found[name, "after"] = {key: whole(value) for key, value in model.named_parameters()}
        found[name, "steps"] = sorted(float(state["step"]) for state in optimizer.state.values())
    return found


def main() -> None:
    path, rank, world_size = join()
    torch.save(run(rank, world_size), path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
