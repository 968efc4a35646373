"""All state of a training in one value and as a Stateful; the averaged weights in the place of a model's own."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import stateless

from ddpcore.distributed.handle import Distributed
from ddpcore.distributed.hooks import HookedDistributed
from ddpcore.storage.serialization import pack, unpack

_PREFIX = "ddpcore-rank-"
_SAVED = re.compile(rf"(?:^|\.){_PREFIX}(\d+)\.(.+)$")


def _hooked(handle: Distributed) -> HookedDistributed:
    if not isinstance(handle, HookedDistributed):
        raise ValueError("a baseline has no state of ddpcore: save the states of its model and optimizer")
    if handle.learner.flat.shards is not None:
        raise ValueError("each rank has a shard of a learner: save it as docs/sharded.md shows")
    return handle


def run_state(handle: Distributed) -> dict[str, Any]:
    """Model, optimizer, handle and random numbers of this process: plain values and tensors. Not collective."""
    handle = _hooked(handle)
    state = {
        "model": dict(handle.models[0].state_dict()),
        "optimizer": handle.learner.optimizer.state_dict(),
        "handle": handle.state_dict(),
        "random": {"cpu": torch.get_rng_state()},
    }
    device = handle.learner.flat.param_LP.device
    if device.type == "cuda":
        state["random"]["cuda"] = torch.cuda.get_rng_state(device)
    return state


def load_run_state(
    handle: Distributed, states: Sequence[dict[str, Any]], *, moments: str = "average", weights: str = "average"
) -> None:
    """Load what every process of a run has saved, in the order of its learners. Collective.

    As many learners get the bits that they had. Another number of learners starts from the average of all that were
    saved: its weights and buffers, the moments of the optimizer, and the step. An outer optimizer that all learners
    share keeps its state. What a strategy keeps for each learner, such as a tracked gradient, starts anew.

    Args:
        handle: of this process, after ``distribute``.
        states: results of :func:`run_state`, one for each process. As many processes use only their own, so the others
            may be None.
        moments: ``average`` or ``reset`` those of the optimizer, if the number of learners is another one.
        weights: ``average``, or ``nearest``: learner j of m then starts from learner ``j n // m`` of the n that were
            saved, with its buffers and moments.

    Raises:
        ValueError: another strategy or another model has saved them, or the learners of the strategy have no mean.
    """
    handle = _hooked(handle)
    mine = handle.comm.learners[0] // len(handle.comm.learners) if handle.comm.membership is None else 0
    state = states[min(mine, len(states) - 1)]
    num_saved = len(states) * (1 + len(state["handle"]["learners"]))
    if num_saved != handle.comm.num_learners:
        return _load_others(handle, states, moments, weights)
    if len(states) * len(handle.comm.learners) != handle.comm.num_learners:
        raise ValueError(f"{len(states)} processes have saved the {num_saved} learners: resume with as many processes")
    handle.check_state(state["handle"])
    handle.models[0].load_state_dict(state["model"])
    handle.learner.optimizer.load_state_dict(state["optimizer"])
    handle.load_state_dict(state["handle"])
    torch.set_rng_state(state["random"]["cpu"].cpu())
    if "cuda" in state["random"] and handle.learner.flat.param_LP.device.type == "cuda":
        torch.cuda.set_rng_state(state["random"]["cuda"].cpu(), handle.learner.flat.param_LP.device)
    return None


@torch.no_grad()
def _load_others(handle: HookedDistributed, states: Sequence[dict[str, Any]], moments: str, weights: str) -> None:
    for name, value, known in (("moments", moments, "average, reset"), ("weights", weights, "average, nearest")):
        if value not in known.split(", "):
            raise ValueError(f"{name} is {value!r}: choose from {known}")
    saved, strategy = states[0]["handle"], handle.strategy
    here = f"{strategy!r} of "
    if not saved["made_by"].startswith(here):
        raise ValueError(f"the state is of {saved['made_by']} and this is {strategy!r}: use the same strategy")
    if strategy.traits.no_mean or not strategy.traits.waits or handle.comm.membership is not None:
        raise ValueError(f"learners of {strategy.name} have no plain average here: resume with as many learners")
    models = [model for state in states for model in (state["model"], *state["handle"]["learners"])]
    nearest = [learner * len(models) // handle.comm.num_learners for learner in handle.comm.learners]
    sources = nearest if weights == "nearest" else None
    moved = [_moved([model[name] for model in models], sources, len(handle.models)) for name in models[0]]
    for model, values in zip(handle.models, zip(*moved, strict=True), strict=True):
        model.load_state_dict(dict(zip(models[0], values, strict=True)))
    optimizer = handle.learner.optimizer
    optimizer.load_state_dict(_moved_moments(handle, [state["optimizer"] for state in states], moments, sources))
    own = handle.state_dict()
    if saved["strategy"].get("anchor") is not None and strategy.topology is None:  # one for all learners
        own["strategy"] = {**own["strategy"], "anchor": saved["strategy"]["anchor"]}
    handle.load_state_dict({**own, "step": saved["step"], "layout": saved["layout"], "policies": saved["policies"]})


def _moved_moments(
    handle: HookedDistributed, states: Sequence[dict[str, Any]], moments: str, sources: Sequence[int] | None
) -> dict[str, Any]:
    """The state of an optimizer of ``handle``'s learners from those of others, see :func:`_moved`."""
    first = {id(parameter) for parameter in handle.models[0].parameters()}
    optimizer, merged = handle.learner.optimizer, {}
    packed = optimizer.state_dict()["param_groups"]
    for own, numbers, saved in zip(optimizer.param_groups, packed, states[0]["param_groups"], strict=True):
        of_first = [parameter for parameter in own["params"] if id(parameter) in first]
        trained = [place for place, parameter in enumerate(of_first) if parameter.requires_grad]
        for index, place in enumerate(trained):
            places = [place, *range(len(of_first) + index, len(saved["params"]), len(trained))]
            found = [state["state"].get(saved["params"][one]) for state in states for one in places]
            if moments == "reset" or any(one is None for one in found):
                continue
            mine = (place, *range(len(of_first) + index, len(own["params"]), len(trained)))
            moved = {name: _moved([one[name] for one in found], sources, len(mine)) for name in found[0]}
            for number, one in enumerate(mine):
                merged[numbers["params"][one]] = {name: copy.deepcopy(of[number]) for name, of in moved.items()}
    groups = [{**saved, "params": one["params"]} for saved, one in zip(states[0]["param_groups"], packed, strict=True)]
    return {**states[0], "state": merged, "param_groups": groups}


