"""Two hosts with two ranks each, started by torchrun: every strategy, and the bytes that leave a host."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpcore.experiments import hosts
from helpers import forked, host_ranks, oracle, ranks

NUM_HOSTS, SECONDS = 2, 240.0


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    folder = tmp_path_factory.mktemp("torchrun")
    script = ranks.HERE / "host_ranks.py"
    with hosts.networks(NUM_HOSTS) as keepers:
        agents = []
        for host, keeper in enumerate(keepers):
            place = [keeper, host, NUM_HOSTS, host_ranks.PER_HOST]
            words = ["-m", "helpers.host_agent", *map(str, place), str(script), str(folder)]
            agents.append(forked.start(words, ranks.log_folder(folder, host), ranks.environment(), Path.cwd()))
        deadline = time.monotonic() + SECONDS
        for agent in agents:
            agent.join(max(0.0, deadline - time.monotonic()))
        codes = [agent.exitcode for agent in agents]
        for agent in agents:
            agent.kill()
            agent.join()
    logs = "".join("".join(forked.output(ranks.log_folder(folder, host))) for host in range(NUM_HOSTS))
    assert codes == [0] * NUM_HOSTS, logs
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(host_ranks.WORLD_SIZE)]


def test_ranks_are_on_two_hosts(found: list[dict[str, Any]]) -> None:
    spaces = [one["namespace"] for one in found]
    assert spaces[0] == spaces[1] != spaces[2] == spaces[3]


@pytest.mark.parametrize("case", host_ranks.CASES, ids=str)
def test_two_hosts_equal_virtual_learners(case: oracle.Case, found: list[dict[str, Any]]) -> None:
    """Bit for bit; so do ranks on one host (strategies/test_oracle.py)."""
    virtual = oracle.train(case)
    real = [one["results"][tuple(case)] for one in found]
    assert torch.equal(torch.cat([one.weights for one in real]), virtual.weights)
    assert torch.equal(torch.cat([one.losses for one in real], dim=1), virtual.losses)


@pytest.mark.parametrize("name", host_ranks.TOPOLOGIES)
def test_bytes_between_hosts(name: str, found: list[dict[str, Any]]) -> None:
    """A host sends what the topology says, and at most 2 % for headers, acknowledgements and two barriers."""
    per_host, topology = host_ranks.PER_HOST, host_ranks.TOPOLOGIES[name]()
    row = 4 * (host_ranks.SIZES[0] + 1) * host_ranks.SIZES[1]
    for host in range(NUM_HOSTS):
        own = range(host * per_host, (host + 1) * per_host)
        rounds = [topology.round(step, rank, 4) for step in range(host_ranks.STEPS) for rank in own]
        expected = row * sum(other not in own for one in rounds for other in one.destinations)
        counted = found[host * per_host]["bytes"][name]
        assert expected <= counted <= 1.02 * expected


def test_bytes_of_averages_between_hosts(found: list[dict[str, Any]]) -> None:
    """Nothing but the two averages of weights leaves a host if groups are hosts. A ring sends 2 * 3 / 4 of the weights.

    A first step sends a few numbers about the parameters, too.
    """
    average = 2 * 3 * 4 * (host_ranks.SIZES[0] + 1) * host_ranks.SIZES[1] // 4
    for host in range(NUM_HOSTS):
        counted = found[host * host_ranks.PER_HOST]["bytes"]
        for name, number in (("ssgd", host_ranks.STEPS), ("local_sgd", 2), ("grouped", 2)):
            assert number * average <= counted[name] <= 1.02 * number * average, name


def test_hierarchies_send_less_between_hosts(found: list[dict[str, Any]]) -> None:
    """Than all to all: an edge of hosts is one message of each learner, not one to each learner of the other host."""
    for host in range(NUM_HOSTS):
        counted = found[host * host_ranks.PER_HOST]["bytes"]
        assert counted["hierarchical"] < 0.6 * counted["complete"]
