"""What the commands share: names, and the file that is written whole or not at all."""

from __future__ import annotations

import argparse

import pytest

from ddpcore.options import command_line


def test_names() -> None:
    assert command_line.names(" a, b,,") == ("a", "b")
    assert command_line.names(",") == ()


def test_settings() -> None:
    text = "hidden=512x256, dropout=0.1,width=7,kind=fast"
    assert command_line.settings(text) == {"hidden": (512, 256), "dropout": 0.1, "width": 7, "kind": "fast"}
    for wrong in ("hidden", "=5"):
        with pytest.raises(argparse.ArgumentTypeError, match="not of the form key=value"):
            command_line.settings(wrong)
