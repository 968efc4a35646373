"""Learners larger than a rank: each learner is a group of ranks that hold shards of one model."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from ddpcore.comm.connect import Connection
from ddpcore.comm.groups import Fact
from ddpcore.parameters.shards import Shards, fsdp_parameters, is_dtensor, mesh_of, placements_of
from ddpcore.strategies.base import Strategy


def group_of(mesh: Any, group: dist.ProcessGroup | None, learners: int | None) -> dist.ProcessGroup:
    """The process group of a mesh of learners, of one dimension.

    Raises:
        ValueError: it has more dimensions, or ``group=`` or ``learners=`` is given too.
    """
    given = [name for name, value in (("group=", group), ("learners=", learners)) if value is not None]
    if given:
        raise ValueError(f"mesh= says which ranks are learners: leave {' and '.join(given)} out")
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh has the dimensions {mesh.mesh_dim_names}: pass the one of the learners, mesh['learners']"
        )
    found: dist.ProcessGroup = mesh.get_group()
    return found


def layouts_of(model: nn.Module) -> list[Fact]:
    """The layouts of the DTensors of a model, which must be alike on all ranks."""
    return [
        (f"layout of parameter {name}", f"{placements_of(one)} over {tuple(mesh_of(one).shape)} ranks")
        for name, one in model.named_parameters()
        if is_dtensor(one)
    ]


def shards_of(
    model: nn.Module,
    group: dist.ProcessGroup | None,
    strategy: Strategy,
    connection: Connection,
    scaler: object,
    on_nonfinite: str,
) -> Shards | None:
    """This rank's part of a model whose parameters are DTensors; None for a model that is whole.

    Args:
        model: the model.
        group: the learners: ranks that hold the same shards of different learners; None for virtual learners.
        strategy, connection, scaler, on_nonfinite: as in ``distribute``.

    Raises:
        ValueError: a parameter cannot be averaged over these learners, or an option does not work with shards. Nothing
            was changed.
    """
    named = list(model.named_parameters())
    sharded = [name for name, parameter in named if is_dtensor(parameter)]
    if not sharded:
        return None
    if group is None:
        raise ValueError(
            f"parameter {sharded[0]} is a DTensor and virtual learners are whole: leave learners= out, and pass mesh="
        )
    for name, parameter in named:
        if not is_dtensor(parameter):
            raise ValueError(
                f"parameter {name} is whole and {sharded[0]} is a DTensor: call fully_shard on the whole model, too"
            )
        if any(placement.is_partial() for placement in placements_of(parameter)):
            raise ValueError(f"parameter {name} has partial sums: redistribute it to shards or replicas first")
    _check_options(strategy, connection, scaler, on_nonfinite)
    shards = Shards(model)
    ranks, own = set(shards.mesh.mesh.flatten().tolist()), dist.get_rank()
    for name, parameter in named:
        if not ranks.issuperset(mesh_of(parameter).mesh.flatten().tolist()):
            raise ValueError(
                f"parameter {name} lies on other ranks than {named[0][0]}: a learner is one mesh, whose ranks hold all "
                "parameters"
            )
    if both := ranks.intersection(dist.get_process_group_ranks(group)) - {own}:
        raise ValueError(
            f"parameter {named[0][0]} is sharded or replicated over rank {min(both)} of another learner: shard it over "
            "the other dimensions, fully_shard(module, mesh=mesh['shard']), and pass mesh=mesh['learners'] here"
        )
    _check_offload(model)
    return shards


def _check_offload(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if hasattr(module, "_get_fsdp_state") and any(one.offload_to_cpu for one in fsdp_parameters(module)):
            raise ValueError(
                f"{f'module {name}' if name else 'the model'} keeps its shards on the CPU (CPUOffloadPolicy), and "
                "learners average where they compute: leave offload_policy out"
            )


def _check_options(strategy: Strategy, connection: Connection, scaler: object, on_nonfinite: str) -> None:
    if strategy.traits.no_shards:
        raise ValueError(f"{strategy.name}: {strategy.traits.no_shards}")
    if connection.on_failure != "raise":
        raise ValueError(
            f"on_failure is {connection.on_failure!r}: a learner is several ranks, and those of a dead rank's learner "
            "cannot go on: leave it out, and begin at the last checkpoint"
        )
    if scaler is not None:
        raise ValueError(
            "the scaler sees the shards of one rank alone: train sharded models in bfloat16, without scaler="
        )
    if on_nonfinite == "quarantine":
        raise ValueError("on_nonfinite is 'quarantine', which takes whole models: take 'skip'")
