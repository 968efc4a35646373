"""What the commands share: names, and the file that is written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpcore.bench import command_line


def test_names() -> None:
    assert command_line.names(" a, b,,") == ("a", "b")
    assert command_line.names(",") == ()


def test_the_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command_line.write_json(path, {"a": float("nan"), "b": [1, 2.5]})
    assert json.loads(path.read_text()) == {"a": None, "b": [1, 2.5]}
    with pytest.raises(TypeError):
        command_line.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": None, "b": [1, 2.5]}, "the old file survives a failed write"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.json"]
