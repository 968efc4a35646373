"""The state of a sharded learner as DTensors, which another number of shards can load.

torch.distributed.checkpoint takes DTensors with one name for copies of one tensor, also if they are on the meshes of
different learners. It saves each shard once, so that a tensor would get shards of several learners. So each name holds
the number of the learner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_with_path

from ddpcore.parameters.flat import FlatParameters, Segment
from ddpcore.parameters.shards import is_dtensor, local, mesh_of, placements_of
from ddpcore.strategies.base import Strategy
from ddpcore.strategies.learner import Learner

MARK = "@"
"""In the name of a DTensor, before the name of the parameter that has its layout."""
_SHARDS = "__shards__"


def layouts_by_name(model: nn.Module) -> dict[str, Any]:
    """The parameters and buffers themselves, by their names in a ``state_dict()``."""
    return dict(model.state_dict(keep_vars=True))


def split(state: dict[str, Any], learner: Learner, strategy: Strategy) -> tuple[Any, dict[str, Tensor]]:
    """The state of a run, in which marks stand for DTensors and for rows of the flat buffer; and the DTensors by name.

    Args:
        state: its DTensors are parts of the model and of the optimizer.
        learner: sharded.
        strategy: whose state is at ``state["handle"]["strategy"]``.
    """
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  its import takes long

    flat, tensors = learner.flat, dict[str, Tensor]()
    names = {id(value): name for name, value in layouts_by_name(learner.models[0]).items()}
    numbered = [parameter for group in learner.optimizer.param_groups for parameter in group["params"]]

    def mark(path: tuple[Any, ...], leaf: Any) -> Any:
        keys: list[Any] = [getattr(key, "key", getattr(key, "idx", None)) for key in path]
        where = ".".join(map(str, keys))
        if is_dtensor(leaf):
            owner = keys[1] if keys[0] == "model" else names[id(numbered[keys[2]])]
            tensors[f"{where}{MARK}{owner}"] = leaf
            return {_SHARDS: [f"{where}{MARK}{owner}"], "dims": 0}
        if keys[:2] != ["handle", "strategy"] or not (segments := _segments_of(leaf, keys, flat, strategy)):
            return leaf
        row, first = leaf.detach(), leaf.storage_offset() - segments[0].offset
        parts = {}
        for segment in segments:
            one: Any = flat.parameters[flat.names.index(segment.name)]
            part = row.as_strided(segment.shape, segment.stride, first + segment.offset)
            sizes = {"shape": one.shape, "stride": one.stride()}
            whole = DTensor.from_local(part, mesh_of(one), placements_of(one), run_check=False, **sizes)
            parts[f"{where}{MARK}{names[id(one)]}"] = whole
        tensors.update(parts)
        return {_SHARDS: list(parts), "dims": row.dim()}

    return tree_map_with_path(mark, state), tensors


def _segments_of(leaf: Any, keys: list[Any], flat: FlatParameters, strategy: Strategy) -> list[Segment]:
    """The segments of a row ``[X]`` or ``[1, X]`` of all columns, or of the numbered part of them; none for others."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dim() == 0:
        return []
    parts, numbers = strategy.traits.columns, [key for key in keys if isinstance(key, int)]
    spans = [parts[number] for number in numbers[-1:] if number < len(parts)]
    for begin, end in [*spans, (0, flat.numel)]:
        if leaf.numel() == leaf.shape[-1] == end - begin:
            return [segment for segment in flat.segments if begin <= segment.offset < end]
    return []


def joined(tree: Any, tensors: Mapping[str, Tensor], learner: Learner) -> Any:
    """The reverse of :func:`split`: marks become DTensors or whole tensors, and rows with the layout of this buffer."""
    flat = learner.flat
    owners = layouts_by_name(learner.models[0])

    def fill(node: Any) -> Any:
        if not _is_mark(node):
            return node
        found = [tensors[name] for name in node[_SHARDS]]
        if not node["dims"]:
            return found[0]
        places = [flat.index[id(owners[name.rpartition(MARK)[2]])] for name in node[_SHARDS]]
        begin = flat.segments[places[0]].offset
        following = flat.segments[places[-1] + 1 :]
        end = following[0].offset if following else flat.numel
        row = torch.zeros(end - begin, dtype=found[0].dtype, device=flat.param_LP.device)
        for place, part in zip(places, found, strict=True):
            segment = flat.segments[place]
            row.as_strided(segment.shape, segment.stride, segment.offset - begin).copy_(local(part))
        return row.view(*[1] * (node["dims"] - 1), -1)

    return tree_map(fill, tree, is_leaf=_is_mark)


def _is_mark(node: Any) -> bool:
    return isinstance(node, dict) and _SHARDS in node


def room_for(like: Any, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """An empty tensor of a global size that is laid out as another one."""
    if not is_dtensor(like):
        return torch.empty(size, dtype=dtype, device=like.device)
    from torch.distributed.tensor import empty  # noqa: PLC0415  its import takes long

    return empty(size, dtype=dtype, device_mesh=mesh_of(like), placements=placements_of(like))
