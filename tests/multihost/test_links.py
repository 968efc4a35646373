"""Four hosts whose links delay and lose packets, are cut for a while, and are cut for good."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers import host_ranks, hosts, link_faults, ranks

pytestmark = pytest.mark.slow

NUM_HOSTS = 4


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What each rank has found."""
    with hosts.networks(NUM_HOSTS) as keepers:
        return ranks.run("link_faults", NUM_HOSTS, timeout=900, more=[[keeper] for keeper in keepers])


def virtual(name: str) -> torch.Tensor:
    return host_ranks.train(link_faults.STRATEGIES[name], NUM_HOSTS, link_faults.SIZES)


@pytest.mark.parametrize("name", link_faults.STRATEGIES)
def test_late_and_lost_packets_change_no_bit(name: str, found: list[dict[str, Any]]) -> None:
    if found[0]["how"] is None:
        pytest.skip("the kernel has neither netem nor tbf")
    assert min(one["lost"] for one in found) > 0, "no packet was lost: this tests nothing"
    assert torch.equal(torch.cat([one["weights"][name] for one in found]), virtual(name))


def test_a_link_that_comes_back_changes_no_bit(found: list[dict[str, Any]]) -> None:
    runs = [one["while"] for one in found]
    assert max(run["seconds"] for run in runs) >= link_faults.CUT_SECONDS, "nobody waited: this tests nothing"
    assert torch.equal(torch.cat([run["weights"] for run in runs]), virtual("ring"))


@pytest.mark.parametrize("rank", range(NUM_HOSTS))
def test_a_cut_link_is_named_in_time(rank: int, found: list[dict[str, Any]]) -> None:
    """What waited, at which step, for whom; after ``timeout`` and not after the half hour of a gloo group."""
    said = found[rank]["cut"]
    late = f"did not come within {link_faults.TIMEOUT:g} s: see what it does, or give a longer timeout"
    assert f"an average of 416 float32 at step 0 failed on rank {rank}: a rank of " in said["ssgd"]
    assert "the exchange of 416 float32 at step " in said["ring"]
    for strategy in ("ring", "ssgd"):
        assert "\n" not in said[strategy]
        assert said[f"{strategy} seconds"] < 10 * link_faults.TIMEOUT
    if rank != 3:  # a neighbour of rank 1; rank 3 waits for these
        waited_for = [0, 2] if rank == 1 else [1]  # rank 1 may wait for any of its two neighbours
        assert any(f"failed on rank {rank}: a rank of [{other}] {late}" in said["ring"] for other in waited_for)
        assert late in said["ssgd"]
