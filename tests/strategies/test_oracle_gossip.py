"""Real ranks against virtual learners, for every topology and number of learners: gossip."""

from __future__ import annotations

from typing import Any

import pytest

from helpers import oracle_checks

pytestmark = pytest.mark.usefixtures("one_thread")
real = oracle_checks.results_of("gossip")


@pytest.mark.parametrize("run", oracle_checks.runs("gossip"))
def test_real_ranks(run: Any, real: list[dict[Any, Any]]) -> None:
    """A learner ends as the virtual one does: bit for bit, or within 4 ULPs of the largest weight."""
    oracle_checks.check_run(run, real)
