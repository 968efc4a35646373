"""``mix_`` and ``mix_stacked_`` against their twins (bitwise) and the twins in float64 (within rounding)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ddpcore import ops
from ddpcore.ops import reference

# One row of lanes, one tile and one block of the kernels, each -1, 0 and +1; none; one; several blocks a thread.
SIZES = [0, 1, 15, 16, 17, 255, 256, 257, 1023, 1024, 1025, 4095, 4096, 4097, 100_003]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SUM = {"rtol": 1e-12, "atol": 1e-300}  # float64 sums of the same fp32 differences in another order


def shares(num_peers: int) -> tuple[float, list[float]]:
    """Unequal weights that are no binary fractions and sum to one."""
    parts = [1.0 + 0.1 * k for k in range(num_peers + 1)]
    return parts[0] / sum(parts), [part / sum(parts) for part in parts[1:]]


def sparse_matrix(num_learners: int, device: torch.device | str = "cpu") -> Tensor:
    """Rows that sum to one, with zeros off the diagonal from three learners on."""
    matrix = torch.rand(num_learners, num_learners) + 0.1
    matrix[torch.rand_like(matrix) < 0.4] = 0.0
    matrix.fill_diagonal_(0.7)
    return (matrix / matrix.sum(dim=1, keepdim=True)).to(device)


def within_rounding(actual: Tensor, exact: Tensor, differences: Tensor, error: Tensor) -> bool:
    """Sums of squared ``differences``, each of which may be off by ``error``; both are [elements, columns]."""
    bound = (2 * differences.abs() * error + error.square()).sum(dim=0) + 1e-12 * exact
    return bool(((actual.cpu() - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_peers", [0, 1, 2, 5, 40])
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


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", SIZES)
def test_every_size(numel, dtype, offset, randn, assert_same_bits):
    weights, peers = randn(numel, dtype, offset), [randn(numel, dtype, offset), randn(numel, dtype, 2)]
    base, expected = weights._base.clone(), weights.cpu().clone()
    distances = ops.mix_(weights, peers, 0.5, [0.3, 0.2])
    same = reference.mix_(expected, [peer.cpu() for peer in peers], 0.5, [0.3, 0.2])
    base[offset : offset + numel].copy_(expected)
    assert_same_bits(weights._base, base, "the buffer, what lies around the weights included")
    torch.testing.assert_close(distances.cpu(), same, **SUM)


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
@pytest.mark.parametrize("num_learners", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("numel", [1, 17, 1025, 5000])
def test_stacked(numel, num_learners, dtype, device, assert_same_bits, assert_near):
    weights = torch.randn(num_learners, numel).to(dtype).to(device)
    matrix = sparse_matrix(num_learners)
    wide = weights.cpu().double()
    expected, rows = weights.cpu().clone(), list(weights.clone())
    old = [row.clone() for row in rows]
    distances = ops.mix_stacked_(weights, matrix.to(device))
    same = reference.mix_stacked_(expected, matrix)
    assert_same_bits(weights, expected, "weights")
    torch.testing.assert_close(distances.cpu(), same, **SUM)

    for j, row in enumerate(rows):  # the same as each learner mixing by itself, its peers in ascending order
        peers = [k for k in range(num_learners) if k != j and matrix[j, k] != 0]
        ops.mix_(row, [old[k] for k in peers], float(matrix[j, j]), [float(matrix[j, k]) for k in peers])
        assert_same_bits(weights[j], row, f"row {j} against mix_")

    exact, magnitude = wide.clone(), wide.abs()
    exact_distances = reference.mix_stacked_(exact, matrix.double())
    reference.mix_stacked_(magnitude, matrix.double())
    assert_near(weights, exact, magnitude, num_roundings=2 * num_learners)
    error = (num_learners + 2) * torch.finfo(torch.float32).eps * wide.abs().amax(dim=0).unsqueeze(1)
    assert within_rounding(distances, exact_distances, (wide - wide.mean(dim=0)).t(), error)


@pytest.mark.parametrize("numel", [*SIZES, 1_000_001])
def test_stacked_every_size(numel, device, assert_same_bits):
    weights, matrix = torch.randn(3, numel), sparse_matrix(3)
    expected, weights = weights.clone(), weights.to(device)
    distances = ops.mix_stacked_(weights, matrix.to(device))
    same = reference.mix_stacked_(expected, matrix)
    assert_same_bits(weights, expected)
    torch.testing.assert_close(distances.cpu(), same, **SUM)


def test_stacked_misaligned_and_many(randn, device, assert_same_bits):
    """More learners than a full tile holds, from an odd address."""
    matrix = sparse_matrix(40)
    weights = randn(40 * 5001, torch.bfloat16, 1).view(40, 5001)
    expected = weights.cpu().clone()
    distances = ops.mix_stacked_(weights, matrix.to(device))
    torch.testing.assert_close(distances.cpu(), reference.mix_stacked_(expected, matrix), **SUM)
    assert_same_bits(weights, expected)


def test_any_number_of_threads(set_threads, assert_same_bits):
    start, peer, stack, matrix = torch.randn(300_001), torch.randn(300_001), torch.randn(5, 99_999), sparse_matrix(5)
    results = []
    for num_threads in (1, 2):
        set_threads(num_threads)
        weights, stacked = start.clone(), stack.clone()
        sums = [ops.mix_(weights, [peer], 0.5, [0.5]), ops.mix_stacked_(stacked, matrix)]
        results.append([weights, stacked, *sums])
    for one, two in zip(*results, strict=True):
        assert_same_bits(two, one)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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
    assert got.isinf().nonzero().flatten().tolist() == [17, 20]  # 4 * max is beyond every storage type
    assert distances.isnan().all()

    ops.mix_stacked_(got_stack, matrix.to(device))
    reference.mix_stacked_(stacked, matrix)
    assert_same_bits(got_stack, stacked)
    assert_same_bits(got_stack[2], peer, "a learner without neighbours takes no NaN from others")


def test_opcheck(randn, device):
    peers = [randn(33), randn(33)]
    noise = {"noise_std": 0.5, "noise_seed": 1, "noise_step": 2, "noise_first": 3}
    torch.library.opcheck(torch.ops.ddpcore.mix_.default, (randn(33), peers, 0.5, [0.25, 0.25]), noise)
    torch.library.opcheck(torch.ops.ddpcore.mix_.default, (randn(33), [], 0.5, []), {**noise, "noise_std": 0.0})
    matrix = sparse_matrix(3, device)
    torch.library.opcheck(torch.ops.ddpcore.mix_stacked_.default, (randn(33).view(3, 11), matrix))


def test_fake_and_compiled(device, assert_same_bits):
    def step(weights: Tensor, peer: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        to_peers = ops.mix_(weights, [peer + 1, peer], 0.5, [0.25, 0.25])
        return to_peers, ops.mix_stacked_(weights, matrix), weights * 2

    with FakeTensorMode():
        fake = [torch.empty(size, device=device, dtype=torch.bfloat16) for size in ((3, 7), (3, 7))]
        to_peers, to_mean, doubled = step(*fake, torch.empty(3, 3, device=device))
        assert (to_peers.shape, to_mean.shape, doubled.shape) == ((2,), (3,), (3, 7))
        assert (to_peers.dtype, to_mean.dtype, doubled.dtype) == (torch.float64, torch.float64, torch.bfloat16)
        assert to_peers.device == to_mean.device == doubled.device == fake[0].device

    eager, peer, matrix = torch.randn(3, 7).to(device), torch.randn(3, 7).to(device), sparse_matrix(3, device)
    compiled = eager.clone()
    expected = step(eager, peer, matrix)
    results = torch.compile(step, fullgraph=True, backend="aot_eager")(compiled, peer, matrix)
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


@pytest.mark.parametrize(
    ("weights", "matrix", "message"),
    [
        (torch.zeros(6), torch.eye(2), r"weights must be \[learners, parameters\]"),
        (torch.zeros(2, 3, 1), torch.eye(2), r"weights must be \[learners, parameters\]"),
        (torch.zeros(3, 2).t(), torch.eye(2), "weights must be contiguous"),
        (torch.zeros(2, 3), torch.eye(3), r"matrix must be \[learners, learners\]"),
        (torch.zeros(2, 3), torch.ones(4), r"matrix must be \[learners, learners\]"),
        (torch.zeros(2, 3), torch.ones(2, 3), r"matrix must be \[learners, learners\]"),
        (torch.zeros(2, 3), torch.ones(2, 2).double(), "matrix must be float32 on the device of weights"),
        (torch.zeros(2, 3).half(), torch.ones(2, 2).half(), "matrix must be float32 on the device of weights"),
        (torch.zeros(2, 3), torch.ones(2, 4)[:, ::2], "matrix must be contiguous"),
        (torch.zeros(2, 3).double(), torch.eye(2), "weights must be float32, bfloat16 or float16"),
    ],
)
def test_bad_stacks(weights, matrix, message):
    with pytest.raises(RuntimeError, match=message):
        ops.mix_stacked_(weights, matrix)


def test_a_stack_of_no_learners():
    assert ops.mix_stacked_(torch.zeros(0, 5), torch.zeros(0, 0)).shape == (0,)
