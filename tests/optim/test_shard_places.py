"""The numbers of the first elements of shards, of every rank in turn: one process plays all ranks."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddpcore.optim.shards import first_of_shard

ROWS, COLUMNS, ALL = Shard(0), Shard(1), Replicate()
STRIDED = _StridedShard(0, split_factor=2)  # of FSDP, where tensor parallelism shards the same dimension by 2
TWO = [
    (ROWS, ROWS), (ROWS, ALL), (ALL, ROWS), (ROWS, COLUMNS), (COLUMNS, ROWS), (STRIDED, ROWS), (STRIDED, ALL),
]  # fmt: skip
THREE = [(ALL, ROWS, ROWS), (ROWS, ALL, COLUMNS), (ROWS, ROWS, ROWS), (STRIDED, ROWS, COLUMNS), (ALL, STRIDED, ROWS)]
CASES = [
    *((shape, mesh, placed) for shape in ((16, 4), (10, 3), (7, 5), (1, 8)) for mesh in ((2, 2), (4, 2))
      for placed in TWO),
    *((shape, (2, 2, 2), placed) for shape in ((16, 4), (10, 3)) for placed in THREE),
]  # fmt: skip


def shards(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placed: tuple[Placement, ...]
) -> list[tuple[int, list[int]]]:
    """Of each rank: the number of the first element, and the places of its elements in the whole tensor."""
    found = []
    for rank in range(math.prod(mesh_shape)):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(mesh_shape))
        try:
            mesh = DeviceMesh("cpu", torch.arange(math.prod(mesh_shape)).view(mesh_shape))
            whole = torch.arange(math.prod(shape)).view(shape)
            tensor = distribute_tensor(whole, mesh, placed, src_data_rank=None)
            found.append((first_of_shard(tensor), tensor._local_tensor.flatten().tolist()))
        finally:
            dist.destroy_process_group()
    return found


@pytest.mark.parametrize(("shape", "mesh_shape", "placed"), CASES, ids=str)
def test_shards_do_not_overlap_and_replicas_are_alike(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placed: tuple[Placement, ...]
) -> None:
    found = [(first, places) for first, places in shards(shape, mesh_shape, placed) if places]
    firsts = {tuple(places): {first for first, others in found if others == places} for _, places in found}
    assert all(len(numbers) == 1 for numbers in firsts.values()), "replicas have one number"
    ranges = sorted((numbers.pop(), len(places)) for places, numbers in firsts.items())
    assert all(first % 4 == 0 for first, _ in ranges)
    assert all(first + size <= after for (first, size), (after, _) in itertools.pairwise(ranges))


@pytest.mark.parametrize(("mesh_shape", "placed"), [((4,), (ROWS,)), ((2, 2), (ROWS, ROWS)), ((2, 2), (ALL, ROWS))])
def test_equal_shards_along_the_first_dimension_have_the_places_of_the_whole_tensor(
    mesh_shape: tuple[int, ...], placed: tuple[Placement, ...]
) -> None:
    for first, places in shards((16, 4), mesh_shape, placed):
        assert places == list(range(first, first + len(places)))
    assert first_of_shard(torch.zeros(16, 4)) == 0
