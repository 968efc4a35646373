"""``ddpcore bench comm``: sizes, expected values, columns, and small runs."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpcore import RandomPair, Ring
from ddpcore.bench import comm
from ddpcore.bench.comm import OPERATIONS, Operation, num_wrong, pieces, row_of, sizes
from helpers import ranks
from helpers.drawn import words_drawn

KiB, MiB = 2**10, 2**20
ROW = {
    "op", "transport", "size_bytes", "count", "type", "time_us", "algbw_gb_per_s", "busbw_gb_per_s", "num_wrong",
    "repeats",
}  # fmt: skip


def test_sizes() -> None:
    assert sizes(256) == [32 * KiB, 256 * KiB, 2 * MiB, 16 * MiB, 128 * MiB, 256 * MiB]
    assert sizes(2) == [32 * KiB, 256 * KiB, 2 * MiB]
    assert sizes(1 / 32) == [32 * KiB]


def test_wrong_elements_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong elements count in every piece; a shifted row is wrong too."""
    monkeypatch.setattr(comm, "PIECE", 1000)
    row = torch.empty(2600)
    for piece, values in pieces(row):
        piece.copy_(values + 3)
    assert torch.equal(row, torch.arange(2600) % 251 + 3.0)
    assert num_wrong(row, 3) == 0
    assert num_wrong(row, 2) == 2600
    assert num_wrong(row.roll(1), 3) == 2600
    row[[0, 999, 1000, 2599]] += 0.5
    row[5] = torch.nan
    assert num_wrong(row, 3) == 5


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_expected_values(world_size: int) -> None:
    """A mix returns W times the ranks, an exchange the neighbours' ranks, an average the mean of all ranks."""
    numbers = torch.arange(world_size, dtype=torch.float64)
    ring, pair = Ring(), RandomPair(seed=0)
    for rank in range(world_size):
        assert Operation("all-reduce").offsets(rank, world_size, 0) == [numbers.mean().item()]
        for graph in (ring, pair):
            for step in range(3):
                row = torch.as_tensor(graph.matrix(step, world_size), dtype=torch.float64)[rank]
                (mixed,) = Operation("mix", graph, mixes=True).offsets(rank, world_size, step)
                assert mixed == pytest.approx(float(row @ numbers))
                others = [k for k in range(world_size) if k != rank and row[k] != 0]
                assert sorted(Operation("exchange", graph).offsets(rank, world_size, step)) == others


def test_rows() -> None:
    """A hundred repeats of 1 s and one of 2 s; with four ranks busbw is 3/2 of algbw, as in nccl-tests."""
    shape = torch.empty(1, 2**20)
    lane: Any = SimpleNamespace(transport="pg", rows=shape, comm=SimpleNamespace(num_learners=4))
    row = row_of(OPERATIONS[0], lane, [1.0] * 100 + [2.0], 7)
    assert set(row) == ROW
    assert (row["size_bytes"], row["count"], row["type"], row["num_wrong"]) == (4 * MiB, MiB, "float", 7)
    assert row["repeats"] == 101
    assert row["time_us"] == {"p50": 1e6, "p99": 1e6}
    assert row["algbw_gb_per_s"] == pytest.approx(4 * MiB / 1e9)
    assert row["busbw_gb_per_s"] == pytest.approx(1.5 * 4 * MiB / 1e9)
    assert row_of(OPERATIONS[0], lane, [1.0, 2.0], 0)["time_us"]["p99"] == pytest.approx(1.99e6)
    assert [operation.bus_factor(4) for operation in OPERATIONS] == [1.5, 1, 2, 1, 2]
    assert [operation.bus_factor(3) for operation in OPERATIONS][1:3] == [1, 2], "the idle one does not count"


REFUSED = [
    ("--world-size 1", "communication needs two ranks"),
    ("--world-size -1", "--world-size is -1"),
    ("--max-mib 0", "--max-mib is 0"),
    ("--max-mib 0.001", "--max-mib is 0.001: it must be at least 0.03125"),
    ("--max-mib inf", "--max-mib is inf"),
    ("--max-mib 100000000", "GB are free: take --max-mib"),
    ("--seconds 0", "--seconds is 0"),
    ("--transport auto", "--transport is 'auto': choose from shm, ipc, pg, mixed"),
    ("--transport pg,pg", "--transport names one twice"),
    ("--transport ipc", "--transport ipc is for cuda"),
    ("--device tpu", "--device is 'tpu'"),
    ("--json nowhere/out.json", "does not exist"),
    ("--model mlp", "--model"),
]


@pytest.mark.parametrize(("line", "says"), REFUSED, ids=[line for line, _ in REFUSED])
def test_refused(line: str, says: str, refused: Callable[[str, str], None]) -> None:
    refused(f"comm {line}", says)


def alone(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    words = ["-m", "ddpcore.bench", *words, "--world-size", "2"]
    return ranks.python(*words, cwd=folder, CUDA_VISIBLE_DEVICES="")


def torchrun(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Two processes with torchrun's variables; test_launch.py starts torchrun itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def rank(number: str) -> subprocess.CompletedProcess[str]:
        world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        place = {"RANK": number, "LOCAL_RANK": number, "CUDA_VISIBLE_DEVICES": ""}
        return ranks.python("-m", "ddpcore.bench", *words, cwd=folder, **world, **place)

    with ThreadPoolExecutor() as pool:
        first, second = pool.map(rank, "01")
    assert (second.returncode, second.stdout) == (0, "")
    return first


@pytest.mark.parametrize("start", [alone, torchrun], ids=lambda start: start.__name__)
def test_two_ranks(start: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """Without and with torchrun: every operation over both transports receives correct values."""
    done = start(["comm", "--max-mib", "0.25", "--seconds", "0.01", "--wide", "--json", "out.json"], tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert set(result) - {"checksum"} == {"environment", "world_size", "rows"}
    assert result["world_size"] == 2
    expected = {
        (operation.name, transport, size)
        for operation in OPERATIONS
        for transport in ("shm", "pg")
        for size in (32 * KiB, 256 * KiB)
    }
    assert {(row["op"], row["transport"], row["size_bytes"]) for row in result["rows"]} == expected
    assert len(result["rows"]) == len(expected)
    for row in result["rows"]:
        assert set(row) == ROW
        assert row["num_wrong"] == 0
        assert row["repeats"] >= comm.FEWEST
        assert 0 < row["time_us"]["p50"] <= row["time_us"]["p99"]
    for column in ("algbw GB/s", "busbw GB/s", "#wrong", "exchange ring"):
        assert column in done.stdout
    assert words_drawn(result, tmp_path) >= {"Bandwidth: all-reduce", "shm", "pg"}
