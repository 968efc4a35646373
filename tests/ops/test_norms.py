"""``segment_norms`` and ``total_norm_`` against their references and exact sums; the same bits in every layout."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ddpcore import ops
from ddpcore.ops import reference
from helpers.cases import each

# One row of lanes and one block of the kernels, each -1, 0 and +1; none; one; several blocks for every thread.
SIZES = [0, 1, 15, 16, 17, 1023, 1024, 1025, 4095, 4096, 4097, 100_003]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# A square of an fp32 value is exact in float64, so only the order of the sum can change the result.
SUM = {"rtol": 1e-12, "atol": 0.0}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each(numel=SIZES, offset=[0, 1, 3])
def test_every_size(numel, dtype, offset, randn, assert_same_bits):
    tensor = randn(numel, dtype, offset)
    before = tensor._base.clone()
    norms = ops.segment_norms([tensor])
    assert norms.dtype == torch.float64 and norms.shape == (1,) and norms.device == tensor.device
    torch.testing.assert_close(norms.cpu(), reference.segment_norms([tensor.cpu()]), **SUM)
    exact = math.fsum(value * value for value in tensor.tolist())
    assert math.isclose(norms.item(), exact, rel_tol=1e-12)
    assert_same_bits(tensor._base, before, "the tensor, which is not to change")


def total_of(tensors: list[Tensor], spare: int = 0) -> Tensor:
    """The result of ``total_norm_`` in a buffer with other old values."""
    size = 1 + ops.num_blocks(tensors) + spare
    out = torch.full((size,), math.nan, dtype=torch.float64, device=tensors[0].device)
    ops.total_norm_(tensors, out)
    assert out[size - spare :].isnan().all(), "what lies behind the scratch"
    return out[:1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_total_of_every_size(dtype, randn, device, assert_same_bits):
    tensors = [randn(size, dtype, offset) for size in SIZES for offset in (0, 1, 3)]
    before = [tensor.clone() for tensor in tensors]
    total = total_of(tensors, spare=3)
    expected = torch.full((1,), math.nan, dtype=torch.float64)
    reference.total_norm_([tensor.cpu() for tensor in tensors], expected)
    torch.testing.assert_close(total.cpu(), expected, **SUM)
    exact = math.fsum(value * value for tensor in tensors for value in tensor.tolist())
    assert math.isclose(total.item(), exact, rel_tol=1e-12)
    for tensor, old in zip(tensors, before, strict=True):
        assert_same_bits(tensor, old, "a tensor, which is not to change")
        assert_same_bits(total_of([tensor]), ops.segment_norms([tensor]), "the total of one tensor")
    assert total_of([randn(0, dtype)]).item() == 0.0


def test_total_with_any_number_of_threads(set_threads, assert_same_bits):
    tensors = [torch.randn(size) for size in (0, 300_001, 1, 77_777, 4096)]
    results = []
    for num_threads in (1, 2):
        set_threads(num_threads)
        results.append(total_of(tensors))
    assert_same_bits(results[1], results[0])
    norms = torch.stack([tensor.double().norm() for tensor in tensors])
    assert math.isclose(results[0].sqrt().item(), norms.norm().item(), rel_tol=1e-12)


@each(value=[math.nan, math.inf, -math.inf])
def test_total_with_nan_and_infinity(value, device):
    for tensor, index in ((0, 0), (1, 4096), (1, 4097), (2, 16)):
        tensors = [torch.ones(size, device=device) for size in (5, 4098, 17)]
        tensors[tensor][index] = value
        total = total_of(tensors)
        assert total.isnan() if math.isnan(value) else total == math.inf


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_with_gaps_or_overlaps(dtype, device):
    """Tensors that are not dense are copied, with the right result."""
    square, one = torch.randn(6, 8).to(dtype).to(device), torch.full((1,), 2.0, dtype=dtype, device=device)
    tensors = [square[:, ::2], square[1:5, 2:7], one.expand(3), one.expand(4, 2), square.t()]
    dense = [tensor.contiguous() for tensor in tensors]
    before = square.clone()
    torch.testing.assert_close(ops.segment_norms(tensors), ops.segment_norms(dense), **SUM)
    torch.testing.assert_close(total_of(tensors), total_of(dense), **SUM)
    assert ops.segment_norms(tensors)[2:4].tolist() == [12.0, 32.0]
    assert torch.equal(square, before)


def test_large(randn):
    tensor = randn(3_000_001)
    norms = ops.segment_norms([tensor])
    torch.testing.assert_close(norms.cpu(), reference.segment_norms([tensor.cpu().double()]), **SUM)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_list_is_flat(dtype, device, assert_same_bits):
    """Empty tensors, mixed shapes, any dense order; alone, in a list and as views of a flat buffer."""
    shapes = [(0,), (5,), (17, 9), (3, 4, 5, 6), (0, 3), (), (70, 90), (1, 6000), (8192,), (0,)]
    tensors = [torch.randn(shape).to(dtype).to(device) for shape in shapes]
    tensors[3] = tensors[3].contiguous(memory_format=torch.channels_last)
    tensors[6] = tensors[6].t()
    memory = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors]
    flat = torch.cat(memory)
    views = list(flat.split([tensor.numel() for tensor in tensors]))
    norms = ops.segment_norms(tensors)
    torch.testing.assert_close(norms.cpu(), reference.segment_norms([tensor.cpu() for tensor in tensors]), **SUM)
    assert_same_bits(ops.segment_norms(views), norms, "views of a flat buffer")
    assert_same_bits(torch.cat([ops.segment_norms([tensor]) for tensor in tensors]), norms, "one by one")
    assert norms[[0, 4, 9]].tolist() == [0.0, 0.0, 0.0]


def test_any_number_of_threads(set_threads, assert_same_bits):
    tensors = [torch.randn(size) for size in (0, 300_001, 1, 77_777, 4096)]
    results = []
    for num_threads in (1, 2):
        set_threads(num_threads)
        results.append(ops.segment_norms(tensors))
    assert_same_bits(results[1], results[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_infinity_and_extremes(dtype, device):
    info = torch.finfo(dtype)
    tensors = [torch.ones(40, dtype=dtype, device=device) for _ in range(5)]
    tensors[0][3], tensors[1][17], tensors[2][20] = math.nan, -math.inf, info.max
    tensors[3].fill_(info.smallest_normal * info.eps)  # the smallest subnormal
    norms = ops.segment_norms(tensors)
    assert norms[0].isnan() and norms[1] == math.inf and norms[4] == 40.0
    assert norms[2] == float(info.max) ** 2 + 39.0
    assert math.isclose(norms[3].item(), 40.0 * (info.smallest_normal * info.eps) ** 2, rel_tol=1e-12)


def test_opcheck(randn):
    torch.library.opcheck(torch.ops.ddpcore.segment_norms.default, ([randn(33), randn(4).view(2, 2), randn(0)],))


def test_opcheck_of_a_total(randn, device):
    out = torch.zeros(9, dtype=torch.float64, device=device)
    torch.library.opcheck(torch.ops.ddpcore.total_norm_.default, ([randn(33), randn(4).view(2, 2), randn(0)], out))


def test_a_compiled_total(device, assert_same_bits):
    def total(left: Tensor, right: Tensor) -> Tensor:
        out = left.new_zeros(9, dtype=torch.float64)
        ops.total_norm_([left * 2, right], out)
        return out[0].sqrt()

    with FakeTensorMode():
        assert total(torch.empty(7, device=device), torch.empty(3, 5, device=device)).dtype == torch.float64
    tensors = torch.randn(7).to(device), torch.randn(3, 5).to(device)
    assert_same_bits(torch.compile(total, fullgraph=True, backend="aot_eager")(*tensors), total(*tensors))


def test_fake_and_compiled(device, assert_same_bits):
    def norms_of(left: Tensor, right: Tensor) -> Tensor:
        return ops.segment_norms([left * 2, right, left]).sqrt()

    with FakeTensorMode():
        fake = norms_of(*(torch.empty(size, device=device, dtype=torch.float16) for size in (7, 3)))
        assert fake.shape == (3,) and fake.dtype == torch.float64 and fake.device.type == device.type

    tensors = torch.randn(7).to(device), torch.randn(3, 5).to(device)
    compiled = torch.compile(norms_of, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(*tensors), norms_of(*tensors))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([torch.zeros(3).double()], "tensors must be float32, bfloat16 or float16"),
        ([torch.zeros(3).long()], "tensors must be float32, bfloat16 or float16"),
        ([torch.zeros(3), torch.zeros(3).half()], "one dtype and one device"),
    ],
)
def test_bad_arguments(tensors, message):
    with pytest.raises(RuntimeError, match=message):
        ops.segment_norms(tensors)
    with pytest.raises(RuntimeError, match=message):
        ops.total_norm_(tensors, torch.zeros(9, dtype=torch.float64))


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(2, dtype=torch.float64),  # one for the result, two for the blocks
        torch.zeros(9),
        torch.zeros(9, dtype=torch.int64),
        torch.zeros(18, dtype=torch.float64)[::2],
    ],
    ids=["short", "float32", "int64", "strided"],
)
def test_bad_scratch_of_a_total(out):
    message = "out must be float64 on the device of the tensors, at least 3 elements"
    with pytest.raises(RuntimeError, match=message):
        ops.total_norm_([torch.ones(4097)], out)
    assert not out.any()


def test_an_empty_list_is_an_error():
    with pytest.raises(RuntimeError):  # from the reference implementation, because an empty list has no device
        ops.segment_norms([])
    with pytest.raises(RuntimeError, match="a norm needs at least one tensor"):
        ops.total_norm_([], torch.zeros(9, dtype=torch.float64))
