"""``noise_sums`` against its reference implementation and exact sums; the same bits for every division of the work."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ddpcore import ops
from ddpcore.ops import reference
from helpers.cases import each

SIZES = [0, 1, 15, 16, 17, 4095, 4096, 4097, 30_003]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def bounds_of(numel: int) -> list[int]:
    """Segments of all kinds: empty, of one element, and of full and partial blocks."""
    return [*sorted({0, numel} | {min(numel, cut) for cut in (1, 20, 4116, 9000)}), numel]


# The compute capabilities of GPUs with fast float64: P100, V100, A100, H100, B200. All others may lose 2^-40 besides.
FAST_DOUBLES = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}


def assert_sums(sums: Tensor, rows: list[Tensor], bounds: list[int], origin: Tensor | None) -> None:
    """Compare within the rounding of float64 additions: each errs by at most 2^-53 of the sum of magnitudes so far."""
    slow = sums.is_cuda and torch.cuda.get_device_capability(sums.device) not in FAST_DOUBLES
    values = torch.stack(
        [row.cpu().float() if origin is None else row.cpu().float() - origin.cpu().float() for row in rows]
    )
    for segment, (begin, end) in zip(sums.cpu(), pairwise(bounds), strict=True):
        part = values[:, begin:end].double()
        error = 2.0**-53 * (end - begin + 1) * 2 + (2.0**-40 if slow else 0.0)
        bound = (part.abs() @ part.abs().T) * error
        assert ((segment - part @ part.T).abs() <= bound).all()
        assert torch.equal(segment, segment.T)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each(numel=SIZES, num_rows=[1, 2, 3, 4, 5, 9])
def test_every_size(numel, dtype, num_rows, randn, assert_same_bits):
    rows = [randn(numel, dtype, offset=k % 3) for k in range(num_rows)]
    origin, before = randn(numel, dtype, 1), [row.clone() for row in rows]
    for o in (None, origin):
        sums = ops.noise_sums(rows, bounds_of(numel), o)
        assert sums.dtype == torch.float64 and sums.device == rows[0].device
        assert_sums(sums, rows, bounds_of(numel), o)
        expected = reference.noise_sums([row.cpu() for row in rows], bounds_of(numel), None if o is None else o.cpu())
        assert_sums(expected, rows, bounds_of(numel), o)
    for row, old in zip(rows, before, strict=True):
        assert_same_bits(row, old, "a row, which is not to change")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_pair_has_the_bits_that_it_has_alone(dtype, randn, assert_same_bits):
    rows, bounds = [randn(9_001, dtype) for _ in range(7)], [0, 5, 4_200, 9_001]
    sums = ops.noise_sums(rows, bounds)
    for i in range(7):
        for j in range(i, 7):
            pair = ops.noise_sums([rows[i], rows[j]], bounds)
            assert_same_bits(pair[:, 0, 1], sums[:, i, j], f"rows {i} and {j}")
    for s, (begin, end) in enumerate(pairwise(bounds)):
        alone = ops.noise_sums([row[begin:end] for row in rows], [0, end - begin])
        assert_same_bits(alone[0], sums[s], f"segment {s}")


def test_squares_are_those_of_segment_norms(randn, device, assert_same_bits):
    rows = [randn(50_000) for _ in range(3)]
    diagonal = ops.noise_sums(rows, [0, 50_000])[0].diagonal()
    if device.type == "cpu":
        assert_same_bits(diagonal, ops.segment_norms(rows))
    torch.testing.assert_close(diagonal, ops.segment_norms(rows), rtol=1e-12, atol=0.0)


def test_any_number_of_threads(set_threads, assert_same_bits):
    rows, results = [torch.randn(300_001) for _ in range(5)], []
    for num_threads in (1, 2, 3):
        set_threads(num_threads)
        results.append(ops.noise_sums(rows, [0, 7, 100_000, 300_001], rows[0]))
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


def test_small_distances_between_long_rows(device):
    """With an origin, the distance of nearly equal rows is precise. A distance computed from norms is not."""
    origin = torch.full((5000,), 1000.0, device=device)
    rows = [origin.clone(), origin.clone()]
    rows[1] += torch.arange(5000, device=device) % 2 * 2.0**-13  # one unit in the last place
    sums = ops.noise_sums(rows, [0, 5000], origin)
    assert sums[0].tolist() == [[0.0, 0.0], [0.0, 2500 * 2.0**-26]]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_stay_in_their_row_and_segment(value, device):
    rows = [torch.ones(6000, device=device) for _ in range(6)]
    rows[4][5500] = value
    sums = ops.noise_sums(rows, [0, 5000, 6000])
    assert sums[0].isfinite().all()
    others = [0, 1, 2, 3, 5]
    assert sums[1][others][:, others].isfinite().all() and not sums[1, 4].isfinite().any()


def test_squares_leave_the_range_of_fp32(device):
    large, small = torch.full((40,), 1e30, device=device), torch.full((40,), 1e-30, device=device)
    sums = ops.noise_sums([large, small], [0, 40])[0]
    assert math.isclose(sums[0, 0].item(), 40 * large[0].item() ** 2, rel_tol=1e-12)
    assert math.isclose(sums[1, 1].item(), 40 * small[0].item() ** 2, rel_tol=1e-12)


def test_opcheck(randn):
    rows = [randn(33), randn(33)]
    for origin in (None, randn(33)):
        torch.library.opcheck(torch.ops.ddpcore.noise_sums.default, (rows, [0, 4, 33], origin))


def test_fake_and_compiled(device, assert_same_bits):
    def sums_of(left: Tensor, right: Tensor) -> Tensor:
        return ops.noise_sums([left * 2, right], [0, 3, 7], left).sum(0)

    with FakeTensorMode():
        fake = sums_of(torch.empty(7, device=device), torch.empty(7, device=device))
        assert fake.shape == (2, 2) and fake.dtype == torch.float64
    rows = torch.randn(7).to(device), torch.randn(7).to(device)
    assert_same_bits(torch.compile(sums_of, fullgraph=True, backend="aot_eager")(*rows), sums_of(*rows))


@pytest.mark.parametrize("sums_of", [ops.noise_sums, reference.noise_sums], ids=["kernel", "reference"])
def test_bad_arguments(sums_of):
    for rows, bounds in (
        ([torch.zeros(3), torch.zeros(4)], [0, 3]),
        ([torch.zeros(3, 1)], [0, 3]),
        ([torch.zeros(3)], []),
        ([torch.zeros(3)], [0, 2]),
        ([torch.zeros(3)], [1, 3]),
        ([torch.zeros(3)], [0, 4, 3]),
        ([], [0]),
    ):
        with pytest.raises(RuntimeError):
            sums_of(rows, bounds, None)


@pytest.mark.parametrize(
    "rows", [[torch.zeros(3).double()], [torch.zeros(3), torch.zeros(3).half()], [torch.zeros(6)[::2]]]
)
def test_rows_that_no_kernel_takes(rows):
    with pytest.raises(RuntimeError, match=r"float32, bfloat16 or float16|one length, dtype and device"):
        ops.noise_sums(rows, [0, 3])
