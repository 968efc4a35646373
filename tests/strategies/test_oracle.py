"""Real ranks against virtual learners, for every strategy, topology and number of learners."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddpcore.testing.learners import STEPS
from helpers import oracle, ranks

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def real() -> list[dict[Any, Any]]:
    """The results of six ranks in the cases that each of them runs."""
    return ranks.run("oracle", oracle.LARGEST, timeout=900.0)  # one or two minutes on an idle machine


GOSSIPING = tuple(name for name in oracle.GOSSIP if name != "slowmo")  # without other averages
APART = ("local_sgd", "grouped", "dpsgd", "dpsgd_cta", "dpsgd_stale")  # learners differ after the last step


def ulps(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, in units of the last place of the largest weight."""
    unit = torch.finfo(torch.float32).eps * theirs.abs().max()
    return ((ours - theirs).abs().max() / unit).item()


@pytest.fixture(scope="module")
def virtual() -> dict[Any, Any]:
    """The results of virtual learners in the same case."""
    return {case: oracle.train(case) for case in oracle.CASES}


def is_bitwise(case: Any, transport: str) -> bool:
    """Whether real and virtual learners do the same arithmetic in a case.

    A gossip average adds a learner's own weights first, and then those of its neighbours by ascending rank. A mean of
    gathered rows, or of rows in shared memory, adds all rows by ascending rank. An all-reduce of gloo adds in another
    order, which changes the rounding for three or more learners.
    """
    return transport == "shm" or case.topology != "all_reduce" or case.world_size <= 2


@pytest.mark.parametrize("transport", ["pg", "shm"])
@pytest.mark.parametrize("case", oracle.CASES, ids=str)
def test_weights_and_losses(case: Any, transport: str, real: list[dict[Any, Any]], virtual: dict[Any, Any]) -> None:
    """Every learner ends with the same weights: bit for bit, or within 4 ULPs of the largest one (see is_bitwise)."""
    seen = [rank[tuple(case), transport] for rank in real[: case.world_size]]
    weights = torch.cat([one.weights for one in seen])
    losses = torch.cat([one.losses for one in seen], dim=1)
    assert losses.shape == (STEPS, case.world_size)
    assert losses.isfinite().all()
    if is_bitwise(case, transport):
        assert torch.equal(weights, virtual[case].weights)
        assert torch.equal(losses, virtual[case].losses)
    else:
        assert ulps(weights, virtual[case].weights) <= 4
        torch.testing.assert_close(losses, virtual[case].losses, rtol=1e-5, atol=1e-6)
    size = 2 if case.strategy.startswith("grouped") else case.world_size
    if case.strategy in ("ssgd", "noisy_ssgd") or size < case.world_size:
        groups = weights[:, : virtual[case].num_weights].view(-1, size, virtual[case].num_weights)
        assert torch.equal(groups, groups[:, :1].expand_as(groups)), "they must hold the same bits"


