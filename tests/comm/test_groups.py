"""Averages in groups of consecutive learners: those of four ranks, and of virtual learners."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddpcore.comm import VirtualCommunicator, reductions
from ddpcore.comm.virtual import ElasticVirtualCommunicator
from helpers import group_ranks as helper
from helpers import ranks
from helpers.each import each

CASES = [
    (name, size, dtype, way, place)
    for name, sizes in helper.SIZES.items()
    for size in sizes
    for dtype in helper.DTYPES
    for way in ("gathered", "reduced")
    for place in ("own", "allocated")
]


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    """Here the ranks of a group wait for no others, too: if they did, ranks would wait forever."""
    return ranks.run("group_ranks", helper.NUM_RANKS)


def is_partial(name: str, place: str) -> bool:
    """Whether only some columns were averaged."""
    return place == "allocated" or name == "grid"


@pytest.mark.parametrize("num_groups", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_virtual_learners(size: int, num_groups: int) -> None:
    """The mean of each block of rows, in their columns alone, and the bytes of an average of so many learners."""
    comm = VirtualCommunicator(size * num_groups)
    comm.form_groups(size)
    rows = helper.rows_of(comm.learners, torch.float64)
    expected = rows.clone()
    expected[:, helper.COLUMNS] = (
        rows.view(num_groups, size, -1).mean(dim=1).repeat_interleave(size, dim=0)[:, helper.COLUMNS]
    )
    comm.average_(rows[:, helper.COLUMNS], size=size).wait()
    torch.testing.assert_close(rows, expected, rtol=1e-14, atol=1e-14)
    assert torch.equal(rows[:, :3], expected[:, :3])
    assert comm.bytes_sent == 8 * 37 * (size - 1)


@each(("name", "size", "dtype", "way", "place"), CASES)
def test_ranks_have_the_bits_of_virtual_learners(
    name: str, size: int, dtype: torch.dtype, way: str, place: str, seen: list[dict[str, Any]]
) -> None:
    """An all-reduce of gloo adds in another order than virtual learners, which matters if three terms are added."""
    rows = torch.cat([one[name][size, dtype, way, place][0] for one in seen])
    comm = VirtualCommunicator(len(rows))
    expected = helper.rows_of(comm.learners, dtype)
    before = expected.clone()
    columns = expected[:, helper.COLUMNS] if is_partial(name, place) else expected
    comm.average_(columns, size=size).wait()
    assert not torch.equal(before, expected)
    is_narrow = dtype is torch.bfloat16 and name != "grid"  # added by ascending rank
    if way == "reduced" and size > 2 and name in ("pg", "mixed", "grid") and not is_narrow:
        eps = torch.finfo(torch.bfloat16 if dtype is torch.bfloat16 else torch.float32).eps
        torch.testing.assert_close(rows, expected, rtol=2 * eps, atol=2e-7)
        blocks = rows.view(-1, size, rows.shape[1])[:, :, helper.COLUMNS]
        assert torch.equal(blocks, blocks[:, :1].expand_as(blocks)), "learners of a group stay equal"
    else:
        assert torch.equal(rows, expected)


@each(("name", "size", "dtype", "way", "place"), CASES)
def test_bytes(name: str, size: int, dtype: torch.dtype, way: str, place: str, seen: list[dict[str, Any]]) -> None:
    """Those of an average of so many learners; none if the learners of a group are on one rank."""
    num = 37 if is_partial(name, place) else 50
    reduced = 2 * (size - 1) * num * (max(4, dtype.itemsize) if name == "grid" else dtype.itemsize) // size
    if name in ("shm", "link") or (name == "mixed" and size == 2):  # a group of the ranks of a host
        expected = 2 * (size - 1) * num * dtype.itemsize // size
    elif name == "grid" and size <= helper.NUM_ROWS:
        expected = 0
    else:
        expected = reduced if way == "reduced" else (size - 1) * num * dtype.itemsize
    assert [one[name][size, dtype, way, place][1] for one in seen] == [expected] * helper.NUM_RANKS


def test_a_process_group_may_be_a_part_of_the_world(seen: list[dict[str, Any]]) -> None:
    """Other ranks take no part, and ranks may be in any number of groups."""
    assert [one["part"] for one in seen] == [[1.0, 0.5], [2.0, 0.5], [2.0, 1.0, 2.5], [2.0, 2.5]]


@pytest.mark.parametrize("transport", ["pg", "shm"])
def test_a_group_skips_the_same_steps_of_a_gradient_scaler(transport: str, seen: list[dict[str, Any]]) -> None:
    """The learners of the second group leave out their second step and halve their scales; those of the first go on."""
    steps = [one["scaled"][transport] for one in seen]
    scales = [[scale for _, scale in one] for one in steps]
    assert scales == [[256.0] * 6] * 2 + [[256.0] + [128.0] * 5] * 2
    for step in range(6):
        first, second, third, fourth = (one[step][0] for one in steps)
        assert torch.equal(first, second)
        assert torch.equal(third, fourth)
        assert torch.equal(first, third) == (step % 3 == 2)
    assert [torch.equal(one[0][0], one[1][0]) for one in steps] == [False, False, True, True]


def test_a_part_of_the_learners_of_a_rank_is_no_group(seen: list[dict[str, Any]]) -> None:
    text = "local_sgd: group is 2 and a rank holds 3 learners: take a divisor or a multiple of 3"
    assert [one["refused"] for one in seen] == [text] * helper.NUM_RANKS


def test_learners_that_may_die_have_no_groups() -> None:
    with pytest.raises(ValueError, match=r"virtual learners .* cannot average in groups of 2: leave group out"):
        ElasticVirtualCommunicator(4).form_groups(2)


def test_virtual_learners_send_what_a_reduction_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "GATHER_BYTES", 0)
    comm = VirtualCommunicator(6)
    comm.average_(torch.zeros(6, 30), size=3).wait()
    assert comm.bytes_sent == 2 * 2 * 120 // 3
