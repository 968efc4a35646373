"""``ddpcore doctor``: problems and advice from facts, and the command in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpcore.bench import __main__ as bench
from ddpcore.bench import findings
from ddpcore.bench.command import model_bytes
from ddpcore.models import MODELS
from ddpcore.storage.json_lines import read_json

WELL: dict[str, Any] = {
    "host": "a",
    "kernels": ["cpu"],
    "CUDA_HOME": None,
    "CUDA_HOME_has_nvcc": False,
    "nvcc": None,
    "gpus": 0,
    "cuda": None,
    "torch": "2.13.0",
    "shm_bytes": 2**33,
    "open_files": 65536,
}
FAST = {"hosts": ["a", "b"], "interface": "eth0", "bytes_per_s": 3e9, "latency_s": 2e-5}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None),
        ({"kernels": []}, "the kernels are not built"),
        ({"CUDA_HOME": "/x"}, "CUDA_HOME is /x, which has no bin/nvcc: unset CUDA_HOME"),
        ({"CUDA_HOME": "/x", "nvcc": "/usr/local/cuda/bin/nvcc"}, "export CUDA_HOME=/usr/local/cuda"),
        ({"CUDA_HOME": "/x", "CUDA_HOME_has_nvcc": True}, None),
        ({"gpus": 1}, "is built without CUDA, on a host with a GPU"),
        ({"gpus": 1, "cuda": "13.0"}, "no kernels for the GPU: install the CUDA toolkit, then DDPCORE_CUDA=1"),
        ({"gpus": 1, "cuda": "13.0", "nvcc": "/x/bin/nvcc"}, "no kernels for the GPU: nvcc is there: DDPCORE_CUDA=1"),
        ({"gpus": 1, "cuda": "13.0", "kernels": ["cpu", "cuda"]}, "benchmarks/run_gpu.sh OUT (docs/gpu.md)"),
        ({"shm_bytes": 2**20}, "/dev/shm has 1 MiB, too small"),
        ({"open_files": 256}, "a process may open 256 files only: ulimit -n 65536"),
        ({"open_files": -1}, None),  # no limit
    ],
)
def test_problems_of_a_host(changed: dict[str, Any], words: str | None) -> None:
    found = findings.of_host({**WELL, **changed})
    assert len(found) == (words is not None)
    assert words is None or (found[0].startswith("a: ") and words in found[0] and "\n" not in found[0])


def test_slow_ranks_and_links() -> None:
    assert findings.slow_ranks([0.1, 0.11, 0.12, 0.1], "aabb") == []
    (slow,) = findings.slow_ranks([0.1, 0.3, 0.1], "abc")
    assert slow.startswith("rank 1 on b is slow: 300 ms for work that takes 100 ms elsewhere")
    assert len(findings.slow_ranks([0.2, 0.4], "ab")) == 1  # of two, the faster one is the measure
    assert findings.slow_ranks([0.001, 0.005, 0.001], "abc") == []  # four milliseconds are noise
    assert findings.slow_links([FAST]) == []
    (line,) = findings.slow_links([FAST, {**FAST, "bytes_per_s": 100e6 / 8}])
    assert line.startswith("the link between a and b carries 100 Mb/s over eth0")
    assert findings.slow_links([{**FAST, "hosts": ["a", "a"], "bytes_per_s": 1e3}]) == []


def test_costs_by_hand() -> None:
    """Four ranks, 100 MB, a step of 0.3 s, 1 Gb/s: a ring takes 1.5 x 0.8 s, and gossip 0.8 s."""
    link = {"bytes_per_s": 1e9 / 8, "latency_s": 0.0}
    found = findings.costs(1e8, 0.3, 4, link)
    assert found["dpsgd"] == pytest.approx(0.8 - 0.3)
    assert 1.2 - 0.2 <= found["ssgd"] <= 1.2 - 0.1  # it begins in the backward pass of 0.2 s
    assert found["period"] == 36  # 9 x 1.2 / 0.3
    assert found["local_sgd"] == pytest.approx(1.2 / 36)
    assert found["take"].startswith("take LocalSGD(period=36)")
    assert findings.costs(1e8, 1.0, 4, link)["take"].startswith("take DPSGD")
    assert findings.costs(1e8, 30.0, 4, link)["take"].startswith("take SSGD")


def test_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert bench.main(["doctor", "--json", str(tmp_path / "found.json"), "--wide"]) == 0
    printed = capsys.readouterr().out
    assert "one process: start ddpcore doctor by torchrun on all hosts" in printed
    assert f"CUDA_HOME is {tmp_path}, which has no bin/nvcc" in " ".join(printed.split())
    result = read_json(tmp_path / "found.json")
    assert result["rows"] == [] and result["costs"] is None and len(result["hosts"]) == 1


def test_the_size_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert model_bytes("mlp") == sum(4 * one.numel() for one in MODELS.build("mlp").parameters())
    assert bench.main(["doctor", "--model", "mlp", "--parameters", "3"]) == 2
    assert capsys.readouterr().err == (
        "ddpcore doctor: --model and --parameters both say how large the model is: give one\n"
    )
