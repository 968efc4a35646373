"""What the commands share: names, and the file that is written whole or not at all."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from ddpcore.bench import command_line


def test_names() -> None:
    assert command_line.names(" a, b,,") == ("a", "b")
    assert command_line.names(",") == ()


def test_settings() -> None:
    text = "hidden=512x256, dropout=0.1,width=7,kind=fast"
    assert command_line.settings(text) == {"hidden": (512, 256), "dropout": 0.1, "width": 7, "kind": "fast"}
    for wrong in ("hidden", "=5"):
        with pytest.raises(argparse.ArgumentTypeError, match="not of the form key=value"):
            command_line.settings(wrong)


def test_the_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command_line.write_json(path, {"a": float("nan"), "b": [1, 2.5]})
    assert json.loads(path.read_text()) == {"a": None, "b": [1, 2.5]}
    with pytest.raises(TypeError):
        command_line.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": None, "b": [1, 2.5]}, "the old file survives a failed write"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.json"]
