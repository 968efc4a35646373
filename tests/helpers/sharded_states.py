"""Runs of sharded learners that torch.distributed.checkpoint saves and loads, for ``sharded_ranks``."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp

import ddpcore
from ddpcore import RunState
from ddpcore.optim import FusedSGD
from ddpcore.parameters.shards import local
from helpers.oracle import MAKERS
from helpers.sharded_models import mixed, net, sharded
from helpers.sharded_places import OPTIMIZERS, STEPS, TOPOLOGY, Place, begun, distance, weights


def resumed(place: Place, strategy: str, optimizer: str, folder: Path) -> bool:
    """Whether a run that torch.distributed.checkpoint saves in the middle, and new objects load, goes on to the bit.

    The state of the model can also be copied, and saved by torch.save.
    """
    first, second = (begun(place, strategy, optimizer, sharded(mixed(norm=True), place.mesh["shard"])) for _ in "ab")
    place.train(first, range(3), micros=2)
    state = first.model.state_dict()
    kept = copy.deepcopy(state)
    torch.save(state, io.BytesIO())
    if not all(torch.equal(local(one), local(state[name])) for name, one in kept.items()):
        return False
    save_and_load(place, first, second, folder / f"{strategy}-{optimizer}")
    for one in (first, second):
        place.train(one, range(3, STEPS), micros=2)
    return distance(weights(first.model), weights(second.model)) == 0


def save_and_load(place: Place, first: Any, second: Any, path: Path) -> None:
    """Load the state of a run by torch.distributed.checkpoint into other objects, which have trained something else."""
    dcp.save({"run": RunState(first)}, checkpoint_id=path)
    place.train(second, range(1))  # what is loaded replaces what is there
    dcp.load({"run": RunState(second, saved=path)}, checkpoint_id=path)


def resharded(place: Place, strategy: str, optimizer: str, folder: Path) -> dict[str, float]:
    """A run of 2 x 2 ranks is loaded on 2 x 1, by two plain ranks and, its average, by one process and by 4 x 1."""
    path, found = folder / f"{strategy}-{optimizer}-other", {}
    handle = begun(place, strategy, optimizer, sharded(net(), place.mesh["shard"]))
    place.train(handle, range(3))
    dcp.save({"run": RunState(handle)}, checkpoint_id=path)
    average, states = weights(handle.evaluation_model()), [weights(handle.model)]
    place.train(handle, range(3, STEPS))
    states.append(weights(handle.model))
    every: list[Any] = [None] * place.num
    dist.all_gather_object(every, states, group=place.mesh.get_group("learners"))
    small = Place(place.num, 1, like=place)
    if small.is_in:
        group = small.mesh.get_group("learners")
        for name, model, options in (
            ("shards", sharded(net(), small.mesh["shard"]), {"group": small.mesh["learners"]}),
            ("plain", net(), {"group": group}),
        ):
            made = OPTIMIZERS[optimizer](model.parameters())
            other = ddpcore.distribute(model, made, MAKERS[strategy](TOPOLOGY), **options)
            dcp.load({"run": RunState(other, saved=path)}, checkpoint_id=path, process_group=group)
            found[f"{name}, loaded"] = distance(weights(model), every[small.learner][0])
            small.train(other, range(3, STEPS))
            found[f"{name}, trained"] = distance(weights(model), every[small.learner][1])
    if dist.get_rank() == 0:
        model = net()
        made = OPTIMIZERS[optimizer](model.parameters())
        alone = ddpcore.distribute(model, made, MAKERS[strategy](TOPOLOGY), learners=1)
        dcp.load({"run": RunState(alone, saved=path)}, checkpoint_id=path, no_dist=True)
        found["one process"] = distance(weights(model), average)
    four = begun(Place(4, 1), strategy, optimizer, sharded(net(), Place(4, 1).mesh["shard"]))
    dcp.load({"run": RunState(four, saved=path)}, checkpoint_id=path)
    return {**found, "four learners": distance(weights(four.model), average)}


def refused_states(place: Place, folder: Path) -> dict[str, str]:
    """States that this handle cannot load: each is refused before anything is loaded."""

    def begin(strategy: str, model: nn.Module, **options: Any) -> Any:
        return ddpcore.distribute(model, FusedSGD(model.parameters(), lr=0.1), MAKERS[strategy](TOPOLOGY), **options)

    learners, shard = {"group": place.mesh["learners"]}, place.mesh["shard"]
    plain = begin("dpsgd", net(), learners=2)
    dcp.save({"run": RunState(plain)}, checkpoint_id=folder / f"plain-{dist.get_rank()}", no_dist=True)
    handle = begin("dpsgd_int8_stale", sharded(net(), shard), **learners)
    place.train(handle, range(2))
    dcp.save({"run": RunState(handle)}, checkpoint_id=folder / "stale")
    tied = begin("dpsgd_int8_stale", sharded(net(tied=True), shard), **learners)
    texts = {}
    for name, one, path in (
        ("whole state", handle, f"plain-{dist.get_rank()}"),
        ("other parameters", tied, "stale"),
        ("compressed", plain, "stale"),
    ):
        try:
            RunState(one, saved=folder / path)
        except ValueError as error:
            texts[name] = str(error)
    return texts
