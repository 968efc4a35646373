"""Matrices that ranks hold in shards: the shards travel to the rank that owns a matrix, and its results travel back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class ShardExchange:
    """Gathers each matrix on one rank. Each way takes one all-to-all for all matrices, of this dtype and device.

    The n ranks of the group hold the shards. ``shapes`` are those of the whole tensors, each of which is divided along
    its dimension of ``dims`` into n parts, as ``torch.chunk`` divides. ``owners`` are the ranks that get them.
    """

    def __init__(
        self, group: dist.ProcessGroup, shapes: Sequence[torch.Size], dims: Sequence[int], owners: Sequence[int]
    ) -> None:
        self._group, self._num, self._rank = group, dist.get_world_size(group), dist.get_rank(group)
        self._layouts, self._owners = list(zip(shapes, dims, strict=True)), list(owners)
        self._order = sorted(range(len(owners)), key=lambda index: owners[index])  # of what is sent: owner by owner
        self.owned = [index for index in self._order if owners[index] == self._rank]
        self._of_owned = [sum(math.prod(self._shape(index, rank)) for index in self.owned) for rank in range(self._num)]
        self._of_shards = [0] * self._num
        for index, owner in enumerate(owners):
            self._of_shards[owner] += math.prod(self._shape(index, self._rank))

    def _shape(self, index: int, rank: int) -> tuple[int, ...]:
        """The shape of a rank's shard."""
        shape, dim = self._layouts[index]
        chunk = -(-shape[dim] // self._num)
        return (*shape[:dim], max(0, min(chunk, shape[dim] - rank * chunk)), *shape[dim + 1 :])

    def gather(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """The whole tensors that this rank owns, in the order of ``owned``, from the shards of all. Collective."""
        sent = torch.cat([shards[index].reshape(-1) for index in self._order])
        received = sent.new_empty(sum(self._of_owned))
        dist.all_to_all_single(received, sent, self._of_owned, self._of_shards, group=self._group)
        parts: dict[int, list[Tensor]] = {index: [] for index in self.owned}
        for rank, row in enumerate(received.split(self._of_owned)):
            sizes = [math.prod(self._shape(index, rank)) for index in self.owned]
            for index, part in zip(self.owned, row.split(sizes), strict=True):
                parts[index].append(part.view(self._shape(index, rank)))
        return [torch.cat(parts[index], dim=self._layouts[index][1]) for index in self.owned]

    def scatter(self, wholes: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """This rank's shards of all tensors, from ``wholes`` in the order of ``owned``. Collective.

        ``like`` has the dtype and the device, because a rank may own none.
        """
        parts: list[list[Tensor]] = [[] for _ in range(self._num)]
        for index, whole in zip(self.owned, wholes, strict=True):
            dim = self._layouts[index][1]
            sizes = [self._shape(index, rank)[dim] for rank in range(self._num)]
            for rank, part in enumerate(whole.split(sizes, dim=dim)):
                parts[rank].append(part.reshape(-1))
        sent = torch.cat([like.new_empty(0), *(part for row in parts for part in row)])
        received = like.new_empty(sum(self._of_shards))
        dist.all_to_all_single(received, sent, self._of_shards, self._of_owned, group=self._group)
        sizes = [math.prod(self._shape(index, self._rank)) for index in self._order]
        found = dict(zip(self._order, received.split(sizes), strict=True))
        return [found[index].view(self._shape(index, self._rank)) for index in range(len(found))]
