"""Four ranks call random operations, of any size and dtype: each result has the bits of virtual learners."""

from __future__ import annotations

import pytest

from helpers import ranks

pytestmark = pytest.mark.slow


def test_random_operations_of_four_ranks() -> None:
    """The long one is in tools/check_sanitizers."""
    seen = ranks.run("stress_ranks", 4, timeout=600.0)
    assert seen[0] == seen[1] == seen[2] == seen[3]
    assert set(seen[0]) == {"average", "exchange", "mix", "in_place", "gather", "broadcast"}
    print("operations:", seen[0])
