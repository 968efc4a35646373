"""On real ranks, a step that averages in its own pass has the bits of an average and then the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers import mixing_ranks, ranks


@pytest.fixture(scope="module")
def real() -> list[dict[Any, Any]]:
    return ranks.run("mixing_ranks", 4, timeout=600.0)


@pytest.mark.parametrize("case", mixing_ranks.CASES, ids="-".join)
def test_one_pass_has_the_bits_of_two(case: tuple[str, str, str], real: list[dict[Any, Any]]) -> None:
    learners = [rank[case] for rank in real]
    for one, two, in_one, in_two in learners:
        assert torch.equal(one, two) and one.isfinite().all()
        assert in_two == 0
        # Only gossip that is no push-sum averages in front of a step.
        assert in_one == (mixing_ranks.STEPS if case[0] in ("dpsgd", "dpsgd_pairs", "slowmo") else 0)
    if case[0] != "local_sgd":
        assert not torch.equal(learners[0][0], learners[1][0]), "learners that gossip differ"