@pytest.mark.parametrize(("case", "num_rows"), oracle.GRIDS, ids=str)
def test_several_learners_a_rank(case: Any, num_rows: int, real: list[dict[Any, Any]], virtual: dict[Any, Any]) -> None:
    """Two or three virtual learners on each rank, against all in one process: bit for bit if averages are gathered."""
    seen = [rank[("grid", num_rows, *case)] for rank in real[: case.world_size // num_rows]]
    weights = torch.cat([one.weights for one in seen])
    if is_bitwise(case, "pg"):
        assert torch.equal(weights, virtual[case].weights)
        assert torch.equal(torch.cat([one.losses for one in seen], dim=1), virtual[case].losses)
    else:
        assert ulps(weights, virtual[case].weights) <= 4
    for one in seen:
        assert ulps(one.average, virtual[case].average) <= 4
        assert one.consensus == pytest.approx(virtual[case].consensus, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("transport", ["pg", "shm"])
@pytest.mark.parametrize("case", oracle.CASES, ids=str)
def test_average_distance_and_bytes(
    case: Any, transport: str, real: list[dict[Any, Any]], virtual: dict[Any, Any]
) -> None:
    """The evaluation model is the mean on every rank, weighted in push_sum. Distances and bytes are equal.

    For three or more learners they may differ by 4 ULPs, because the mean may be an all-reduce of gloo.
    """
    expected, weights = virtual[case], virtual[case].weights.double()
    shares = torch.ones(case.world_size).double() if expected.shares is None else expected.shares
    if case.topology == oracle.UNBALANCED:
        assert shares.max() > 1.2, "the graph is not balanced, or this test compares nothing"
    mean = (shares[:, None] * weights).mean(dim=0)
    assert ulps(expected.average, mean) <= 4
    weights, mean = (rows[..., : expected.num_weights] for rows in (weights, mean))
    distance = (weights - mean).square().sum(dim=1).mean().sqrt().item()
    # The mean is rounded to fp32: the error of each distance is at most 4 ULPs of the largest weight.
    error = 4 * torch.finfo(torch.float32).eps * weights.abs().max().item() * weights.shape[1] ** 0.5
    assert expected.consensus == pytest.approx(distance, abs=error)
    if case.strategy in APART and case.world_size > (2 if case.strategy == "grouped" else 1):
        assert distance > 0.01, "learners on different data must differ, or this test compares nothing"
    for one in (rank[tuple(case), transport] for rank in real[: case.world_size]):
        assert ulps(one.average, expected.average) <= (0 if is_bitwise(case, transport) else 4)
        assert one.consensus == pytest.approx(distance, abs=error)
    if transport == "pg" or case.strategy in GOSSIPING:  # shared memory gathers no small averages
        assert real[0][tuple(case), transport].bytes_sent == expected.bytes_sent


COMPARED = [case for case in oracle.CASES if case._replace(optimizer="torch", model="mlp") in oracle.CASES]
COMPARED = [case for case in COMPARED if case.optimizer == "fused" and case.model == "mlp"]


@pytest.mark.parametrize("case", COMPARED, ids=str)
def test_fused_and_torch_optimizers_agree(case: Any, virtual: dict[Any, Any]) -> None:
    """FusedSGD (mix and step in one pass on real ranks) and torch.optim.SGD after a mix: a few ULPs over six steps."""
    other = case._replace(optimizer="torch")
    assert ulps(virtual[case].weights, virtual[other].weights) <= 8


def test_strategies_differ(virtual: dict[Any, Any]) -> None:
    """Strategies are not interchanged: on a ring of five all end with different weights.

    Except push_sum: where W is doubly stochastic, all push weights are 1, and it equals dpsgd_atc.
    """
    alike = [case for case in oracle.CASES if case.world_size == 5 and case.topology in ("ring", "all_gather")]
    alike = [case for case in alike if case.optimizer == "fused" and case.strategy != "push_sum"]
    ends = [virtual[case].weights for case in alike]
    assert len(ends) == len(oracle.MAKERS) - 1 - sum(name.startswith("grouped") for name in oracle.MAKERS)
    for i, end in enumerate(ends):
        assert not any(torch.equal(end, other) for other in ends[:i]), alike[i]


def test_groups_differ(virtual: dict[Any, Any]) -> None:
    """Of six learners: from each other, and from the strategies between which they are."""
    alike = [case for case in oracle.CASES if case.world_size == 6 and case.topology == "all_gather"]
    alike = [case for case in alike if (case.optimizer, case.model) == ("fused", "mlp")]
    ends = {case.strategy: virtual[case].weights for case in alike}
    names = [name for name in ends if name.startswith("grouped")]
    assert len(names) == 3
    for name in names:
        assert not any(torch.equal(ends[name], other) for strategy, other in ends.items() if strategy != name), name


def test_topologies_differ(virtual: dict[Any, Any]) -> None:
    """Topologies are not interchanged: with five learners all end with different weights."""
    alike = [case for case in COMPARED if case.world_size == 5 and case.strategy == "dpsgd"]
    ends = [virtual[case].weights for case in alike]
    assert len(ends) == sum(oracle.fits(topology, 5) for topology in oracle.TOPOLOGIES)
    for i, end in enumerate(ends):
        assert not any(torch.allclose(end, other) for other in ends[:i])
