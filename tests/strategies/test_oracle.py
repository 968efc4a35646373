"""Virtual learners alone: strategies, topologies and optimizers are not interchanged. And the cover of the cases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from helpers import oracle
from helpers.oracle_checks import ulps, virtual

pytestmark = pytest.mark.usefixtures("one_thread")


def combinations_of(runs: Iterable[oracle.Run], num: int) -> set[Any]:
    return set().union(*(run.combinations(num) for run in runs))


def test_the_runs_cover_all_cases() -> None:
    """Of strategy, topology, size, optimizer, model and way: fast runs have all pairs, and others all triples."""
    assert set(oracle.ALL) >= oracle.WHOLE >= oracle.FAST
    assert {run.case for run in oracle.WHOLE} == set(oracle.CASES)
    assert combinations_of(oracle.WHOLE, 3) == combinations_of(oracle.ALL, 3)
    assert combinations_of(oracle.FAST, 2) == combinations_of(oracle.ALL, 2)
    assert len(oracle.FAST) < len(oracle.WHOLE) / 2 < len(oracle.ALL) / 3
    assert sorted(map(str, oracle.WHOLE)) == sorted(str(run) for part in oracle.PARTS for run in oracle.runs_of(part))


COMPARED = [case for case in oracle.CASES if case._replace(optimizer="torch", model="mlp") in oracle.CASES]
COMPARED = [case for case in COMPARED if case.optimizer == "fused" and case.model == "mlp"]


@pytest.mark.parametrize(
    "case",
    [pytest.param(one, id=str(one), marks=() if one in oracle.FAST_CASES else pytest.mark.slow) for one in COMPARED],
)
def test_fused_and_torch_optimizers_agree(case: Any) -> None:
    """FusedSGD (mix and step in one pass on real ranks) and torch.optim.SGD after a mix: a few ULPs over six steps."""
    other = case._replace(optimizer="torch")
    assert ulps(virtual(case).weights, virtual(other).weights) <= 8


def test_strategies_differ() -> None:
    """Strategies are not interchanged: on a ring of five all end with different weights.

    Except push_sum: where W is doubly stochastic, all push weights are 1, and it equals dpsgd_atc.
    """
    alike = [case for case in oracle.CASES if case.world_size == 5 and case.topology in ("ring", "all_gather")]
    alike = [case for case in alike if case.optimizer == "fused" and case.strategy != "push_sum"]
    ends = [virtual(case).weights for case in alike]
    on_a_ring = [one for one in oracle.MAKERS if not one.startswith("grouped") and one not in ("push_sum", "two_mixes")]
    assert len(ends) == len(on_a_ring)
    for i, end in enumerate(ends):
        assert not any(torch.equal(end, other) for other in ends[:i]), alike[i]


def test_groups_differ() -> None:
    """Of six learners: from each other, and from the strategies between which they are."""
    alike = [case for case in oracle.CASES if case.world_size == 6 and case.topology == "all_gather"]
    alike = [case for case in alike if (case.optimizer, case.model) == ("fused", "mlp")]
    ends = {case.strategy: virtual(case).weights for case in alike}
    names = [name for name in ends if name.startswith("grouped")]
    assert len(names) == 4
    for name in names:
        assert not any(torch.equal(ends[name], other) for strategy, other in ends.items() if strategy != name), name


def test_topologies_differ() -> None:
    """Topologies are not interchanged: with five learners all end with different weights."""
    alike = [case for case in COMPARED if case.world_size == 5 and case.strategy == "dpsgd"]
    ends = [virtual(case).weights for case in alike]
    assert len(ends) == sum(oracle.fits(topology, 5) for topology in oracle.TOPOLOGIES)
    for i, end in enumerate(ends):
        assert not any(torch.allclose(end, other) for other in ends[:i])
