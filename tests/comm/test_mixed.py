"""Ranks of two hosts: those of a host share memory, and a process group connects hosts. Four ranks on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ddpcore
from ddpcore.comm.mixed import MixedCommunicator, count_edges
from ddpcore.strategies.base import Traits, check_transport
from helpers import mixed_ranks as helper
from helpers import oracle, ranks
from helpers.each import each

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = [(place, case) for place in helper.PLACES for case in helper.cases_of(place)]


@pytest.fixture(scope="module")
def real() -> list[dict[str, Any]]:
    return ranks.run("mixed_ranks", helper.NUM_RANKS, timeout=600.0)


@pytest.fixture(scope="module")
def virtual() -> dict[Any, Any]:
    return {case: oracle.train(case) for case in helper.CASES}


@pytest.mark.slow
@each(("place", "case"), CASES)
def test_ranks_have_the_bits_of_virtual_learners(
    place: str, case: Any, real: list[dict[str, Any]], virtual: dict[Any, Any]
) -> None:
    """Every strategy, and DPSGD and push-sum on topologies whose edges lie inside hosts, between them, and both."""
    seen = [rank[place]["oracle"][tuple(case)] for rank in real]
    assert torch.equal(torch.cat([one.weights for one in seen]), virtual[case].weights)
    assert torch.equal(torch.cat([one.losses for one in seen], dim=1), virtual[case].losses)
    for one in seen:
        assert torch.equal(one.average, virtual[case].average)


@pytest.mark.slow
@pytest.mark.parametrize("place", helper.PLACES)
@pytest.mark.parametrize("name", helper.NARROW)
def test_weights_of_16_bits(name: str, place: str, real: list[dict[str, Any]]) -> None:
    weights = torch.cat([rank[place]["narrow"][name] for rank in real])
    assert torch.equal(weights, helper.trained(helper.NARROW[name], None))


@pytest.mark.slow
@pytest.mark.parametrize("place", helper.PLACES)
@pytest.mark.parametrize("name", helper.NARROW)
def test_a_state_that_is_loaded_in_the_middle_of_a_step(name: str, place: str, real: list[dict[str, Any]]) -> None:
    weights = torch.cat([rank[place]["loads"][name] for rank in real])
    assert torch.equal(weights, helper.trained(helper.NARROW[name], None, torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("place", helper.PLACES)
@pytest.mark.parametrize("name", helper.TOPOLOGIES)
def test_only_rows_for_other_hosts_go_by_the_process_group(name: str, place: str, real: list[dict[str, Any]]) -> None:
    hosts, topology = helper.PLACES[place], oracle.topology_of(oracle.Case("dpsgd", name, 4, "fused"))
    for rank, one in enumerate(real):
        readers = [reader for step in range(4) for reader in topology.round(step, rank, 4).destinations]
        far = [reader for reader in readers if hosts[reader] != hosts[rank]]
        assert one[place]["sent"][name] == (400 * len(readers), 400 * len(far))


@pytest.mark.slow
@pytest.mark.parametrize(("place", "sent"), [("two and two", 0), ("three and one", 400), ("in turn", 400)])
def test_groups_on_a_host_share_memory(place: str, sent: int, real: list[dict[str, Any]]) -> None:
    """If each group is on one host."""
    assert [one[place]["grouped"] for one in real] == [([0.5], sent)] * 2 + [([2.5], sent)] * 2


@pytest.mark.slow
def test_between_hosts_a_rank_sends_its_part_of_the_weights(real: list[dict[str, Any]]) -> None:
    """Half of 400 bytes go to the other host, and half to the other rank of the host."""
    assert [one["two and two"]["columns"] for one in real] == [(True, 400, 200)] * 4
    assert all(one[place]["columns"][:2] == (True, 400) for one in real for place in helper.PLACES)


@pytest.mark.slow
def test_auto_says_which_edge_goes_how(real: list[dict[str, Any]]) -> None:
    """Two edges of a ring and two of a hierarchy lie inside the hosts of two ranks; averages of all have no edges."""
    for one in real:
        seen = one["two and two"]["choices"]
        text = "2 hosts: shared memory inside a host (2 edges), torch.distributed, gloo, between hosts (2 edges)"
        text += " and for averages of all ranks"
        assert seen["ring"] == seen["hierarchical"] == ("mixed", text)
        assert seen["ssgd"] == ("mixed", text.replace(" (2 edges)", ""))
        in_turn = text.replace("a host (2 edges)", "a host (0 edges)").replace("hosts (2 edges)", "hosts (4 edges)")
        assert one["in turn"]["choices"]["ring"] == ("mixed", in_turn)
        assert one["apart"] == ("pg", "torch.distributed, gloo (4 ranks on 4 hosts)")


@pytest.mark.slow
@pytest.mark.parametrize("place", helper.PLACES)
def test_what_mixed_cannot_do_still_works_by_auto(place: str, real: list[dict[str, Any]]) -> None:
    for one in real:
        assert one[place]["choices"]["adpsgd"][0] == "mixed"
        assert one[place]["choices"]["shrink"][0] != "mixed"


@pytest.mark.slow
def test_weights_that_are_read_in_place_are_not_overwritten(real: list[dict[str, Any]]) -> None:
    """Neighbours on the host may still read the old ones."""
    ring = torch.eye(4) / 3 + torch.eye(4).roll(1, 0) / 3 + torch.eye(4).roll(-1, 0) / 3
    expected = [torch.linalg.matrix_power(ring, step) @ torch.arange(4.0) for step in (1, 2, 3)]
    for rank, one in enumerate(real):
        moves, seen = one["in place"]
        assert moves
        assert seen == pytest.approx([step[rank].item() for step in expected], rel=1e-6)


def test_a_strategy_runs_over_mixed_if_it_runs_over_both() -> None:
    class Apart(ddpcore.DPSGD):
        traits = Traits(transports=("virtual", "pg"))

    check_transport(ddpcore.ADPSGD(), "mixed")
    with pytest.raises(ValueError, match=r"dpsgd does not run over transport='mixed': take virtual learners .*'pg'"):
        check_transport(Apart(ddpcore.Ring()), "mixed")

    class Mixed(ddpcore.DPSGD):
        traits = Traits(transports=("mixed",))

    check_transport(Mixed(ddpcore.Ring()), "mixed")


def test_a_group_of_one_rank(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        for hosts in ("", "ab"):
            says = f"hosts names {len(hosts)} hosts and there are 1 ranks: give one for each rank"
            with pytest.raises(ValueError, match=says):
                MixedCommunicator(None, hosts)
        comm = MixedCommunicator(None, "a")
        comm._near.bytes_sent = 5
        comm.bytes_sent += 2
        assert comm.bytes_sent == 7
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("topology", "hosts", "edges"),
    [
        (ddpcore.Ring(), "aabb", (2, 2)),
        (ddpcore.Ring(), "abab", (0, 4)),
        (ddpcore.Ring(), "aaab", (2, 2)),
        (ddpcore.Complete(), "aaab", (3, 3)),
        (ddpcore.Hierarchical(2), "aabbcc", (3, 6)),
        (ddpcore.OnePeerExponential(), "aabb", (2, 4)),
        (ddpcore.RandomPair(), "aabb", (2, 4)),
    ],
)
def test_edges_are_counted(topology: ddpcore.Topology, hosts: str, edges: tuple[int, int]) -> None:
    assert count_edges(topology, hosts) == edges
