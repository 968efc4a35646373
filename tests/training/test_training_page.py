"""The examples of docs/training.md run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ddpcore.training import RunRecord, TrainConfig

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "training.md"
BLOCKS = re.findall(r"(?<!-->\n)```python\n(.*?)```", PAGE.read_text(), re.DOTALL)  # none that says "not run"


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    run, ranks, overrides = BLOCKS
    exec(run, names)
    record = RunRecord.read(Path("runs/first"))
    assert record.final["step"] == 50
    assert record.epochs[0]["train_loss"] > record.epochs[-1]["train_loss"]
    assert capsys.readouterr().out.startswith("50 ")
    exec(overrides, names)
    assert isinstance(names["row"], TrainConfig) and names["row"].data.batch_size == 200
    compile(ranks, "ranks", "exec")


def test_the_folder_is_as_it_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(BLOCKS[0], {})
    drawn = re.search(r"```text\nruns/first/\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert drawn is not None
    for name in ("record.jsonl", "model.safetensors", "checkpoints/step-00000050/manifest.json"):
        assert Path("runs/first", name).is_file()
        assert name.split("/")[-1] in drawn[1]
