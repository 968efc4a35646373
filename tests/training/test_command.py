"""``ddpcore train`` as a user runs it, and ``python -m ddpcore``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpcore import __main__ as entry
from ddpcore.runtime import launch
from ddpcore.training import RunRecord, TrainConfig, train
from ddpcore.training.__main__ import main
from ddpcore.training.config import describe_fields
from ddpcore.training.trainer import Trainer
from helpers import ranks

RUN = ["model=mlp", "data=digits", "strategy=dpsgd", "optimizer.momentum=0.9", "run.epochs=2"]


def test_virtual_learners_and_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--out", str(tmp_path / "run"), *RUN, "strategy.learners=4"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "finished step 20, accuracy" in said.out
    assert f"\nddpcore: threads: {RunRecord.read(tmp_path / 'run').header['threads']}\n" in said.err
    config = RunRecord.read(tmp_path / "run").header["config"]
    assert (config["strategy"]["learners"], config["optimizer"]["momentum"]) == (4, 0.9)
    assert main(words) == 2  # the folder holds the run
    assert main([*words, "--resume"]) == 0
    capsys.readouterr()
    assert main([*words, "run.epochs=3", "--resume"]) == 0
    assert ", going on after step 20 of 30\n" in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_as_a_user_starts_them(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "ddpcore", "train", "--world-size", "2", "--out", str(tmp_path / "run"), *RUN]
    done = subprocess.run(line, cwd=tmp_path, env=ranks.environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert RunRecord.read(tmp_path / "run").header["config"]["strategy"]["learners"] == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model=mlp", "run.epochs=1"], "--out is missing"),
        (["--out", "x", "modl=mlp"], "did you mean 'model'?"),
        (["--out", "x", "model=mlp"], "give exactly one"),
        (["--out", "x", "epochs"], "write KEY=VALUE"),
        (["--out", "x", "model=mlp", "epochs=3"], "a training run has no 'epochs': write run.epochs"),
        (["--out", "x", "model=mlp", "strategy_options.period=3"], "has no 'strategy_options': write strategy"),
        (["--fields", "nothing"], "--fields nothing: no field has this word"),
        (["--out", "x", "--join", "run.epochs=1"], "--join takes all settings from the run in --out: leave everything"),
        (["--out", "no-run", "--join"], "no-run/record.jsonl: there is no record of a run"),
        (
            ["--out", "x", "--world-size", "2", "strategy.timeout=0", *RUN],
            "strategy.timeout is 0.0: it must be above 0",
        ),
        (
            ["--out", "x", "--world-size", "2", "strategy.timeout=-1", *RUN],
            "strategy.timeout is -1.0: it must be above 0",
        ),
    ],
)
def test_refusals(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1


def test_options_that_learners_do_not_use_are_named_as_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before ranks start, and without a word of Python."""
    monkeypatch.setattr(launch, "run", lambda *_, **__: pytest.fail("ranks were started"))
    pg, link, mean = "strategy.transport=pg", "strategy.link=1Gb/s,1us", "strategy.policies.momentum=average"
    for num_ranks, words, says in (
        (
            1,
            ["strategy=ssgd", "strategy.learners=4", pg],
            "strategy.transport is 'pg': learners of one process",
        ),
        (2, ["strategy=ssgd", "strategy.learners=4", link], "strategy.link is '1Gb/s,1us': learners of one process"),
        (1, ["strategy=single", pg], "strategy.transport is 'pg': single does not use it"),
        (1, ["strategy=single", mean], "strategy.policies is {'momentum': 'average'}: single does not use it"),
        (2, ["strategy=ddp", link], "strategy.link is '1Gb/s,1us': ddp does not use it"),
        (2, ["strategy=ssgd", "strategy.policies.momentum=gossip"], "policy gossip needs neighbours and ssgd has none"),
    ):
        settings = ["model=mlp", "data=digits", "run.epochs=1", "run.device=cpu"]
        assert main(["--out", "x", "--world-size", str(num_ranks), *settings, *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"ddpcore train: {says}") and error.count("\n") == 1
    config = TrainConfig.from_dict({"run": {"epochs": 1}, "model": "mlp", "data": "digits",
                                    "strategy": {"name": "ssgd", "learners": 2, "transport": "pg"}})  # fmt: skip
    with pytest.raises(ValueError, match=r"strategy\.transport is 'pg'"):
        train(config, out="x")


def test_fields_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--fields"]) == 0
    every = capsys.readouterr().out.splitlines()
    assert len(every) == len(describe_fields()) > 60
    assert main(["--fields", "momentum"]) == 2
    assert main(["--fields", "checkpoint"]) == 0
    some = capsys.readouterr().out.splitlines()
    assert set(some) < set(every) and any(line.startswith("run.checkpoint_every: steps between") for line in some)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "(default: )" not in capsys.readouterr().out


def test_a_misspelled_field_of_the_config() -> None:
    with pytest.raises(ValueError, match="a training run has no 'optimiser': did you mean 'optimizer'"):
        TrainConfig(optimiser="sgd")  # type: ignore[call-arg]


def test_the_entry(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main([]) == 0
    text = capsys.readouterr().out
    assert text.startswith("examples:") and all(name in text for name in entry.COMMANDS)
    assert entry.main(["bnch"]) == 2
    assert "unknown command 'bnch'" in capsys.readouterr().err


def test_a_callback_gets_each_row_of_the_record(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    config = TrainConfig.from_dict({"model": "mlp", "data": "digits", "run": {"epochs": 2}})
    record = train(config, out=tmp_path, on_record=rows.append)
    assert [row["kind"] for row in rows] == ["epoch", "epoch", "end"]
    assert rows[:2] == record.epochs
    assert rows[2] == record.final


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint_every", [0, 7])
def test_rows_come_in_the_order_of_steps(
    checkpoint_every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics, Hessians and numbers that are not finite, with and without checkpoints between the checks."""
    rows: list[dict[str, Any]] = []
    config = TrainConfig.from_dict(
        {
            "model": "mlp",
            "data": {"name": "digits", "num_train": 200, "batch_size": 100},
            "strategy": {"name": "dpsgd", "topology": "ring", "learners": 2, "on_nonfinite": "skip"},
            "run": {"steps": 25, "statistics_every": 5, "checkpoint_every": checkpoint_every}
            | {"hessian_every": 3, "hessian_samples": 100, "hessian_top": 1},
        }
    )
    real, taken = Trainer.step, []

    def step(self: Trainer) -> Any:
        taken.append(1)
        if len(taken) in (4, 6, 13):
            parameter = next(self.handle.models[0].parameters())
            hook = parameter.register_hook(lambda grad: grad * float("nan"))
            try:
                return real(self)
            finally:
                hook.remove()
        return real(self)

    monkeypatch.setattr(Trainer, "step", step)
    record = train(config, out=tmp_path, on_record=rows.append)
    kinds = {row["kind"] for row in rows}
    assert kinds == {"epoch", "statistics", "hessian", "nonfinite", "end"}
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    assert [row["step"] for row in rows if row["kind"] == "nonfinite"] == [4, 6, 13]
    assert len(record.statistics) == 5


def test_an_error_of_the_callback_ends_the_run_and_the_row_is_kept(tmp_path: Path) -> None:
    def fail(row: dict[str, Any]) -> None:
        raise OSError("no network")

    with pytest.raises(OSError, match="no network"):
        train(
            TrainConfig.from_dict({"model": "mlp", "data": "digits", "run": {"epochs": 2}}),
            out=tmp_path,
            on_record=fail,
        )
    assert len(RunRecord.read(tmp_path).epochs) == 1
