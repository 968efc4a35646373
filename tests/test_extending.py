"""``docs/extending.md``: its files make a package outside of the repository, and every command of it runs there."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from helpers import ranks

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the page."""
    root = tmp_path_factory.mktemp("extending")
    for kind, text in BLOCKS:
        if kind != "sh":
            name = text.split("\n")[0].removeprefix("#").removeprefix("//").strip()
            path = root / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    return root


def test_the_page_has_files_and_commands() -> None:
    assert len(COMMANDS) >= 10
    assert {kind for kind, _ in BLOCKS} == {"python", "cpp", "toml", "sh"}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, folder: Path) -> None:
    """In the order of the page: a later command may need what an earlier one wrote."""
    words, more = command.split(), {"TORCH_EXTENSIONS_DIR": str(ROOT / "build" / "extensions")}
    if words[0].startswith("PYTHONPATH="):
        more |= {"PYTHONPATH": os.pathsep.join((str(folder / "installed"), ranks.environment()["PYTHONPATH"]))}
        del words[0]
    assert words[0] in ("python", "ddpcore")
    start = ("-m", "ddpcore") if words[0] == "ddpcore" else ()
    done = ranks.python(*start, *words[1:], cwd=folder, timeout=900.0, **more)
    assert done.returncode == 0, done.stdout + done.stderr
