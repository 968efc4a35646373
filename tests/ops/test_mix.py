"""``mix_`` and ``mix_stacked_`` against their references in fp32 (bitwise) and in float64 (within rounding)."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ddpcore import ops
from ddpcore.ops import reference
from ddpcore.ops.mix import noise_arguments
from helpers.cases import each

# One row of lanes, one tile and one block of the kernels, each -1, 0 and +1; none; one; several blocks a thread.
SIZES = [0, 1, 15, 16, 17, 255, 256, 257, 1023, 1024, 1025, 4095, 4096, 4097, 100_003]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SUM = {"rtol": 1e-12, "atol": 1e-300}  # float64 sums of the same fp32 differences in another order


def shares(num_peers: int) -> tuple[float, list[float]]:
    """Unequal weights that sum to one and are not exact in binary."""
    parts = [1.0 + 0.1 * k for k in range(num_peers + 1)]
    return parts[0] / sum(parts), [part / sum(parts) for part in parts[1:]]


def sparse_matrix(num_learners: int, device: torch.device | str = "cpu") -> Tensor:
    """Rows that sum to one, with zeros off the diagonal for three or more learners."""
    matrix = torch.rand(num_learners, num_learners) + 0.1
    matrix[torch.rand_like(matrix) < 0.4] = 0.0
    matrix.fill_diagonal_(0.7)
    return (matrix / matrix.sum(dim=1, keepdim=True)).to(device)


def compressed(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets, columns and values of the entries of a matrix: the diagonal, then the nonzeros ascending."""
    rows = [[j, *(k for k in range(len(row)) if k != j and row[k] != 0)] for j, row in enumerate(matrix.tolist())]
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    columns = torch.tensor([k for row in rows for k in row], dtype=torch.int64)
    of_rows = torch.repeat_interleave(torch.arange(len(rows)), offsets.diff())
    return tuple(part.to(matrix.device) for part in (offsets, columns, matrix.cpu()[of_rows, columns]))


def within_rounding(actual: Tensor, exact: Tensor, differences: Tensor, error: Tensor) -> bool:
    """Whether sums of squared ``differences`` with an ``error`` each are correct; both are [elements, columns]."""
    bound = (2 * differences.abs() * error + error.square()).sum(dim=0) + 1e-12 * exact
    return bool(((actual.cpu() - exact).abs() <= bound).all())


@each(num_peers=[0, 1, 2, 5, 40], dtype=DTYPES)
def test_every_number_of_peers(num_peers, dtype, randn, assert_same_bits, assert_near):
    weights, peers = randn(5000, dtype), [randn(5000, dtype) for _ in range(num_peers)]
    own, others = shares(num_peers)
    wide = [tensor.cpu().double() for tensor in (weights, *peers)]
    expected, copies = weights.cpu().clone(), [peer.cpu().clone() for peer in peers]
    distances = ops.mix_(weights, peers, own, others)
    same = reference.mix_(expected, copies, own, others)
    assert distances.dtype == torch.float64 and distances.shape == (num_peers,) and distances.device == weights.device
    assert_same_bits(weights, expected, "weights")
    torch.testing.assert_close(distances.cpu(), same, **SUM)
    for peer, copy in zip(peers, copies, strict=True):
        assert_same_bits(peer, copy, "a peer, which is not to change")

    exact, magnitude = wide[0].clone(), wide[0].abs()
    exact_distances = reference.mix_(exact, wide[1:], own, others)
    reference.mix_(magnitude, [peer.abs() for peer in wide[1:]], own, others)
    assert_near(weights, exact, magnitude, num_roundings=2 * num_peers + 2)
    if num_peers:
        differences = torch.stack([wide[0] - peer for peer in wide[1:]], dim=1)
        error = torch.finfo(torch.float32).eps * differences.abs()
        assert within_rounding(distances, exact_distances, differences, error)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each(numel=SIZES, offset=[0, 1, 3])
def test_every_size(numel, dtype, offset, randn, assert_same_bits):
    weights, peers = randn(numel, dtype, offset), [randn(numel, dtype, offset), randn(numel, dtype, 2)]
    base, expected = weights._base.clone(), weights.cpu().clone()
    distances = ops.mix_(weights, peers, 0.5, [0.3, 0.2])
    same = reference.mix_(expected, [peer.cpu() for peer in peers], 0.5, [0.3, 0.2])
    base[offset : offset + numel].copy_(expected)
    assert_same_bits(weights._base, base, "the buffer, what lies around the weights included")
    torch.testing.assert_close(distances.cpu(), same, **SUM)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each(num_peers=[0, 1, 2, 9], noise=[None, ops.Noise(0.5, seed=1, step=2, first=3)])
