"""``python -m ddpcore train`` as a user runs it, and ``python -m ddpcore``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpcore import __main__ as entry
from ddpcore.training import RunRecord, TrainConfig, train
from ddpcore.training.command import main
from helpers import ranks

RUN = ["model=mlp", "dataset=digits", "strategy=dpsgd", "optimizer_options.momentum=0.9", "epochs=2"]


def test_virtual_learners_and_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--out", str(tmp_path / "run"), *RUN, "learners=4"]
    assert main(words) == 0
    assert "finished step 20, accuracy" in capsys.readouterr().out
    config = RunRecord.read(tmp_path / "run").header["config"]
    assert (config["learners"], config["optimizer_options"]) == (4, {"momentum": 0.9})
    assert main(words) == 2  # the folder holds the run
    assert main([*words, "--resume"]) == 0


def test_ranks_as_a_user_starts_them(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "ddpcore", "train", "--world-size", "2", "--out", str(tmp_path / "run"), *RUN]
    done = subprocess.run(line, cwd=tmp_path, env=ranks.environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert RunRecord.read(tmp_path / "run").header["config"]["learners"] == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model=mlp", "epochs=1"], "--out is missing"),
        (["--out", "x", "modl=mlp"], "did you mean 'model'?"),
        (["--out", "x", "model=mlp"], "give exactly one"),
        (["--out", "x", "epochs"], "write KEY=VALUE"),
        (["--out", "x", "--join", "epochs=1"], "--join takes all settings from the run in --out: leave everything"),
        (["--out", "no-run", "--join"], "no-run/record.jsonl: there is no record of a run"),
        (["--out", "x", "--world-size", "2", "--timeout", "0", *RUN], "timeout is 0.0: it must be above 0"),
        (["--out", "x", "--world-size", "2", "timeout=-1", *RUN], "timeout is -1.0: it must be above 0"),
    ],
)
def test_refusals(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1


def test_a_misspelled_field_of_the_config() -> None:
    with pytest.raises(ValueError, match="TrainConfig has no 'optimiser': did you mean 'optimizer'"):
        TrainConfig(optimiser="sgd")  # type: ignore[call-arg]


def test_the_entry(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main([]) == 0
    text = capsys.readouterr().out
    assert text.startswith("examples:") and all(name in text for name in entry.COMMANDS)
    assert entry.main(["bnch"]) == 2
    assert "unknown command 'bnch'" in capsys.readouterr().err


def test_a_callback_gets_each_row_of_the_record(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    config = TrainConfig(model="mlp", dataset="digits", epochs=2)
    record = train(config, out=tmp_path, on_record=rows.append)
    assert [row["kind"] for row in rows] == ["epoch", "epoch", "end"]
    assert rows[:2] == record.epochs
    assert rows[2] == record.final


def test_an_error_of_the_callback_ends_the_run_and_the_row_is_kept(tmp_path: Path) -> None:
    def fail(row: dict[str, Any]) -> None:
        raise OSError("no network")

    with pytest.raises(OSError, match="no network"):
        train(TrainConfig(model="mlp", dataset="digits", epochs=2), out=tmp_path, on_record=fail)
    assert len(RunRecord.read(tmp_path).epochs) == 1
