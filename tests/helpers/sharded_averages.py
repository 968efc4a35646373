"""The average of sharded learners as a module, for ``sharded_ranks``."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import ddpcore
from ddpcore.optim import FusedSGD
from helpers.sharded_models import net, sharded
from helpers.sharded_places import Place, distance, weights, whole


def average_of_ties_and_teachers(place: Place) -> dict[str, Any]:
    """The average after the training model was evaluated, with tied weights and a frozen block that differs."""
    model = net(tied=True)
    model.blocks[0].requires_grad_(False)
    model = sharded(model, place.mesh["shard"])
    optimizer = FusedSGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    handle = ddpcore.distribute(model, optimizer, ddpcore.LocalSGD(8), group=place.mesh["learners"])
    place.train(handle, range(2))
    with torch.no_grad():
        for parameter in model.blocks[0].parameters():
            parameter.to_local().add_(place.learner)
        model(place.x[0, 0])  # leaves the gathered weights of the root
    model.blocks[1].eval()
    modes: list[bool] = []
    model.blocks[1].register_forward_pre_hook(lambda module, _: modes.append(module.training))
    averaged: Any = handle.evaluation_model()
    with torch.no_grad():
        for mode in (None, True, False):
            averaged if mode is None else averaged.train(mode)
            averaged(place.x[0, 0])
            modes.append(averaged.training)
    seen = modes.copy()
    state = {name: whole(value) for name, value in averaged.state_dict().items()}
    own = weights(model)
    mean = {name: value.clone() for name, value in own.items()}
    for value in mean.values():
        dist.all_reduce(value, group=place.mesh.get_group("learners"))
        value.div_(place.num)
    other = net(tied=True).eval()
    other.load_state_dict(mean)
    with torch.no_grad():
        apart = float((averaged(place.x[0, 0]) - other(place.x[0, 0])).abs().max())
    held = {name: whole(value.detach()) for name, value in averaged.named_parameters(remove_duplicate=False)}
    return {
        "state": distance(state, mean),
        "outputs": apart,
        "kept": distance(weights(model), own) == 0 and model.training and not model.blocks[1].training,
        "modes": seen,
        "names": [list(dict(one.named_parameters())) for one in (averaged, model)],
        "parameters": distance(held, mean),
        "full": _full(averaged, mean),
        "renamed": distance(_renamed(averaged, model), mean),
        "refused": [_error(call) for call in _changes(averaged)],
        "recalibrate": _error(lambda: handle.evaluation_model("recalibrate", [place.x[0, 0]])),
        "moved": averaged.to("cpu", torch.float32) is averaged,
    }


def _full(averaged: nn.Module, mean: dict[str, Any]) -> float:
    """The distance of what rank 0 gets from torch; the other ranks get nothing."""
    state = get_model_state_dict(averaged, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return distance(state, mean) if dist.get_rank() == 0 else float(len(state))


def _renamed(averaged: nn.Module, model: nn.Module) -> dict[str, Any]:
    """Its state where a hook changes the names of the training model's, as those of activation checkpoints do."""

    def rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in [*state]:
            state[f"{name}_"] = state.pop(name)

    handle = model.register_state_dict_post_hook(rename)
    state = averaged.state_dict(None, "own.")
    handle.remove()
    return {name.removeprefix("own.").removesuffix("_"): whole(value) for name, value in state.items()}


def _changes(averaged: nn.Module) -> list[Callable[[], Any]]:
    state = averaged.state_dict()
    calls = [lambda: averaged.to(torch.bfloat16), lambda: averaged.load_state_dict(state, strict=False)]
    return [*calls, lambda: copy.deepcopy(averaged), lambda: pickle.dumps(averaged)]


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing"
