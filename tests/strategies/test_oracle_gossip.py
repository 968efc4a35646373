"""Real ranks against virtual learners, for every topology and number of learners: gossip."""

from __future__ import annotations

from typing import Any

import pytest

from helpers import oracle_checks

pytestmark = pytest.mark.usefixtures("one_thread")
real = oracle_checks.results_of("gossip")


@pytest.mark.parametrize("case", oracle_checks.cases("gossip"))
def test_real_ranks(case: Any, real: list[dict[Any, Any]]) -> None:
    """A learner ends as the virtual one does: bit for bit, or within 4 ULPs of the largest weight."""
    oracle_checks.check_case(case, real)


@pytest.mark.parametrize(("case", "num_rows"), oracle_checks.grids("gossip"))
def test_several_learners_a_rank(case: Any, num_rows: int, real: list[dict[Any, Any]]) -> None:
    oracle_checks.check_grid(case, num_rows, real)
