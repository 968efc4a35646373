"""``average_`` against its reference (bitwise), for each form of rows, and what it refuses."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from ddpcore import ops
from ddpcore.ops import reference
from helpers.cases import each

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def averaged(rows: Tensor, size: int) -> Tensor:
    """The means of blocks of rows by the reference."""
    expected = rows.cpu().clone()
    reference.average_(list(expected), size)
    return expected


@each(dtype=DTYPES)
def test_stacks_columns_and_lists(dtype, randn, assert_same_bits):
    shapes = [(1, 1), (2, 2), (4, 2), (5, 5), (12, 3), (130, 65)]
    for (num_rows, size), numel in itertools.product(shapes, (0, 1, 17, 4096, 9001)):
        stack = randn(num_rows * numel, dtype).view(num_rows, numel)
        alone, mixed, expected = [row.clone() for row in stack], stack.clone(), averaged(stack, size)
        before = stack.double().sum(dim=1)
        torch.testing.assert_close(ops.average_([stack], size), before, rtol=0, atol=1e-5 * max(1, numel))
        assert_same_bits(stack, expected)
        ops.average_(alone, size)
        assert_same_bits(torch.stack(alone), expected)
        first, rest = mixed[0].clone(), mixed[1:]
        ops.average_([first, rest], size)
        assert_same_bits(torch.cat([first[None], rest]), expected)
        wide = randn(num_rows * (numel + 7), dtype).view(num_rows, numel + 7)
        outside, columns = wide[:, :3].clone(), averaged(wide[:, 3 : numel + 3], size)
        ops.average_([wide[:, 3 : numel + 3]], size)
        assert_same_bits(wide[:, 3 : numel + 3], columns)
        assert_same_bits(wide[:, :3], outside)


@each(dtype=[torch.float64, torch.complex64])
def test_other_dtypes_are_added_in_their_own(dtype):
    rows = torch.randn(6, 50, dtype=dtype)
    expected = torch.stack([row for block in rows.split(3) for row in [(block[0] + block[1] + block[2]) / 3] * 3])
    ops.average_([rows], 3)
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_sums_tell_rows_that_are_not_finite(dtype, device):
    for bad in (math.nan, math.inf, -math.inf):
        for place in (0, 16, 4111):
            rows = torch.ones(9, 4112, dtype=dtype, device=device)
            rows[5, place] = bad
            sums = ops.average_([rows], 9)
            assert (sums.dtype, sums.isfinite().tolist()) == (torch.float64, [row != 5 for row in range(9)])
            assert not rows[:, place].isfinite().any() and rows.isfinite().sum() == 9 * 4111


def test_more_rows_than_the_kernel_of_a_device_takes(randn, assert_same_bits):
    rows = randn(1030 * 20).view(1030, 20)
    expected = averaged(rows, 1030)
    ops.average_([rows], 1030)
    assert_same_bits(rows, expected)


def test_a_graph_notices_that_its_values_were_averaged():
    weight, (first, second) = torch.ones(4, requires_grad=True), torch.randn(2, 4).unbind()
    product = weight * first
    ops.average_([first, second], 2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_refusals(randn):
    stack = randn(24).view(4, 6)
    for rows, size, words in (
        ([stack], 3, "size must divide the number of rows, 4"),
        ([stack], 0, "size must divide the number of rows, 4"),
        ([stack.T], 2, "rows must be contiguous, of one length, dtype and device"),
        ([stack[0], stack[0, :5]], 2, "of one length"),
        ([stack[0], stack[1].half()], 2, "dtype"),
        ([stack.view(2, 2, 6)], 2, "rows must be contiguous"),
        ([stack[0, 0]], 1, "rows must be contiguous"),
    ):
        with pytest.raises(RuntimeError, match=words):
            ops.average_(rows, size)
    flat = randn(24)
    for dtype, reach in itertools.product((flat.dtype, torch.float64), (0, 1, 5)):
        values = flat.to(dtype)
        for rows in ([values[6:12], values[reach : reach + 6][:6]] * 2, [values.as_strided((4, 6), (reach, 1))]):
            with pytest.raises(RuntimeError, match="rows must not overlap in memory"):
                ops.average_(rows, 2)
        assert torch.equal(values, flat.to(dtype))
    ops.average_([flat[6:12], flat[:6], flat[12:18], flat[18:]], 2)
    ops.average_([flat[:0]] * 2, 2)


def test_opcheck(randn):
    for rows in ([randn(33), randn(33)], [randn(44).view(4, 11)]):
        torch.library.opcheck(torch.ops.ddpcore.average_.default, (rows, 2))
