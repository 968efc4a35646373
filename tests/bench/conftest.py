"""Fixtures for the tests of the command line: the error of a command that cannot run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpcore.bench import __main__ as bench
from ddpcore.bench.commands import COMMANDS
from ddpcore.display import chart
from ddpcore.runtime import launch


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder, no GPU, no torchrun; starting a bench is an error."""

    def refuse(*args: Any, **more: Any) -> None:
        raise AssertionError("a command that cannot run was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "run", refuse)
    monkeypatch.setattr(chart, "find_spec", lambda name: name)  # matplotlib may be missing, which is another refusal
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def refused(no_launch: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str, str], None]:
    """``refused(line, says)``: exit code 2, one line on standard error, nothing written, nothing started."""

    def check(line: str, says: str) -> None:
        words = line.split()
        assert bench.main(words) == 2
        out, errors = capsys.readouterr()
        assert not out
        assert errors.count("\n") == 1, errors
        command = f" {words[0]}" if words and words[0] in COMMANDS else ""
        assert errors.startswith(f"ddpcore bench{command}: ")
        assert says in errors
        assert not list(tmp_path.iterdir())

    return check
