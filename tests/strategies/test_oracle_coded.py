"""Real ranks against virtual learners, for every topology and size: gossip with codecs, and on uneven data."""

from __future__ import annotations

from typing import Any

import pytest

from helpers import oracle_checks

pytestmark = pytest.mark.usefixtures("one_thread")
real = oracle_checks.results_of("coded")


@pytest.mark.parametrize("run", oracle_checks.runs("coded"))
def test_real_ranks(run: Any, real: list[dict[Any, Any]]) -> None:
    """A learner ends as the virtual one does: bit for bit, or within 4 ULPs of the largest weight."""
    oracle_checks.check_run(run, real)
