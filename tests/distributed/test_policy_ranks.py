"""Policies on real ranks that do not have the same states and buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers import policy_ranks, ranks


@pytest.fixture(scope="module")
def found() -> list[dict[Any, Any]]:
    return ranks.run("policy_ranks", 2)


@pytest.mark.parametrize("transport", policy_ranks.TRANSPORTS)
@pytest.mark.parametrize("policy", policy_ranks.POLICIES)
def test_a_rank_without_state_takes_part_with_zeros(found, policy, transport):
    """As virtual learners do. Over a process group its weights met the momentum of the other rank."""
    assert [one[policy, transport] for one in found] == pytest.approx([0.0, 0.0], abs=1e-6)


@pytest.mark.parametrize("transport", policy_ranks.TRANSPORTS)
@pytest.mark.parametrize("policy", ["average", "gossip"])
def test_buffers_of_float64_are_averaged_and_late_ones_refused(found, policy, transport):
    """On both ranks, before weights change, and by ``evaluation_model`` too. Gloo had mixed elements of two buffers."""
    for error, mean, stayed in (one[f"buffers {policy}", transport, False] for one in found):
        assert (error, stayed) == ("", False)
        torch.testing.assert_close(mean, torch.full((3,), -1.0, dtype=torch.float64))
    for error, _, stayed in (one[f"buffers {policy}", transport, True] for one in found):
        assert error.count("buffers differ in names, sizes or dtypes between learners") == 2
        assert stayed


@pytest.mark.parametrize("transport", policy_ranks.TRANSPORTS)
def test_ranks_that_are_pruned_apart_have_the_mean_of_both(found, transport):
    for expected, average in (one["pruned", transport] for one in found):
        torch.testing.assert_close(average, expected)