def test_the_result_may_go_elsewhere(dtype, num_peers, noise, randn, assert_same_bits):
    weights, peers = randn(5001, dtype), [randn(5001, dtype, 1) for _ in range(num_peers)]
    in_place, expected, before = weights.clone(), torch.zeros(5001, dtype=dtype), weights.clone()
    own, others = shares(num_peers)
    out = randn(5001, dtype, 3)
    distances = ops.mix_(weights, peers, own, others, noise, out=out)
    assert_same_bits(distances, ops.mix_(in_place, peers, own, others, noise))
    assert_same_bits(out, in_place)
    assert_same_bits(weights, before, "weights that gave their place away")
    on_cpu = [peer.cpu() for peer in peers]
    reference.mix_(before.cpu(), on_cpu, own, others, out=expected, **noise_arguments(noise))
    assert_same_bits(out.cpu(), expected)
    ops.mix_(weights, peers, own, others, noise, out=weights)
    assert_same_bits(weights, in_place, "out may be the weights")


def test_large(randn, assert_same_bits):
    weights, peer = randn(3_000_001), randn(3_000_001)
    expected = weights.cpu().clone()
    distances = ops.mix_(weights, [peer], 0.75, [0.25])
    same = reference.mix_(expected, [peer.cpu()], 0.75, [0.25])
    assert_same_bits(weights, expected)
    torch.testing.assert_close(distances.cpu(), same, **SUM)


def test_weights_of_any_shape(device, assert_same_bits):
    weights, peer = torch.randn(7, 5, 3, device=device), torch.randn(7, 5, 3, device=device)
    flat = weights.flatten().clone()
    distances = ops.mix_(weights, [peer], 0.6, [0.4])
    assert_same_bits(ops.mix_(flat, [peer.flatten()], 0.6, [0.4]), distances)
    assert_same_bits(weights.flatten(), flat)


