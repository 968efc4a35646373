"""All state of a training in one value and as a Stateful; the averaged weights in the place of a model's own."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_with_path

from ddpcore.distributed.averaging import has_average
from ddpcore.distributed.handle import Distributed
from ddpcore.distributed.hooks import HookedDistributed
from ddpcore.optim import FusedOptimizer
from ddpcore.parameters.flat import FlatParameters, Segment
from ddpcore.parameters.shards import is_dtensor, local, mesh_of, placements_of
from ddpcore.storage.serialization import copy_of, pack, unpack, versioned, versions_of
from ddpcore.strategies.base import Strategy
from ddpcore.strategies.learner import Learner

_PREFIX = "ddpcore-rank-"
_SAVED = re.compile(rf"(?:^|\.){_PREFIX}(\d+)\.(.+)$")
_OF_SHARD = re.compile(r"shard-(\d+)\.")  # begins the name of what one rank of a sharded learner has for itself
_MARK = "@"  # in the name of a DTensor, before the name of the parameter that has its layout
_SHARDS = "__shards__"


def _hooked(handle: Distributed) -> HookedDistributed:
    if not isinstance(handle, HookedDistributed):
        raise ValueError("a baseline has no state of ddpcore: save the states of its model and optimizer")
    return handle


def run_state(handle: Distributed) -> dict[str, Any]:
    """Model, optimizer, handle and random numbers of this process: plain values and tensors. Not collective.

    ValueError: the handle is of a baseline or of a sharded learner.
    """
    learner = _hooked(handle).learner
    if learner.flat.shards is not None:
        raise ValueError("each rank has a shard of a learner: save RunState(handle), as docs/sharded.md shows")
    return state_of(handle, learner.models[0], learner.optimizer)


def state_of(handle: Distributed, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As :func:`run_state`, also of baselines, whose handles do not know the model and optimizer of ``distribute``."""
    if handle.learner is not None:
        handle.learner.check_own("save the state after the evaluation")
    device, random = _device_of(handle, model), {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(device)
    state = model.state_dict()
    return {
        "model": copy_of(dict(state)),
        "versions": versions_of(state),
        "optimizer": _copied(optimizer, optimizer.state_dict()),
        "handle": handle.state_dict(),
        "random": random,
    }


def load_state(handle: Distributed, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the result of :func:`state_of`, after ``handle.check_state``. Collective."""
    model.load_state_dict(versioned(state["model"], state.get("versions")))
    optimizer.load_state_dict(_copied(optimizer, state["optimizer"]))
    handle.load_state_dict(state["handle"])
    random, device = state.get("random", {}), _device_of(handle, model)  # none: of another number of shards
    if "cpu" in random:
        torch.set_rng_state(random["cpu"].cpu())
    if "cuda" in random and device.type == "cuda":
        torch.cuda.set_rng_state(random["cuda"].cpu(), device)


def place_of(handle: Distributed) -> int:
    """The number of this process among those of the run, after a death among those that are left."""
    return handle.comm.learners[0] // len(handle.comm.learners)


def _copied(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> Any:
    """A copy of its state, because optimizers of torch save and load their own tensors. Ours copy by themselves."""
    return state if isinstance(optimizer, FusedOptimizer) else copy_of(state)


def _device_of(handle: Distributed, model: nn.Module) -> torch.device:
    return next(model.parameters()).device if handle.learner is None else handle.learner.flat.param_LP.device


def load_run_state(
    handle: Distributed, states: Sequence[dict[str, Any]], *, moments: str = "average", weights: str = "average"
) -> None:
    """Load what every process of a run has saved, in the order of its learners. Collective.

    As many learners get the bits that they had. Another number of learners starts from the plain mean of all that were
    saved: its weights and buffers, the moments of the optimizer, and the step. An outer optimizer that all learners
    share keeps its state. What a strategy keeps for each learner, such as a tracked gradient, starts anew.

    Args:
        handle: of this process, after ``distribute``.
        states: results of :func:`run_state`, of each process. As many processes use only their own, the others may be
            None. ValueError: they are of another strategy or model, or the learners of the strategy have no mean.
        moments: of the optimizer, ``average`` or ``reset``, if the number of learners is another one.
        weights: ``average``, or ``nearest``: learner j of m then starts from learner ``j n // m`` of the n that were
            saved, with its buffers and moments; with groups of learners, each group from one group.
    """
    handle = _hooked(handle)
    handle.learner.check_own("load the state after the evaluation")
    state = states[min(place_of(handle), len(states) - 1)]
    num_saved = len(states) * (1 + len(state["handle"]["learners"]))
    if num_saved != max(handle.comm.num_learners, len(handle.comm.learners)):  # virtual learners that died have rows
        _load_others(handle, states, moments, weights)
        return
    if len(states) * len(handle.comm.learners) != num_saved:
        raise ValueError(f"{len(states)} processes have saved the {num_saved} learners: resume with as many processes")
    handle.check_state(state["handle"])
    load_state(handle, handle.models[0], handle.learner.optimizer, state)


@torch.no_grad()
def _load_others(handle: HookedDistributed, states: Sequence[dict[str, Any]], moments: str, weights: str) -> None:
    for name, value, known in (("moments", moments, "average, reset"), ("weights", weights, "average, nearest")):
        if value not in known.split(", "):
            raise ValueError(f"{name} is {value!r}: choose from {known}")
    saved, strategy = states[0]["handle"], handle.strategy
    if others := [s["handle"] for s in states if any(s["handle"][key] != saved[key] for key in ("made_by", "step"))]:
        both = (f"step {one['step']} of {one['made_by']}" for one in (saved, others[0]))
        raise ValueError(f"the states are of different moments, {' and '.join(both)}: load the files of one save")
    if not saved["made_by"].startswith(f"{strategy!r} of "):
        raise ValueError(f"the state is of {saved['made_by']} and this is {strategy!r}: use the same strategy")
    models = [model for state in states for model in (state["model"], *state["handle"]["learners"])]
    have_died = any(len(ids) < len(models) for _, ids in saved.get("deals", ())[-1:])
    if strategy.traits.no_mean or not strategy.traits.waits or handle.comm.membership is not None or have_died:
        raise ValueError(f"learners of {strategy.name} have no plain average here: resume with as many learners")
    size = strategy.traits.group  # whose learners are alike, so they start from one group
    new, old = handle.comm.num_learners // size, len(models) // size
    nearest = [one // size * old // new * size + one % size for one in handle.comm.learners]
    sources = nearest if weights == "nearest" else None
    for name, mask in models[0].items() if sources is None else ():
        is_mask = name.endswith("_mask") and f"{name[:-5]}_orig" in models[0]  # of torch.nn.utils.prune
        if is_mask and not all(torch.equal(mask, model[name]) for model in models):
            raise ValueError(f"{name} of pruning differs between learners: load with weights='nearest' instead")
    means = {name: _mean([model[name] for model in models]) for name in models[0]} if sources is None else {}
    for place, model in enumerate(handle.models):
        own = means if sources is None else models[sources[place]]
        model.load_state_dict(versioned(own, states[0].get("versions")))
    optimizer = handle.learner.optimizer
    optimizer.load_state_dict(_moved_moments(handle, [state["optimizer"] for state in states], moments, sources))
    own = handle.state_dict()
    for path in strategy.traits.shared_state:
        mine, theirs, names = own["strategy"], saved["strategy"], path.split(".")
        for name in names[:-1]:
            mine, theirs = mine[name] or {}, theirs[name] or {}
        if theirs.get(names[-1]) is not None:
            mine[names[-1]] = theirs[names[-1]]
    handle.load_state_dict({**own, "step": saved["step"], "layout": saved["layout"], "policies": saved["policies"]})


def _moved_moments(
    handle: HookedDistributed, states: Sequence[dict[str, Any]], moments: str, sources: Sequence[int] | None
) -> dict[str, Any]:
    """The optimizer state of ``handle``'s learners: that of the old learners in ``sources``, or the means of all."""
    first = {id(parameter) for parameter in handle.models[0].parameters()}
    optimizer, merged, groups = handle.learner.optimizer, {}, []
    packed = optimizer.state_dict()["param_groups"]
    for own, numbers, saved in zip(optimizer.param_groups, packed, states[0]["param_groups"], strict=True):
        of_first = [parameter for parameter in own["params"] if id(parameter) in first]
        trained = [place for place, parameter in enumerate(of_first) if parameter.requires_grad]
        groups.append({**saved, "params": numbers["params"]})
        if names := saved.get("param_names", [])[: len(of_first)]:
            copies = product(range(1, len(handle.models)), trained)
            groups[-1]["param_names"] = [*names, *(f"{names[place]} of learner {copy}" for copy, place in copies)]
        for index, place in enumerate(trained):
            places = [place, *range(len(of_first) + index, len(saved["params"]), len(trained))]
            found = [state["state"].get(saved["params"][one]) for state in states for one in places]
            if moments == "reset" or all(one is None for one in found):
                continue
            mine = (place, *range(len(of_first) + index, len(own["params"]), len(trained)))
            if sources is None:
                moved = [_mean_states(found, of_first[place].shape)] * len(mine)
            else:
                moved = [found[source] for source in sources]
            for number, its in zip(mine, moved, strict=True):
                if its is not None:
                    merged[numbers["params"][number]] = copy_of(its)
    return {**states[0], "state": merged, "param_groups": groups}


def _mean_states(found: Sequence[dict[str, Any] | None], shape: torch.Size) -> dict[str, Any]:
    """The means of a parameter's states. A learner that has none has zeros, and master weights then begin anew."""
    known = [one for one in found if one is not None]
    means, num_lacking = {}, len(found) - len(known)
    for name, first in known[0].items():
        if name == "master" and num_lacking:
            continue
        has_zeros = isinstance(first, Tensor) and first.shape == shape and name != "step"
        zeros = [torch.zeros_like(first)] * num_lacking if has_zeros else []
        means[name] = _mean([one[name] for one in known] + zeros)
    return means


def _mean(values: Sequence[Any]) -> Any:
    """The mean. Of what is no tensor of real or complex numbers, such as a count, it is the first instead."""
    first = values[0]
    if not isinstance(first, torch.Tensor) or not has_average(first):
        return first
    wide = torch.complex128 if first.is_complex() else torch.float64
    return torch.stack([value.to(first.device, wide) for value in values]).mean(dim=0).to(first.dtype)


class RunState:
    """A ``Stateful`` of ``torch.distributed.checkpoint`` with all state of a training.

    It has model, optimizer, handle and random numbers. The weights of the learners differ, so each process saves all of
    its own. Saving model and optimizer by themselves would keep only the states of one rank, because torch
    takes equal names for copies of one tensor::

        dcp.save({"run": RunState(handle)}, checkpoint_id="saved")
        dcp.load({"run": RunState(handle, saved="saved")}, checkpoint_id="saved")

    A sharded learner saves DTensors. Another number of shards, or a whole model, loads them too: it has the buffers of
    the first rank then, and goes on with its own random numbers.

    Args:
        handle: of this process, after ``distribute``.
        saved: the folder to load, of which the sizes of tensors are read first. Another number of learners may have
            saved it. ValueError: it holds no state of this model that these learners can load.
        options: ``moments`` and ``weights`` of :func:`load_run_state`, for another number of learners.
    """

    def __init__(self, handle: Distributed, *, saved: str | Path | None = None, **options: str) -> None:
        self._handle, self._options = _hooked(handle), options
        self._found: dict[int, dict[str, Any]] = {}
        if saved is not None:
            from torch.distributed.checkpoint import FileSystemReader  # noqa: PLC0415  its import takes a second

            for name, entry in FileSystemReader(saved).read_metadata().state_dict_metadata.items():
                if match := _SAVED.search(name):
                    self._found.setdefault(int(match[1]), {})[match[2]] = entry
            if not self._found:
                raise ValueError(f"{saved} holds no state of ddpcore: save RunState(handle) into it")
        shards = self._handle.learner.flat.shards
        self._place, self._num_shards = (0, 0) if shards is None else shards.place
        matches = [match for name in self._found.get(0, ()) if (match := _OF_SHARD.match(name))]
        self._num_saved = max((int(match[1]) + 1 for match in matches), default=0)
        if saved is not None:
            self._check(saved)

    def state_dict(self) -> dict[str, Any]:
        """What this process saves, or tensors for what it loads."""
        if self._found:
            return {f"{_PREFIX}{rank}": self._room(rank) for rank in self._needed()}
        learner, shared = self._handle.learner, dict[str, Any]()
        state: Any = state_of(self._handle, learner.models[0], learner.optimizer)
        if learner.flat.shards is not None:
            state, shared = _split(state, learner, self._handle.strategy)
        tree, tensors = pack(state)
        text = torch.frombuffer(bytearray(json.dumps(tree).encode()), dtype=torch.uint8)
        own = {f"{self._own(self._num_shards)}{name}": one for name, one in {"tree": text, **tensors}.items()}
        return {f"{_PREFIX}{place_of(self._handle)}": {**own, **shared}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave room for. Collective."""
        states: list[Any] = [None] * len(self._found)
        handle, own = self._handle, self._own(self._num_saved)
        for rank in self._needed():
            tensors = {name.removeprefix(own): one for name, one in state_dict[f"{_PREFIX}{rank}"].items()}
            tree = json.loads(bytes(tensors.pop("tree").tolist()))
            if self._num_saved:
                handle.check_state({**tree["handle"], "made_by": handle._made_by()})  # before the layout changes
                handle._lay_out([handle.learner.flat.names.index(name) for name in tree["handle"]["layout"]])
                tree = _joined(tree, tensors, handle.learner)
            states[rank] = unpack(tree, tensors, handle.learner.flat.param_LP.device)
            if self._num_saved != self._num_shards:
                del states[rank]["random"]
        load_run_state(handle, states, **self._options)

    def _own(self, num_shards: int) -> str:
        """What begins the names of the values of this rank alone, in a state of so many shards; 0: of whole models."""
        return f"shard-{min(self._place, num_shards - 1)}." if num_shards else ""

    def _check(self, saved: str | Path) -> None:
        if self._num_shards and not self._num_saved:
            raise ValueError(f"{saved} holds whole learners and this model is sharded: load it into a whole model")
        if not self._num_saved:
            return
        owners = self._handle.models[0].state_dict(keep_vars=True)
        names = {name.rpartition(_MARK)[2] for name in self._found[0] if not _OF_SHARD.match(name)}
        lacking = {name for name, one in owners.items() if isinstance(one, nn.Parameter)} - names
        if other := sorted(lacking | (names - set(owners))):
            raise ValueError(f"{saved} holds a model with other parameters, as {other[0]}: load it into that model")
        num, sent = self._num_saved, f"{self._own(self._num_saved)}.handle.strategy"
        if num != self._num_shards and any(
            name.startswith(sent) and not entry.properties.dtype.is_floating_point
            for entries in self._found.values()
            for name, entry in entries.items()
        ):
            raise ValueError(f"{saved} holds compressed weights of {num} shards under way: load it on as many")

    def _room(self, rank: int) -> dict[str, Any]:
        """Tensors for what this process loads of one that has saved."""
        own, room = self._own(self._num_saved), {}
        owners = self._handle.models[0].state_dict(keep_vars=True) if self._num_saved else {}
        for name, entry in self._found[rank].items():
            size, dtype = entry.size, entry.properties.dtype
            if name.startswith(own):
                room[name] = torch.empty(size, dtype=dtype, device="cpu")
            elif not _OF_SHARD.match(name):
                room[name] = _room_for(owners[name.rpartition(_MARK)[2]], size, dtype)
        return room

    def _needed(self) -> list[int]:
        """The number of this process, if as many processes have saved, else the numbers of all."""
        comm, num = self._handle.comm, len(self._found) * len(self._handle.comm.learners)
        return [place_of(self._handle)] if num == max(comm.num_learners, len(comm.learners)) else sorted(self._found)


# ---- sharded learners: their state as DTensors, which another number of shards can load ----
# torch.distributed.checkpoint takes DTensors with one name for copies of one tensor, also if they are on the meshes of
# different learners. It saves each shard once, so that a tensor would get shards of several learners. So each name
# holds the number of the learner.


def _split(state: dict[str, Any], learner: Learner, strategy: Strategy) -> tuple[Any, dict[str, Tensor]]:
    """The state of a run, in which marks stand for DTensors and for rows of the flat buffer; and the DTensors by name.

    DTensors are parts of the model and of the optimizer, and rows are at ``state["handle"]["strategy"]``.
    """
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  its import takes long

    flat, tensors = learner.flat, dict[str, Tensor]()
    names = {id(value): name for name, value in learner.models[0].state_dict(keep_vars=True).items()}
    numbered = [parameter for group in learner.optimizer.param_groups for parameter in group["params"]]

    def mark(path: tuple[Any, ...], leaf: Any) -> Any:
        keys: list[Any] = [getattr(key, "key", getattr(key, "idx", None)) for key in path]
        where = ".".join(map(str, keys))
        if is_dtensor(leaf):
            owner = keys[1] if keys[0] == "model" else names[id(numbered[keys[2]])]
            tensors[f"{where}{_MARK}{owner}"] = leaf
            return {_SHARDS: [f"{where}{_MARK}{owner}"], "dims": 0}
        if keys[:2] != ["handle", "strategy"] or not (segments := _segments_of(leaf, keys, flat, strategy)):
            return leaf
        row, first = leaf.detach(), leaf.storage_offset() - segments[0].offset
        parts = {}
        for segment in segments:
            one: Any = flat.parameters[flat.names.index(segment.name)]
            part = row.as_strided(segment.shape, segment.stride, first + segment.offset)
            sizes = {"shape": one.shape, "stride": one.stride()}
            whole = DTensor.from_local(part, mesh_of(one), placements_of(one), run_check=False, **sizes)
            parts[f"{where}{_MARK}{names[id(one)]}"] = whole
        tensors.update(parts)
        return {_SHARDS: list(parts), "dims": row.dim()}

    return tree_map_with_path(mark, state), tensors


def _segments_of(leaf: Any, keys: list[Any], flat: FlatParameters, strategy: Strategy) -> list[Segment]:
    """The segments of a row ``[X]`` or ``[1, X]`` of all columns, or of the numbered part of them; none for others."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dim() == 0:
        return []
    parts, numbers = strategy.traits.columns, [key for key in keys if isinstance(key, int)]
    for begin, end in [*[parts[number] for number in numbers[-1:] if number < len(parts)], (0, flat.numel)]:
        if leaf.numel() == leaf.shape[-1] == end - begin:
            return [segment for segment in flat.segments if begin <= segment.offset < end]
    return []


def _joined(tree: Any, tensors: Mapping[str, Tensor], learner: Learner) -> Any:
    """The reverse of ``_split``: marks become DTensors or whole tensors, and rows with the layout of this buffer."""
    flat = learner.flat
    owners = learner.models[0].state_dict(keep_vars=True)

    def fill(node: Any) -> Any:
        if not _is_mark(node):
            return node
        found = [tensors[name] for name in node[_SHARDS]]
        if not node["dims"]:
            return found[0]
        places = [flat.index[id(owners[name.rpartition(_MARK)[2]])] for name in node[_SHARDS]]
        begin = flat.segments[places[0]].offset
        row = torch.zeros(flat.segments[places[-1]].end - begin, dtype=found[0].dtype, device=flat.param_LP.device)
        for place, part in zip(places, found, strict=True):
            segment = flat.segments[place]
            row.as_strided(segment.shape, segment.stride, segment.offset - begin).copy_(local(part))
        return row.view(*[1] * (node["dims"] - 1), -1)

    return tree_map(fill, tree, is_leaf=_is_mark)


def _is_mark(node: Any) -> bool:
    return isinstance(node, dict) and _SHARDS in node


def _room_for(like: Any, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """An empty tensor of a global size that is laid out as another one."""
    if not is_dtensor(like):
        return torch.empty(size, dtype=dtype, device=like.device)
    from torch.distributed.tensor import empty  # noqa: PLC0415  its import takes long

    return empty(size, dtype=dtype, device_mesh=mesh_of(like), placements=placements_of(like))


class Lent:
    """The averaged weights and buffers in the place of those that a handle's model has. Collective.

    Parameters and buffers stay the same objects, so all that refers to them computes with the average. The flat buffer
    keeps the learner's weights. ``swap`` puts them back, and what the program has changed meanwhile keeps the change.

    ValueError: a learner is sharded.
    """

    def __init__(self, handle: Distributed) -> None:
        self._handle, learner = _hooked(handle), _hooked(handle).learner
        if learner.flat.shards is not None:
            raise ValueError("each rank has a shard of a learner: evaluate handle.evaluation_model() in your own loop")
        with torch.inference_mode(False):
            average, model = handle.evaluation_model(), learner.models[0]
            self._own = [*model.parameters(), *model.buffers()]
            given = [one.data for one in (*average.parameters(), *average.buffers())]
            self._given: list[Tensor | None] = [*given]  # None once it was changed
            self._away = [one.clone() for one in given]
            self._pointers, self._num_parameters = list(map(Tensor.data_ptr, self._away)), len([*model.parameters()])
            known, owners = dict(zip(map(id, self._own), given, strict=True)), [one._buffers for one in model.modules()]
            buffers = [(own, name, one) for own in owners for name, one in own.items() if one is not None]
            self._places = [(own, name, one, known[id(one)]) for own, name, one in buffers]
        self._was_paused = False  # whether the loop had paused averages of gradients, by no_sync
        self._loaded = learner.loaded.copy()
        self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Give the model the averages, or its own weights back. Gradients of lent weights stay in this process."""
        learner, buckets = self._handle.learner, self._handle._buckets
        learner.hooks_paused = learner.lent = lends = not learner.lent
        if buckets is not None:
            buckets.paused, self._was_paused = lends or self._was_paused, buckets.paused
        with torch.inference_mode(False):
            for place, own in enumerate(self._own):
                own.data, self._away[place] = self._away[place], own.data
            if not lends:
                self._keep_changes()

    @torch.no_grad()  # inference_mode(False) ends the outer one
    def _keep_changes(self) -> None:
        """Give the learner what the program has changed. A cast of the model, also there and back, is no change."""
        is_moved, learner = False, self._handle.learner
        for place, (own, now, given) in enumerate(zip(self._own, self._away, self._given, strict=True)):
            is_parameter = place < self._num_parameters
            is_moved |= is_parameter and (now.dtype, now.device) != (own.dtype, own.device)
            is_cast, error = now.data_ptr() != self._pointers[place], _rounding(given) if is_parameter else 0.0
            if given is not None and _is_same(now, given, may_be_cast=is_cast, error=error):
                continue
            if given is None or not is_parameter:
                self._given[place], own.data = None, now.clone()
            elif now.shape == own.shape:  # in place: the flat buffer has it
                kept = now == given.to(now)  # as other rows of a table; a loaded state has some by chance
                own.copy_(now if learner.loaded[id(own)] > self._loaded[id(own)] else now.where(~kept, own.to(now)))
        for owner, name, buffer, given in self._places:
            held = owner.get(name)
            if held is not None and held is not buffer:  # of a model that was cast, or set by a forward pass
                changed = held.to(buffer) if is_moved else held
                owner[name] = buffer if _is_same(held, given, may_be_cast=True) else changed


def _is_same(now: Tensor, given: Tensor, *, may_be_cast: bool, error: float = 0.0) -> bool:
    if now.shape != given.shape:
        return False
    narrow = (torch.float16, torch.bfloat16) if may_be_cast and given.is_floating_point() else ()
    expected = (given.to(kind).to(now) for kind in (given.dtype, *narrow))
    return any(bool(torch.isclose(now, one, rtol=0, atol=error, equal_nan=True).all()) for one in expected)


def _rounding(given: Tensor | None) -> float:
    """The error that is left after adding and subtracting a direction. 0 for 16 bits, where a step may be as small."""
    if given is None or given.dtype not in (torch.float32, torch.float64) or not given.numel():
        return 0.0
    return 4 * torch.finfo(given.dtype).eps * float(given.abs().nan_to_num(0, 0).max())


@contextmanager
def replaced(handle: Distributed) -> Iterator[None]:
    """A context in which the handle's model has averaged weights and buffers, see :class:`Lent`. Collective."""
    lent = None if handle.learner is not None and handle.learner.lent else Lent(handle)  # None: inside of another one
    try:
        yield
    finally:
        if lent is not None:
            lent.swap()
