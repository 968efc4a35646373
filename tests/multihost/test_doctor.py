"""``ddpcore doctor`` on two hosts, of which one has five problems: it names all five, within 30 s."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from helpers import forked, hosts, ranks

pytestmark = pytest.mark.slow

SECONDS = 120.0  # the test machine is busy


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The JSON file and what rank 0 has printed."""
    folder = tmp_path_factory.mktemp("doctor")
    with hosts.networks(2) as keepers:
        started = []
        for host, keeper in enumerate(keepers):
            words = ["-m", "helpers.doctor_host", str(folder), str(host), str(keeper)]
            started.append(forked.start(words, ranks.log_folder(folder, host), ranks.environment(), Path.cwd()))
        deadline = time.monotonic() + SECONDS
        for one in started:
            one.join(max(0.0, deadline - time.monotonic()))
        codes = [one.exitcode for one in started]
        for one in started:
            one.kill()
            one.join()
    logs = ["".join(forked.output(ranks.log_folder(folder, host))) for host in range(2)]
    assert codes == [0, 0], "\n".join(logs)
    return json.loads((folder / "found.json").read_text()), logs[0]


def test_all_five_problems_are_named(found: tuple[dict[str, Any], str]) -> None:
    result, printed = found
    problems = result["problems"]
    expected = [
        "node1: the kernels are not built, so slow Python code runs: pip install",
        "node1: CUDA_HOME is /nowhere, which has no bin/nvcc: ",
        "node1: /dev/shm has 1 MiB, too small for ranks that share memory: mount -o remount,size=8G /dev/shm",
        "rank 1 on node1 is slow: ",
        "the link between node0 and node1 carries ",
    ]
    for words in expected:
        assert any(problem.startswith(words) for problem in problems), (words, problems)
    assert not any(problem.startswith("node0") for problem in problems), problems
    assert all(f"problem: {problem[:40]}" in printed for problem in problems)


def test_the_link_and_the_advice(found: tuple[dict[str, Any], str]) -> None:
    """100 Mb/s one way and a fast network the other: the mean of a round trip is below 200 Mb/s."""
    result, printed = found
    (link,) = result["rows"]
    assert 40 < 8e-6 * link["bytes_per_s"] < 230 and link["interface"] == hosts.device(0)
    costs = result["costs"]
    assert costs["ssgd"] > 1 and costs["dpsgd"] > 1  # 120 MB
    assert costs["take"].startswith(f"take LocalSGD(period={costs['period']}") and costs["take"][:20] in printed
    assert costs["local_sgd"] <= 0.1 * (0.1 + costs["local_sgd"]) * 1.001
