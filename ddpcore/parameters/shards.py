"""Models whose parameters are DTensors: FSDP2, HSDP, torch's ``replicate`` and tensor parallelism."""

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a DTensor. The class itself is not imported, because that takes long."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Any) -> Tensor:
    """The part of a DTensor on this rank; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


# The device mesh of a DTensor, and its placements, one for each dimension of the mesh.
mesh_of, placements_of = attrgetter("device_mesh"), attrgetter("placements")


def is_laid_out(parameter: Tensor, gradient: Any) -> bool:
    """Whether a gradient has its parameter's layout. Under tensor parallelism it may be a partial sum on each rank."""
    return not is_dtensor(gradient) or gradient.placements == placements_of(parameter)


def laid_out(parameter: Tensor, gradient: Any) -> Tensor:
    """The part of a gradient on this rank, laid out as its parameter: collective over a learner if it was not."""
    if not is_laid_out(parameter, gradient):
        gradient = gradient.redistribute(placements=placements_of(parameter))
    part = local(gradient)
    wait = getattr(part, "wait", None)  # a collective that has not ended
    return part if wait is None else wait()


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The modules that FSDP2 shards, or whose replicas it averages."""
    return [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]


class Shards:
    """This rank's part of one learner, all of whose parameters are DTensors.

    FSDP2 owns the memory of its shards and gathers the weights of a layer from it. So :meth:`move` tells FSDP2 where a
    shard lies, together with the padding that FSDP2 sends. ``mesh`` has all ranks of the learner.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = fsdp_modules(model)
        self._owners = {id(owner.sharded_param): owner for module in self._modules for owner in fsdp_parameters(module)}
        self.mesh = max((mesh_of(one) for one in model.parameters()), key=lambda mesh: int(mesh.size()))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Shards":
        return self

    def room(self, parameter: Tensor) -> int:
        """The elements of a shard, with the padding of FSDP2."""
        owner = self._owners.get(id(parameter))
        return local(parameter).numel() if owner is None else owner.padded_sharded_param_size.numel()

    def move(self, parameter: Any, view: Tensor) -> None:
        """Let a parameter lie at a view, behind which there is memory for its padding."""
        row = view.as_strided((self.room(parameter),), (1,), view.storage_offset())
        row = torch.from_dlpack(row) if len(row) else row  # the same memory: torch copies no DTensor with an offset
        parameter._local_tensor = row.as_strided(view.shape, view.stride())
        if (owner := self._owners.get(id(parameter))) is not None:
            owner._sharded_param_data = row

    def gradient(self, parameter: Any, view: Tensor) -> Any:
        """The DTensor of a parameter's layout that lies at a view."""
        layout = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
        return type(parameter).from_local(view, mesh_of(parameter), placements_of(parameter), **layout)

    def reshard(self) -> None:
        """Free the gathered weights, so that the next forward pass gathers them anew."""
        for module in self._modules:
            module.reshard()

    def replicas(self, parameter: Tensor) -> int:
        """How many ranks of the learner hold the same shard of a parameter."""
        mesh, placements = mesh_of(parameter), enumerate(placements_of(parameter))
        num = math.prod(int(mesh.size(dim)) for dim, placement in placements if placement.is_replicate())
        return num * (int(self.mesh.size()) // int(mesh.size()))

    def has_unlike_rows(self, parameters: Sequence[Tensor]) -> bool:
        """Whether ranks that hold replicas of one parameter hold different shards of another."""
        kinds = {(mesh_of(one), *(dim.is_replicate() for dim in placements_of(one))) for one in parameters}
        return len(kinds) > 1 and any(self.replicas(one) > 1 for one in parameters)

    @property
    def place(self) -> tuple[int, int]:
        """The place of this rank among the ranks of the learner, and their number."""
        ranks = self.mesh.mesh.flatten().tolist()
        return ranks.index(dist.get_rank()), len(ranks)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups of ranks along each dimension of the mesh."""
        return [self.mesh.get_group(dim) for dim in range(self.mesh.ndim) if self.mesh.size(dim) > 1]

    def whole(self, squares_XS: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """Squared norms of whole parameters, from squared norms of each rank's shards. Collective over these ranks."""
        counts = [self.replicas(parameter) for parameter in parameters]
        return self.add_(squares_XS / torch.tensor(counts, device=squares_XS.device))

    def add_(self, sums: Tensor) -> Tensor:
        """Add sums over all ranks of the learner, in place. Collective over these ranks."""
        for group in self.groups:
            dist.all_reduce(sums, group=group)
        return sums

    def padded(self, parameter: Tensor) -> Tensor:
        """A copy of a shard as a row, with its padding."""
        part = local(parameter).detach()
        row = part.new_zeros(self.room(parameter))
        row[: part.numel()] = part.reshape(-1)
        return row

    def leave(self, parameter: Tensor) -> None:
        """Give a parameter memory of its own."""
        part = local(parameter)
        self.move(parameter, self.padded(parameter)[: part.numel()].view(part.shape))


def fsdp_parameters(module: Any) -> list[Any]:
    """What FSDP2 keeps of the parameters that a module gathers."""
    state = module._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [owner for group in groups if group is not None for owner in group.fsdp_params]
