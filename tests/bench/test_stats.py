"""``ddpcore bench stats``: contenders, errors, and a small run."""

from __future__ import annotations

import json

import pytest

from ddpcore.bench.__main__ import main
from ddpcore.bench.stats import WATCHED, StatsConfig
from helpers.drawn import words_drawn


def test_a_run(tmp_path, capsys):
    file = tmp_path / "stats.json"
    words = "stats --backend virtual model=mlp data.batch_size=8 --world-size 2 --every 2 --blocks 2"
    words += " --strategies dpsgd --json"
    assert main([*words.split(), str(file)]) == 0
    assert "a record every 2 steps" in " ".join(capsys.readouterr().out.split())
    result = json.loads(file.read_text())
    rows = {row["statistics"]: row for row in result["rows"]}
    assert list(rows) == list(WATCHED)
    assert rows["off"]["num_records"] == rows["off again"]["num_records"] == 0
    assert rows["free"]["num_records"] == rows["all"]["num_records"] > 1
    assert all(row["step_ms"]["p50"] > 0 for row in rows.values())
    assert rows["off"]["overhead_pct"]["p50"] == 0.0
    assert words_drawn(result, tmp_path) >= {"Overhead of statistics", "free", "all"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--every 0", "--every is 0"),
        ("--blocks 0", "--blocks is 0"),
        ("--world-size 1", "needs two batches"),
        ("--strategies push_sum", "--strategies: push_sum trains no mean that statistics could follow: take ssgd"),
        ("--strategies ddp", "--strategies: ddp trains no mean"),
        ("--strategies sgd", "--strategies: unknown strategy 'sgd'"),
        ("--strategies ssgd,dpsgd", "--strategies has 2 names: give one"),
        ("model=gpt", "model: unknown model 'gpt'"),
        ("--backend mpi", "--backend is 'mpi'"),
        ("run.device=tpu", "run.device is 'tpu'"),
        ("data.batch_size=3", "batch size 3"),
        ("--json /", "is a folder"),
    ],
)
def test_refusals(words, message, capsys):
    assert main(["stats", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ddpcore bench stats: ") and message in error and error.count("\n") == 1


def test_defaults_are_those_of_the_goal():
    config = StatsConfig()
    training = config.train_config("ssgd")
    assert (training.model.name, training.data.batch_size, config.every) == ("lenet5", 4 * 256, 50)