def _moved(values: Sequence[Any], sources: Sequence[int] | None, num: int) -> list[Any]:
    """For each of ``num`` learners the value of the old learner in ``sources``, or the mean of all."""
    return [_mean(values)] * num if sources is None else [values[source] for source in sources]


def _mean(values: Sequence[Any]) -> Any:
    """The mean of tensors of real or complex numbers; of anything else, such as a count, the first."""
    first = values[0]
    if not isinstance(first, torch.Tensor) or not (first.is_floating_point() or first.is_complex()):
        return first
    wide = torch.complex128 if first.is_complex() else torch.float64
    return torch.stack([value.to(first.device, wide) for value in values]).mean(dim=0).to(first.dtype)


def _entries(folder: str | Path) -> dict[str, Any]:
    from torch.distributed.checkpoint import FileSystemReader  # noqa: PLC0415  its import takes a second

    return FileSystemReader(folder).read_metadata().state_dict_metadata


class RunState:
    """A ``Stateful`` of ``torch.distributed.checkpoint`` with all state of a training.

    It has model, optimizer, handle and random numbers. The weights of the learners differ, so each process saves all of
    its own. Saving the states of model and optimizer by themselves would keep only those of one rank, because torch
    takes equal names for copies of one tensor::

        dcp.save({"run": RunState(handle)}, checkpoint_id="saved")
        dcp.load({"run": RunState(handle, saved="saved")}, checkpoint_id="saved")

    Args:
        handle: of this process, after ``distribute``.
        saved: the folder to load, of which the sizes of tensors are read first. Another number of learners may have
            saved it, see :func:`load_run_state`.
        options: ``moments`` and ``weights`` of :func:`load_run_state`, for another number of learners.

    Raises:
        ValueError: the folder holds no such state.
    """

    def __init__(self, handle: Distributed, *, saved: str | Path | None = None, **options: str) -> None:
        self._handle, self._options = _hooked(handle), options
        self._found: dict[int, dict[str, Any]] = {}
        for name, entry in {} if saved is None else _entries(saved).items():
            if match := _SAVED.search(name):
                empty = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
                self._found.setdefault(int(match[1]), {})[match[2]] = empty
        if saved is not None and not self._found:
            raise ValueError(f"{saved} holds no state of ddpcore: save RunState(handle) into it")

    def state_dict(self) -> dict[str, Any]:
        """What this process saves, or tensors for what it loads."""
        if self._found:
            return {f"{_PREFIX}{rank}": tensors for rank, tensors in self._needed().items()}
        comm = self._handle.comm
        tree, tensors = pack(run_state(self._handle))
        text = torch.frombuffer(bytearray(json.dumps(tree).encode()), dtype=torch.uint8)
        return {f"{_PREFIX}{comm.learners[0] // len(comm.learners)}": {"tree": text, **tensors}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave room for. Collective."""
        states: list[Any] = [None] * len(self._found)
        device = self._handle.learner.flat.param_LP.device
        for rank in self._needed():
            tensors = dict(state_dict[f"{_PREFIX}{rank}"])
            tree = json.loads(bytes(tensors.pop("tree").tolist()))
            states[rank] = unpack(tree, tensors, device)
        load_run_state(self._handle, states, **self._options)

    def _needed(self) -> dict[int, dict[str, Any]]:
        """Those of this process, if as many have saved, else all."""
        comm = self._handle.comm
        if len(self._found) * len(comm.learners) != comm.num_learners:
            return self._found
        mine = comm.learners[0] // len(comm.learners)
        return {mine: self._found[mine]}


@contextmanager
def replaced(model: nn.Module, average: nn.Module) -> Iterator[None]:
    """A context in which ``model`` computes with the parameters and buffers of ``average``, a copy of it."""
    tensors = {**dict(average.named_parameters()), **dict(average.named_buffers())}
    with stateless._reparametrize_module(model, tensors, tie_weights=True):
        yield
