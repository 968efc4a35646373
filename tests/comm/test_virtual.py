"""Virtual learners: averages, exchanges and gathers over the rows of one buffer, and the stacked model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ddpcore import Complete, Hierarchical, OnePeerExponential, RandomPair, Ring, Star, Topology, Torus2D, ops
from ddpcore.comm import VirtualCommunicator, reductions
from helpers.each import each


def rows_of(num_learners: int, numel: int = 33) -> Tensor:
    return torch.randn(num_learners, numel, generator=torch.Generator().manual_seed(num_learners))


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_average(n: int) -> None:
    comm, rows = VirtualCommunicator(n), rows_of(n)
    expected = rows.double().mean(dim=0)
    comm.average_(rows).wait()
    for row in rows:
        torch.testing.assert_close(row.double(), expected, rtol=1e-6, atol=1e-7)
        assert torch.equal(row, rows[0])


def test_average_of_columns_leaves_the_others_alone() -> None:
    comm, rows = VirtualCommunicator(3), rows_of(3)
    before = rows.clone()
    comm.average_(rows[:, 10:20]).wait()
    assert torch.equal(rows[:, :10], before[:, :10])
    assert torch.equal(rows[:, 20:], before[:, 20:])
    assert torch.equal(rows[0, 10:20], rows[2, 10:20])


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_rows_without_an_average_are_refused(dtype: torch.dtype) -> None:
    comm, rows = VirtualCommunicator(2), torch.ones(2, 3).to(dtype)
    for call in (comm.average_, lambda rows: comm.mix_(rows, Ring(), 0)):
        with pytest.raises(ValueError, match=f"{str(dtype)[6:]} has no average: convert the values to float32"):
            call(rows)
    assert comm.bytes_sent == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [3, 32, 300])
def test_averages_of_16_bits_are_rounded_once(n: int, dtype: torch.dtype) -> None:
    """Equal learners stay equal. The mean of others is correct to half a unit in the last place."""
    comm, rows = VirtualCommunicator(n), rows_of(n).to(dtype)
    alike = rows[:1].expand(n, -1).clone()
    comm.average_(alike).wait()
    assert torch.equal(alike, rows[:1].expand(n, -1))
    mean = rows.double().mean(dim=0)
    comm.average_(rows).wait()
    error = (rows.double() - mean).abs()
    # The error of an fp32 sum is at most n * 2^-24 of the largest partial sum. Then the result is rounded to its dtype.
    assert (error <= 0.5 * torch.finfo(dtype).eps * mean.abs() + n * 2.0**-24 * rows_of(n).abs().max()).all()


def test_broadcast_and_gather() -> None:
    comm, rows = VirtualCommunicator(3), rows_of(3)
    first = rows[0].clone()
    assert torch.equal(comm.gather(rows), rows)
    comm.broadcast_(rows)
    assert torch.equal(rows, first.expand(3, -1))


@pytest.mark.parametrize("topology", [Complete(), Ring(), RandomPair(3), OnePeerExponential()], ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_exchange_is_the_matrix(n: int, topology: Complete) -> None:
    comm, rows = VirtualCommunicator(n), rows_of(n)
    for step in range(3):
        before = rows.double()
        exchange = comm.exchange(rows, topology, step)
        exchange.mixture().apply_(rows)
        expected = torch.from_numpy(topology.matrix(step, n)) @ before
        torch.testing.assert_close(rows.double(), expected, rtol=1e-5, atol=1e-6)


def test_a_static_matrix_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new matrix is made for another topology, or if the matrix depends on the step. It is never dense."""
    made: list[tuple[str, int]] = []
    original = Topology.mixing_matrix

    def counted(self: Topology, step: int, n: int) -> Any:
        made.append((type(self).__name__, step))
        return original(self, step, n)

    monkeypatch.setattr(Topology, "mixing_matrix", counted)
    monkeypatch.setattr(Topology, "matrix", lambda *args: pytest.fail("a dense matrix"))
    comm, rows, ring = VirtualCommunicator(4), rows_of(4), Ring()
    for step in range(3):
        comm.exchange(rows, ring, step).mixture().apply_(rows)
    for step in range(2):
        comm.exchange(rows, OnePeerExponential(), step).mixture().apply_(rows)
    star = Star()
    for step in range(2):
        comm.exchange(rows, star, step).mixture().apply_(rows)
    assert made == [("Ring", 0), ("OnePeerExponential", 0), ("OnePeerExponential", 1), ("Star", 0)]


def test_thousands_of_learners() -> None:
    """4096 learners of three topologies, against the sparse product in float64."""
    n = 4096
    comm = VirtualCommunicator(n)
    for topology in (RandomPair(1), Torus2D(), Hierarchical(8)):
        rows = rows_of(n, 5)
        expected = topology.matrix(2, n) @ rows.double().numpy()
        comm.exchange(rows, topology, 2).mixture().apply_(rows)
        torch.testing.assert_close(rows.double(), torch.from_numpy(expected), rtol=1e-5, atol=1e-6)


def test_bytes_are_those_of_real_learners() -> None:
    """Four learners with 32 floats: a small average sends three rows, an exchange one row to each neighbour."""
    comm, rows = VirtualCommunicator(4), rows_of(4, 32)
    comm.average_(rows).wait()
    assert comm.bytes_sent == 3 * 128
    for topology, messages in ((Ring(), 2), (Complete(), 3), (RandomPair(), 1)):
        before = comm.bytes_sent
        comm.exchange(rows, topology, 0).mixture().apply_(rows)
        assert comm.bytes_sent - before == messages * 128
    alone = VirtualCommunicator(1)
    alone.average_(rows[:1]).wait()
    alone.exchange(rows[:1], Ring(), 0).mixture().apply_(rows[:1])
    assert alone.bytes_sent == 0


@pytest.mark.parametrize("n", [0, -1])
def test_impossible_worlds(n: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        VirtualCommunicator(n)


@each("seed", range(30))
def test_both_ways_to_average_a_pair_give_the_same_bits(seed: int) -> None:
    """``average_pair_``: the kernel of 16 bits and of a GPU, and torch's addition; none of the numbers is subnormal."""
    draw = torch.Generator().manual_seed(seed)
    own, other = torch.randn(2, seed * 7 + 1, generator=draw) * 2.0 ** torch.randint(-120, 120, (2, 1), generator=draw)
    own[0] = -0.0
    kernel = own.clone()
    ops.mix_(kernel, [other], 0.5, [0.5])
    mirrored = other.clone()
    reductions.average_pair_(mirrored, own)
    reductions.average_pair_(own, other)
    assert torch.equal(own.view(torch.int32), kernel.view(torch.int32))
    assert torch.equal(own.view(torch.int32), mirrored.view(torch.int32)), "both learners have the same mean"


@each(("seed", "topology"), [(seed, topology) for seed in range(10) for topology in (RandomPair(seed=2), Ring())])
def test_differences_of_two_neighbours_are_opposite(seed: int, topology: Topology) -> None:
    """So that nothing is lost where W is symmetric: of a pair, bit for bit (``Exchange.differences``)."""
    num = 2 * (seed + 1) if isinstance(topology, RandomPair) else 2
    rows = torch.randn(num, 1 + 13 * seed, generator=torch.Generator().manual_seed(seed)) * 10.0**seed
    found = VirtualCommunicator(num).exchange(rows, topology, seed).differences(rows)
    for learner in range(num):
        for partner in topology.round(seed, learner, num).sources:
            assert torch.equal(found[learner], -found[partner])
    assert found.any()
