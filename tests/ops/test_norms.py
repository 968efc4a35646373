"""``segment_norms`` against its twin and an exact sum; the same bits however the elements are handed over."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ddpcore import ops
from ddpcore.ops import reference

# One row of lanes and one block of the kernels, each -1, 0 and +1; none; one; several blocks for every thread.
SIZES = [0, 1, 15, 16, 17, 1023, 1024, 1025, 4095, 4096, 4097, 100_003]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# A square of an fp32 value is exact in float64, so that only the order of the sum makes a difference.
SUM = {"rtol": 1e-12, "atol": 0.0}


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", SIZES)
def test_every_size(numel, dtype, offset, randn, assert_same_bits):
    tensor = randn(numel, dtype, offset)
    before = tensor._base.clone()
    norms = ops.segment_norms([tensor])
    assert norms.dtype == torch.float64 and norms.shape == (1,) and norms.device == tensor.device
    torch.testing.assert_close(norms.cpu(), reference.segment_norms([tensor.cpu()]), **SUM)
    exact = math.fsum(value * value for value in tensor.tolist())
    assert math.isclose(norms.item(), exact, rel_tol=1e-12)
    assert_same_bits(tensor._base, before, "the tensor, which is not to change")


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
        ([torch.zeros(3), torch.zeros(4, 4)[:, ::2]], "tensors must be dense"),
        ([torch.zeros(1).expand(3)], "tensors must be dense"),
    ],
)
def test_bad_arguments(tensors, message):
    with pytest.raises(RuntimeError, match=message):
        ops.segment_norms(tensors)


def test_an_empty_list_is_an_error():
    with pytest.raises(RuntimeError):  # torch's dispatcher refuses it: a list without tensors names no device
        ops.segment_norms([])
