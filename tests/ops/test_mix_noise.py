"""Noise of ``mix_``: against the reference, and the same for any part of a buffer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ddpcore import ops
from ddpcore.ops import Noise, reference
from ddpcore.ops.mix import noise_arguments
from ddpcore.ops.random import normals
from helpers.cases import each

SIZES = [0, 1, 63, 64, 65, 4095, 4096, 4097, 100_003]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NOISE = Noise(std=0.3, seed=2**62 + 12345, step=2**40 + 7, first=2**35 + 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each(numel=SIZES, num_peers=[0, 1, 2, 9])
def test_every_size(numel, dtype, num_peers, randn, assert_same_bits):
    weights, peers = randn(numel, dtype, offset=1), [randn(numel, dtype) for _ in range(num_peers)]
    share = 1 / (num_peers + 1)
    expected, silent = weights.cpu().clone(), weights.clone()
    distances = ops.mix_(weights, peers, share, [share] * num_peers, NOISE)
    reference.mix_(expected, [p.cpu() for p in peers], share, [share] * num_peers, **noise_arguments(NOISE))
    assert_same_bits(weights, expected)
    assert_same_bits(distances, ops.mix_(silent, peers, share, [share] * num_peers), "distances: before the noise")


def test_noise_alone_is_std_times_normals(randn, assert_same_bits):
    weights = randn(5001)
    expected = weights.cpu() + 0.3 * normals(5001, NOISE.seed, NOISE.step, NOISE.first)
    ops.mix_(weights, [], 1.0, [], NOISE)
    assert_same_bits(weights, expected)


def test_weights_of_any_shape(device, assert_same_bits):
    weights = torch.randn(7, 5, 3, device=device)
    flat = weights.flatten().clone()
    ops.mix_(weights, [], 1.0, [], NOISE)
    ops.mix_(flat, [], 1.0, [], NOISE)
    assert_same_bits(weights.flatten(), flat)


@each(cuts=[[1], [2], [3], [5, 4096, 4099], [64, 65, 8191, 20_000], list(range(1, 20_001, 997))], num_peers=[0, 1, 3])
def test_any_cut_has_the_same_bits(cuts, num_peers, randn, assert_same_bits):
    numel = 20_001
    whole, peers = randn(numel), [randn(numel) for _ in range(num_peers)]
    parts, share = whole.clone(), [0.25] * num_peers
    mixture = ops.Mixture(peers, 0.25, share, NOISE)
    ops.mix_(whole, peers, 0.25, share, NOISE)
    for begin, end in zip([0, *cuts], [*cuts, numel], strict=True):
        part = mixture.columns(begin, end)
        ops.mix_(parts[begin:end], part.peers, part.self_weight, part.peer_weights, part.noise)
    assert_same_bits(parts, whole)


def test_any_number_of_threads(set_threads, assert_same_bits):
    start, peer, results = torch.randn(300_001), torch.randn(300_001), []
    for num_threads in (1, 2, 3):
        set_threads(num_threads)
        weights = start.clone()
        ops.mix_(weights, [peer], 0.5, [0.5], NOISE)
        results.append(weights)
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each(num_peers=[0, 1, 2], std=[0.0, 1e-50])
def test_no_deviation_is_no_noise(dtype, num_peers, std, randn, assert_same_bits):
    """Also the sign of zeros; 1e-50 is 0 in fp32."""
    weights, peers = randn(5000, dtype), [randn(5000, dtype) for _ in range(num_peers)]
    weights[:100] = -0.0
    for peer in peers:
        peer[:100] = -0.0
    silent, expected = weights.clone(), weights.cpu().clone()
    noise = Noise(std, seed=1, step=2, first=3)
    ops.mix_(weights, peers, 0.5, [0.25] * num_peers, noise)
    ops.mix_(silent, peers, 0.5, [0.25] * num_peers)
    reference.mix_(expected, [peer.cpu() for peer in peers], 0.5, [0.25] * num_peers, **noise_arguments(noise))
    assert_same_bits(weights, silent)
    assert_same_bits(expected, silent)


def test_seed_step_and_index_all_count(device):
    def drawn(**changed: int) -> Tensor:
        weights = torch.zeros(64, device=device)
        ops.mix_(weights, [], 1.0, [], Noise(**{"std": 1.0, "seed": 1, "step": 2, **changed}))
        return weights

    shifts = (1, 2**32, 2**40)
    others = [drawn(seed=1 + shift) for shift in shifts] + [drawn(step=2 + shift) for shift in shifts]
    others += [drawn(first=4 * shift) for shift in shifts]
    everything = torch.cat([drawn(), *others]).unique()
    assert len(everything) >= 64 * 10 - 64, "first=4 shares 60 numbers with first=0; besides, no two are the same"


def test_compiled(device, assert_same_bits):
    def step(weights: Tensor) -> Tensor:
        ops.mix_(weights, [], 1.0, [], NOISE)
        return weights * 2

    eager = torch.randn(33, device=device)
    compiled = eager.clone()
    expected = step(eager)
    assert_same_bits(torch.compile(step, fullgraph=True, backend="aot_eager")(compiled), expected)
    assert_same_bits(compiled, eager)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"std": -0.1}, "std must be finite and not negative, got -0.1"),
        ({"std": math.inf}, "std must be finite and not negative, got inf"),
        ({"std": math.nan}, "std must be finite and not negative, got nan"),
        ({"seed": -1}, r"seed must be from 0 to 2\*\*63 - 1, got -1"),
        ({"seed": 2**63}, r"seed must be from 0 to 2\*\*63 - 1, got 9223372036854775808"),
        ({"step": -1}, r"step must be from 0 to 2\*\*63 - 1, got -1"),
        ({"step": 2**63}, r"step must be from 0 to 2\*\*63 - 1"),
        ({"first": -4}, r"first must be from 0 to 2\*\*63 - 1, got -4"),
    ],
)
def test_bad_noise(changed, message):
    with pytest.raises(ValueError, match=message):
        Noise(**{"std": 1.0, "seed": 0, "step": 0, **changed})
