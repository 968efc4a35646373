"""Matrices that ranks hold in shards: the shards travel to the rank that owns a matrix, and its results travel back."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

ROUND = 2**22  # elements that travel to a rank together, so that the next ones travel while it computes

Arriving = Callable[[], list[Tensor]]  # waits, and returns what has arrived


class Layout(NamedTuple):
    """How the ranks of several groups hold a tensor, and which of them gets it."""

    shape: Sequence[int]  # of the whole tensor
    dims: Sequence[int]  # that the ranks of each group divide as torch.chunk does: the first group the whole, and so on
    owner: int  # ranks of all groups are numbered together, the last group's number fastest


class ShardExchange:
    """Gathers each tensor on one rank, and scatters what this rank makes of it. All have one dtype and device.

    Each way takes one all-to-all in each group. :attr:`owned` has the tensors that this rank gets.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], layouts: Sequence[Layout]) -> None:
        sizes = [dist.get_world_size(group) for group in groups]
        divided = [[layout.shape for layout in layouts]]  # before the first division, and after each
        for level, group in enumerate(groups):
            rank, shapes = dist.get_rank(group), zip(divided[-1], layouts, strict=True)
            divided.append([_part(shape, layout.dims[level], rank, sizes[level]) for shape, layout in shapes])
        self._hops: list[_Hop] = []
        self.owned = list(range(len(layouts)))
        for level in reversed(range(len(groups))):
            mine, inner = [layouts[index] for index in self.owned], math.prod(sizes[level + 1 :])
            dims, places = [one.dims[level] for one in mine], [one.owner // inner % sizes[level] for one in mine]
            self._hops.append(_Hop(groups[level], [divided[level][index] for index in self.owned], dims, places))
            self.owned = [self.owned[index] for index in self._hops[-1].owned]

    def gather(self, shards: Sequence[Tensor]) -> Arriving:
        """The whole tensors that this rank owns, in the order of ``owned``, from the shards of all. Collective."""
        arriving = self._hops[0].gather(shards)

        def wait() -> list[Tensor]:
            parts = arriving()
            for hop in self._hops[1:]:
                parts = hop.gather(parts)()
            return parts

        return wait

    def scatter(self, wholes: Sequence[Tensor], like: Tensor) -> Arriving:
        """This rank's shards of all tensors, from ``wholes`` in the order of ``owned``. Collective.

        ``like`` has the dtype and the device, because a rank may own none.
        """
        for hop in reversed(self._hops[1:]):
            wholes = hop.scatter(wholes, like)()
        return self._hops[0].scatter(wholes, like)


class _Hop:
    """The exchange between the ranks of one group. ``owners`` are ranks of the group."""

    def __init__(
        self, group: dist.ProcessGroup, shapes: Sequence[Sequence[int]], dims: Sequence[int], owners: Sequence[int]
    ) -> None:
        self._group, self._num, self._rank = group, dist.get_world_size(group), dist.get_rank(group)
        self._layouts = list(zip(shapes, dims, strict=True))
        self._order = sorted(range(len(owners)), key=lambda index: owners[index])  # of what is sent: owner by owner
        self.owned = [index for index in self._order if owners[index] == self._rank]
        self._of_owned = [sum(math.prod(self._shape(index, rank)) for index in self.owned) for rank in range(self._num)]
        self._of_shards = [0] * self._num
        for index, owner in enumerate(owners):
            self._of_shards[owner] += math.prod(self._shape(index, self._rank))

    def _shape(self, index: int, rank: int) -> tuple[int, ...]:
        return _part(*self._layouts[index], rank, self._num)

    def gather(self, shards: Sequence[Tensor]) -> Arriving:
        if not self._order:
            return list
        sent = torch.cat([shards[index].reshape(-1) for index in self._order])
        received = sent.new_empty(sum(self._of_owned))
        work = dist.all_to_all_single(received, sent, self._of_owned, self._of_shards, group=self._group, async_op=True)

        def wait() -> list[Tensor]:
            work.wait()
            parts: dict[int, list[Tensor]] = {index: [] for index in self.owned}
            for rank, row in enumerate(received.split(self._of_owned)):
                sizes = [math.prod(self._shape(index, rank)) for index in self.owned]
                for index, part in zip(self.owned, row.split(sizes), strict=True):
                    parts[index].append(part.view(self._shape(index, rank)))
            return [torch.cat(parts[index], dim=self._layouts[index][1]) for index in self.owned]

        return wait

    def scatter(self, wholes: Sequence[Tensor], like: Tensor) -> Arriving:
        if not self._order:
            return list
        parts: list[list[Tensor]] = [[] for _ in range(self._num)]
        for index, whole in zip(self.owned, wholes, strict=True):
            dim = self._layouts[index][1]
            sizes = [self._shape(index, rank)[dim] for rank in range(self._num)]
            for rank, part in enumerate(whole.split(sizes, dim=dim)):
                parts[rank].append(part.reshape(-1))
        sent = torch.cat([like.new_empty(0), *(part for row in parts for part in row)])
        received = like.new_empty(sum(self._of_shards))
        work = dist.all_to_all_single(received, sent, self._of_shards, self._of_owned, group=self._group, async_op=True)

        def wait() -> list[Tensor]:
            work.wait()
            sizes = [math.prod(self._shape(index, self._rank)) for index in self._order]
            found = dict(zip(self._order, received.split(sizes), strict=True))
            return [found[index].view(self._shape(index, self._rank)) for index in range(len(found))]

        return wait


def exchanged(
    groups: Sequence[dist.ProcessGroup],
    layouts: Sequence[Layout],
    shards: Sequence[Tensor],
    compute: Callable[[list[int], list[Tensor]], list[Tensor]],
    like: Tensor,
) -> Iterator[tuple[int, Tensor]]:
    """The number of each tensor, and this rank's shard of what its owner makes of it. Collective.

    ``compute`` gets the numbers of tensors and the whole tensors. While it computes, the shards of the next ones and
    the results of the last ones travel. ``like`` has the dtype and the device of the results.
    """
    rounds = [(part, ShardExchange(groups, [layouts[index] for index in part])) for part in rounds_of(layouts)]
    gathers = (exchange.gather([shards[index] for index in part]) for part, exchange in rounds)
    coming: Arriving | None = next(gathers)
    sent: list[int] = []
    back: Arriving = list  # the results of the tensors in ``sent``
    for part, exchange in rounds:
        arrived, coming = coming, next(gathers, None)
        assert arrived is not None
        following = exchange.scatter(compute([part[index] for index in exchange.owned], arrived()), like)
        yield from zip(sent, back(), strict=True)
        sent, back = part, following
    yield from zip(sent, back(), strict=True)


def rounds_of(layouts: Sequence[Layout]) -> list[list[int]]:
    """The tensors that travel together. A round brings a rank one tensor, or several of :data:`ROUND` elements in all.

    Equal shapes stand together, because Muon orthogonalizes them as a batch.
    """
    rounds: list[list[int]] = []
    last: dict[int, tuple[int, int]] = {}  # the last round of each rank, and its elements
    for index in sorted(range(len(layouts)), key=lambda i: (-math.prod(layouts[i].shape), tuple(layouts[i].shape))):
        size, owner = math.prod(layouts[index].shape), layouts[index].owner
        number, numel = last.get(owner, (0, 0))
        if numel and numel + size > ROUND:
            number, numel = number + 1, 0
        last[owner] = number, numel + size
        rounds.extend([] for _ in range(number + 1 - len(rounds)))
        rounds[number].append(index)
    return rounds


def _part(shape: Sequence[int], dim: int, rank: int, num: int) -> tuple[int, ...]:
    """The shape of a rank's part."""
    chunk = -(-shape[dim] // num)
    return (*shape[:dim], max(0, min(chunk, shape[dim] - rank * chunk)), *shape[dim + 1 :])