def test_one_peer_twice(device, assert_same_bits):
    weights, peer = torch.randn(100, device=device), torch.randn(100, device=device)
    expected = weights.cpu().clone()
    ops.mix_(weights, [peer, peer], 0.5, [0.2, 0.3])
    reference.mix_(expected, [peer.cpu()] * 2, 0.5, [0.2, 0.3])
    assert_same_bits(weights, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each(numel=[1, 17, 1025, 5000], num_learners=[1, 2, 3, 5, 16])
def test_stacked(numel, num_learners, dtype, device, assert_same_bits, assert_near):
    weights = torch.randn(num_learners, numel).to(dtype).to(device)
    matrix = sparse_matrix(num_learners)
    wide = weights.cpu().double()
    expected, rows, alone = weights.cpu().clone(), list(weights.clone()), weights.clone()
    old = [row.clone() for row in rows]
    distances = ops.mix_stacked_(weights, [], *compressed(matrix.to(device)))
    same = reference.mix_stacked_(expected, [], *compressed(matrix))
    assert_same_bits(weights, expected, "weights")
    torch.testing.assert_close(distances.cpu(), same, **SUM)
    assert ops.mix_stacked_(alone, [], *compressed(matrix.to(device)), distances=False).shape == (0,)
    assert_same_bits(alone, weights, "weights without distances")

    for j, row in enumerate(rows):  # the same as each learner mixing by itself, its peers in ascending order
        peers = [k for k in range(num_learners) if k != j and matrix[j, k] != 0]
        ops.mix_(row, [old[k] for k in peers], float(matrix[j, j]), [float(matrix[j, k]) for k in peers])
        assert_same_bits(weights[j], row, f"row {j} against mix_")

    exact, magnitude = wide.clone(), wide.abs()
    exact_distances = reference.mix_stacked_(exact, [], *compressed(matrix.double()))
    reference.mix_stacked_(magnitude, [], *compressed(matrix.double()))
    assert_near(weights, exact, magnitude, num_roundings=2 * num_learners)
    error = (num_learners + 2) * torch.finfo(torch.float32).eps * wide.abs().amax(dim=0).unsqueeze(1)
    assert within_rounding(distances, exact_distances, (wide - wide.mean(dim=0)).t(), error)


@each(numel=[*SIZES, 1_000_001])
def test_stacked_every_size(numel, device, assert_same_bits):
    weights, matrix = torch.randn(3, numel), sparse_matrix(3)
    expected, weights = weights.clone(), weights.to(device)
    distances = ops.mix_stacked_(weights, [], *compressed(matrix.to(device)))
    same = reference.mix_stacked_(expected, [], *compressed(matrix))
    assert_same_bits(weights, expected)
    torch.testing.assert_close(distances.cpu(), same, **SUM)


@each(offset=[0, 1], num_others=[1, 9], dtype=DTYPES)
def test_stacked_with_rows_held_elsewhere(offset, num_others, dtype, randn, assert_same_bits):
    """Half of a stack, with the other half in separate tensors, gets the bits of that half of the whole stack."""
    held, numel = 3, 4099
    whole = randn((held + num_others) * numel, dtype).view(held + num_others, numel)
    part = randn(held * numel, dtype, offset).view(held, numel)
    part.copy_(whole[:held])
    others = [randn(numel, dtype, offset + k).copy_(whole[held + k]) for k in range(num_others)]
    kept, before, mean = [other.clone() for other in others], whole.clone(), whole[:held].float().mean(dim=0)
    matrix = sparse_matrix(held + num_others, whole.device)
    distances = ops.mix_stacked_(part, others, *compressed(matrix[:held]))
    ops.mix_stacked_(whole, [], *compressed(matrix))
    assert_same_bits(part, whole[:held])
    for other, copy in zip(others, kept, strict=True):
        assert_same_bits(other, copy, "a row of others, which is not to change")
    to_mean = (before[:held].float() - mean).double().square().sum(dim=1)
    torch.testing.assert_close(distances, to_mean, rtol=1e-5, atol=0.0)  # the mean in another order


def test_entries_are_added_in_the_order_in_which_they_stand(device):
    """In fp32, 2^25 + 1 - 2^25 is 0 and 2^25 - 2^25 + 1 is 1. A row without entries becomes 0."""
    weights = torch.tensor([[2.0**25], [1.0], [-(2.0**25)]], device=device)
    columns = torch.tensor([0, 1, 2, 0, 2, 1], device=device)
    ops.mix_stacked_(weights, [], torch.tensor([0, 3, 6, 6], device=device), columns, torch.ones(6, device=device))
    assert weights.flatten().tolist() == [0.0, 1.0, 0.0]


def test_a_stack_of_thousands(assert_same_bits):
    """4096 learners in a sparse matrix: each averages itself and three others with weight 1/4."""
    num_learners = 4096
    weights = torch.randn(num_learners, 65)
    hops = torch.tensor([0, 1, 64, 1000])
    columns = (torch.arange(num_learners)[:, None] + hops).remainder(num_learners)
    old, alone, expected = weights.clone(), weights.clone(), 0.25 * weights
    for hop in hops[1:].tolist():
        expected = expected + 0.25 * old.roll(-hop, 0)
    values = torch.full((4 * num_learners,), 0.25)
    rows = torch.arange(num_learners + 1) * 4, columns.flatten(), values
    distances = ops.mix_stacked_(weights, [], *rows)
    assert_same_bits(weights, expected)
    ops.mix_stacked_(alone, [], *rows, distances=False)
    assert_same_bits(alone, expected)
    exact = (old.double() - old.double().mean(dim=0)).square().sum(dim=1)
    torch.testing.assert_close(distances, exact, rtol=1e-5, atol=0.0)  # the mean is formed in fp32


def test_stacked_misaligned_and_many(randn, device, assert_same_bits):
    """More learners than one tile has rows, at an odd address."""
    matrix = sparse_matrix(40)
    weights = randn(40 * 5001, torch.bfloat16, 1).view(40, 5001)
    expected = weights.cpu().clone()
    distances = ops.mix_stacked_(weights, [], *compressed(matrix.to(device)))
    torch.testing.assert_close(distances.cpu(), reference.mix_stacked_(expected, [], *compressed(matrix)), **SUM)
    assert_same_bits(weights, expected)


def test_any_number_of_threads(set_threads, assert_same_bits):
    start, peer, stack, matrix = torch.randn(300_001), torch.randn(300_001), torch.randn(5, 99_999), sparse_matrix(5)
    results = []
    for num_threads in (1, 2):
        set_threads(num_threads)
        weights, stacked = start.clone(), stack.clone()
        sums = [ops.mix_(weights, [peer], 0.5, [0.5]), ops.mix_stacked_(stacked, [], *compressed(matrix))]
        results.append([weights, stacked, *sums])
    for one, two in zip(*results, strict=True):
        assert_same_bits(two, one)


@each(dtype=DTYPES)
def test_nan_and_infinity(dtype, device, assert_same_bits):
    weights, peer = torch.ones(40, dtype=dtype), torch.ones(40, dtype=dtype)
    weights[3], peer[17], peer[20] = math.nan, math.inf, torch.finfo(dtype).max
    stack, matrix = torch.stack([weights, peer, peer]), torch.eye(3)
    matrix[0, 1] = 4.0
    expected, stacked = weights.clone(), stack.clone()
    got, got_stack = weights.to(device), stack.to(device)
    distances = ops.mix_(got, [peer.to(device)], 1.0, [4.0])
    reference.mix_(expected, [peer], 1.0, [4.0])
    assert_same_bits(got, expected)
    assert got.isnan().nonzero().flatten().tolist() == [3]
    assert got.isinf().nonzero().flatten().tolist() == [17, 20]  # 4 * max overflows in every dtype
    assert distances.isnan().all()

    ops.mix_stacked_(got_stack, [], *compressed(matrix.to(device)))
    reference.mix_stacked_(stacked, [], *compressed(matrix))
    assert_same_bits(got_stack, stacked)
    assert_same_bits(got_stack[2], peer, "a learner without neighbours takes no NaN from others")


def test_opcheck(randn, device):
    peers = [randn(33), randn(33)]
    noise = {"noise_std": 0.5, "noise_seed": 1, "noise_step": 2, "noise_first": 3}
    torch.library.opcheck(torch.ops.ddpcore.mix_.default, (randn(33), peers, 0.5, [0.25, 0.25]), noise)
    torch.library.opcheck(torch.ops.ddpcore.mix_.default, (randn(33), [], 0.5, []), {**noise, "noise_std": 0.0})
    elsewhere = {**noise, "out": randn(33)}
    torch.library.opcheck(torch.ops.ddpcore.mix_.default, (randn(33), peers, 0.5, [0.25, 0.25]), elsewhere)
    rows = compressed(sparse_matrix(3, device)[:2])
    for wanted in ({}, {"distances": False}):
        stack = randn(22).view(2, 11)
        torch.library.opcheck(torch.ops.ddpcore.mix_stacked_.default, (stack, [randn(11)], *rows), wanted)


def test_fake_and_compiled(device, assert_same_bits):
    def step(weights: Tensor, peer: Tensor, *rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        to_peers = ops.mix_(weights, [peer + 1, peer], 0.5, [0.25, 0.25])
        return to_peers, ops.mix_stacked_(weights, [peer[0] + 1], *rows), weights * 2

    with FakeTensorMode():
        fake = [torch.empty(size, device=device, dtype=torch.bfloat16) for size in ((3, 7), (3, 7))]
        entries = [torch.empty(size, device=device, dtype=torch.int64) for size in (4, 9)]
        to_peers, to_mean, doubled = step(*fake, *entries, torch.empty(9, device=device))
        assert (to_peers.shape, to_mean.shape, doubled.shape) == ((2,), (3,), (3, 7))
        assert (to_peers.dtype, to_mean.dtype, doubled.dtype) == (torch.float64, torch.float64, torch.bfloat16)
        assert to_peers.device == to_mean.device == doubled.device == fake[0].device

    eager, peer = torch.randn(3, 7).to(device), torch.randn(3, 7).to(device)
    rows = compressed(sparse_matrix(4, device)[:3])
    compiled = eager.clone()
    expected = step(eager, peer, *rows)
    results = torch.compile(step, fullgraph=True, backend="aot_eager")(compiled, peer, *rows)
    for result, want in zip(results, expected, strict=True):
        assert_same_bits(result, want)
    assert_same_bits(compiled, eager, "the mutated weights")


def bad_mixes() -> dict[str, tuple[Tensor, list[Tensor], list[float], str]]:
    weights, square = torch.zeros(16), torch.zeros(4, 4)
    return {
        "fewer weights": (weights, [torch.zeros(16)], [], "peers and peer_weights must have the same length"),
        "float64": (weights.double(), [], [], "weights must be float32, bfloat16 or float16"),
        "int": (weights.int(), [], [], "weights must be float32, bfloat16 or float16"),
        "holes": (weights[::2], [], [], "weights must be contiguous"),
        "transposed": (torch.zeros(4, 3).t(), [], [], "weights must be contiguous"),
        "peer numel": (weights, [torch.zeros(15)], [0.5], "a peer must have the shape of weights"),
        "peer shape": (weights, [square], [0.5], "a peer must have the shape of weights"),
        "peer strides": (square, [torch.zeros(4, 4).t()], [0.5], "a peer must have the strides of weights, both dense"),
        "peer dtype": (weights, [weights.half()], [0.5], "a peer must have the device and dtype of weights"),
        "peer is weights": (weights, [torch.zeros(16), weights.view(16)], [0.5, 0.5], "a peer must not be the weights"),
    }


@pytest.mark.parametrize("case", bad_mixes())
def test_bad_arguments(case):
    weights, peers, peer_weights, message = bad_mixes()[case]
    with pytest.raises(RuntimeError, match=message):
        ops.mix_(weights, peers, 0.5, peer_weights)


def test_bad_out():
    weights, peer = torch.ones(16), torch.ones(16)
    for out, message in [
        (torch.zeros(15), "out must have the shape of weights"),
        (torch.zeros(16).half(), "out must have the device and dtype of weights"),
        (torch.zeros(32)[::2], "out must have the strides of weights, both dense"),
        (peer, "out must not be a peer"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            ops.mix_(weights, [peer], 0.25, [0.25], out=out)
    assert torch.equal(weights, torch.ones(16)) and torch.equal(peer, torch.ones(16))


def bad_stacks() -> dict[str, tuple[dict[str, Any], str]]:
    weights, row, both = torch.zeros(2, 3), torch.zeros(3), torch.zeros(8)
    other = "a row of others must be contiguous [parameters], with the dtype and device of weights"
    held = "a row of others must not lie in weights"
    return {
        "flat": ({"weights": torch.zeros(6)}, "weights must be [learners, parameters]"),
        "cube": ({"weights": torch.zeros(2, 3, 1)}, "weights must be [learners, parameters]"),
        "transposed": ({"weights": torch.zeros(3, 2).t()}, "weights must be contiguous"),
        "float64": ({"weights": weights.double()}, "weights must be float32, bfloat16 or float16"),
        "other numel": ({"others": [row, torch.zeros(4)]}, other),
        "other shape": ({"others": [torch.zeros(1, 3)]}, other),
        "other dtype": ({"others": [row.half()]}, other),
        "other strides": ({"others": [torch.zeros(6)[::2]]}, other),
        "other is held": ({"weights": weights, "others": [weights[1]]}, held),
        "other runs into them": ({"weights": both[2:].view(2, 3), "others": [both[:3]]}, held),
        "offsets numel": ({"offsets": torch.arange(4)}, "offsets must be int64 [learners + 1]"),
        "offsets dtype": ({"offsets": torch.arange(3).int()}, "offsets must be int64 [learners + 1]"),
        "columns dtype": ({"columns": torch.arange(2).int()}, "columns must be int64 [entries]"),
        "columns shape": ({"columns": torch.zeros(1, 2, dtype=torch.int64)}, "columns must be int64 [entries]"),
        "values numel": ({"values": torch.ones(3)}, "values must be float32 [entries]"),
        "values dtype": ({"values": torch.ones(2).double()}, "values must be float32 [entries]"),
        "values strides": ({"values": torch.ones(4)[::2]}, "values must be float32 [entries], contiguous"),
        "first offset": ({"offsets": torch.tensor([1, 1, 2])}, "offsets must ascend from 0 to the number of entries"),
        "last offset": ({"offsets": torch.tensor([0, 1, 3])}, "offsets must ascend from 0 to the number of entries"),
        "descending": ({"offsets": torch.tensor([0, 3, 2])}, "offsets must ascend from 0 to the number of entries"),
        "no row": ({"columns": torch.tensor([0, 2])}, "column 2 names no row: there are 2"),
        "no other": ({"others": [row], "columns": torch.tensor([3, 0])}, "column 3 names no row: there are 3"),
        "negative": ({"columns": torch.tensor([-1, 0])}, "column -1 names no row"),
    }


@pytest.mark.parametrize("case", bad_stacks())
def test_bad_stacks(case):
    changes, message = bad_stacks()[case]
    good = {"others": [], "offsets": torch.arange(3), "columns": torch.arange(2), "values": torch.ones(2)}
    given = {"weights": torch.ones(2, 3)} | good | changes
    before = given["weights"].clone()
    with pytest.raises(RuntimeError, match=re.escape(message)):
        ops.mix_stacked_(*given.values())
    assert torch.equal(given["weights"], before)


def test_a_stack_of_no_learners():
    none = torch.zeros(0, dtype=torch.int64)
    assert ops.mix_stacked_(torch.zeros(0, 5), [], torch.zeros(1, dtype=torch.int64), none, none.float()).shape == (0,)
