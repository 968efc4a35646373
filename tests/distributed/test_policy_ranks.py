"""Policies on real ranks that do not have the same states and buffers."""

from __future__ import annotations

from typing import Any

import pytest

from helpers import policy_ranks, ranks


@pytest.fixture(scope="module")
def found() -> list[dict[Any, Any]]:
    return ranks.run("policy_ranks", 2)


@pytest.mark.parametrize("transport", policy_ranks.TRANSPORTS)
@pytest.mark.parametrize("policy", policy_ranks.POLICIES)
def test_a_rank_without_state_takes_part_with_zeros(found, policy, transport):
    """As virtual learners do. Over a process group its weights met the momentum of the other rank."""
    assert [one[policy, transport] for one in found] == pytest.approx([0.0, 0.0], abs=1e-6)
