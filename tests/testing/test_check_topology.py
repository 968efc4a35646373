"""``check_topology`` passes what is right and names what is wrong."""

from __future__ import annotations

import pytest

from ddpcore import TOPOLOGIES, FromGraph, Topology
from ddpcore.testing import check_topology
from helpers import own_parts


@pytest.mark.parametrize("name", TOPOLOGIES.names())
def test_ddpcores_own_pass(name: str) -> None:
    check_topology(TOPOLOGIES.build(name, seed=3))


def test_push_sum_needs_columns_alone() -> None:
    import networkx

    graph = FromGraph(networkx.DiGraph([(0, 2), (0, 1), (1, 2), (2, 0)]))
    check_topology(graph, num_learners=[3], push_sum=True)
    with pytest.raises(AssertionError, match="FromGraph of 3 learners"):
        check_topology(graph, num_learners=[3])


def test_a_users_own_passes() -> None:
    check_topology(own_parts.Shift())


@pytest.mark.parametrize(
    ("topology", "says"),
    [
        (own_parts.WrongPeriod(), "WrongPeriod of 4 learners: period is 1 and the rounds of step 1 are others"),
        (own_parts.Unbalanced(), "Unbalanced of 4 learners: "),
        (own_parts.Impure(), "Impure of 4 learners: "),
        (own_parts.WrongShape(), "WrongShape of 4 learners: spectral_gap is 0.5, the matrices have"),
    ],
)
def test_what_is_wrong_is_named(topology: Topology, says: str) -> None:
    with pytest.raises(AssertionError, match=says) as caught:
        check_topology(topology)
    assert "\n" not in str(caught.value)


def test_a_topology_that_fits_none_of_the_numbers() -> None:
    with pytest.raises(AssertionError, match="supports none of the numbers"):
        check_topology(own_parts.Shift(), num_learners=[1, 2])
