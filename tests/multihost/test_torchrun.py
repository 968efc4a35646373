"""Two hosts with two ranks each, started by torchrun: every strategy, and the bytes that leave a host."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpcore.records.study import Folder
from helpers import forked, host_ranks, hosts, oracle, ranks

pytestmark = pytest.mark.slow

NUM_HOSTS, SECONDS = 2, 600.0
STUDY = """
title = "A tiny study"
question = "Does it run?"
source = "Nobody, Table 1"
metrics = ["train_loss"]
seeds = 1

[shared]
model = "simplenet"
data.name = "synthetic"
data.batch_size = 16
run.steps = 6
run.device = "cpu"
strategy.learners = 4

[rows]
"ssgd" = { strategy.name = "ssgd" }
"dpsgd" = { strategy.name = "dpsgd" }
"""


def run_on_hosts(folder: Path, *words: object) -> str:
    """``torchrun WORDS`` on each host, which must succeed. Returns what the first one printed."""
    with hosts.networks(NUM_HOSTS) as keepers:
        agents = []
        for host, keeper in enumerate(keepers):
            agent = ["-m", "helpers.host_agent", keeper, host, NUM_HOSTS, host_ranks.PER_HOST, *words]
            agents.append(
                forked.start([*map(str, agent)], ranks.log_folder(folder, host), ranks.environment(), Path.cwd())
            )
        deadline = time.monotonic() + SECONDS
        for agent in agents:
            agent.join(max(0.0, deadline - time.monotonic()))
        codes = [agent.exitcode for agent in agents]
        for agent in agents:
            agent.kill()
            agent.join()
    logs = [forked.output(ranks.log_folder(folder, host)) for host in range(NUM_HOSTS)]
    assert codes == [0] * NUM_HOSTS, logs
    return logs[0][0]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has found."""
    folder = tmp_path_factory.mktemp("torchrun")
    run_on_hosts(folder, ranks.HERE / "host_ranks.py", folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(host_ranks.WORLD_SIZE)]


def test_ranks_are_on_two_hosts(found: list[dict[str, Any]]) -> None:
    spaces = [one["namespace"] for one in found]
    assert spaces[0] == spaces[1] != spaces[2] == spaces[3]


@pytest.mark.parametrize(
    ("transport", "case"), [(name, case) for name, cases in host_ranks.CASES.items() for case in cases], ids=str
)
def test_two_hosts_equal_virtual_learners(transport: str, case: oracle.Case, found: list[dict[str, Any]]) -> None:
    """Bit for bit; so do ranks on one host (strategies/test_oracle.py)."""
    virtual = oracle.train(case)
    real = [one["results"][transport][tuple(case)] for one in found]
    assert torch.equal(torch.cat([one.weights for one in real]), virtual.weights)
    assert torch.equal(torch.cat([one.losses for one in real], dim=1), virtual.losses)


ROW = 4 * (host_ranks.SIZES[0] + 1) * host_ranks.SIZES[1]  # bytes of the weights


def counted(found: list[dict[str, Any]], host: int, transport: str) -> dict[str, list[int]]:
    """Bytes that a host has sent to the other one, and by its loopback device, by topology or strategy."""
    return found[host * host_ranks.PER_HOST]["bytes"][transport]


@pytest.mark.parametrize("transport", host_ranks.CASES)
@pytest.mark.parametrize("name", host_ranks.TOPOLOGIES)
def test_bytes_of_rows(name: str, transport: str, found: list[dict[str, Any]]) -> None:
    """A host sends what the topology says, and at most 2 % for headers, acknowledgements and two barriers.

    Rows for the own host go by its loopback device over a process group, and by no device if its ranks share memory.
    """
    per_host, topology = host_ranks.PER_HOST, host_ranks.TOPOLOGIES[name]()
    for host in range(NUM_HOSTS):
        own = range(host * per_host, (host + 1) * per_host)
        rounds = [topology.round(step, rank, 4) for step in range(host_ranks.STEPS) for rank in own]
        readers = [other for one in rounds for other in one.destinations]
        far = ROW * sum(other not in own for other in readers)
        near = ROW * sum(other in own for other in readers)
        between, inside = counted(found, host, transport)[name]
        assert near > 0
        assert far <= between <= 1.02 * far
        assert near <= inside if transport == "pg" else inside < 0.02 * ROW


@pytest.mark.parametrize("transport", host_ranks.CASES)
def test_bytes_of_averages_between_hosts(transport: str, found: list[dict[str, Any]]) -> None:
    """Nothing but the two averages of weights leaves a host if groups are hosts. A ring sends 2 * 3 / 4 of the weights.

    A first step sends a few numbers about the parameters, too.
    """
    average = 2 * 3 * ROW // 4
    for host in range(NUM_HOSTS):
        for name, number in (("ssgd", host_ranks.STEPS), ("local_sgd", 2), ("grouped", 2)):
            assert number * average <= counted(found, host, transport)[name][0] <= 1.02 * number * average, name


def test_hierarchies_send_less_between_hosts(found: list[dict[str, Any]]) -> None:
    """Than all to all: an edge of hosts is one message of each learner, not one to each learner of the other host."""
    for host in range(NUM_HOSTS):
        sent = counted(found, host, "pg")
        assert sent["hierarchical"][0] < 0.6 * sent["complete"][0]


def test_a_study_runs_on_two_hosts(tmp_path: Path) -> None:
    """All ranks share each row, and end where virtual learners do."""
    study = tmp_path / "study.toml"
    study.write_text(STUDY)
    words = ["-m", "ddpcore.experiments", "run", study]
    text = run_on_hosts(tmp_path, *words, "--out", tmp_path / "hosts")
    assert "ssgd, seed 0, 4 processes on 2 hosts: train_loss" in text
    ranks.succeeds(*words, "--out", tmp_path / "virtual")
    real, virtual = (Folder(tmp_path / name).results() for name in ("hosts", "virtual"))
    assert set(real) == set(virtual) == {("ssgd", 0), ("dpsgd", 0)}
    for key, result in real.items():
        assert result["place"] == "4 processes on 2 hosts"
        assert result["metrics"]["train_loss"] == pytest.approx(virtual[key]["metrics"]["train_loss"], rel=1e-5)
