"""A user's program passes mypy --strict, and type checkers find the types of ddpcore where it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "tests" / "typing" / "program.py"


def strictly(program: Path) -> str:
    """The report of mypy. Modules of ddpcore are read as those of an installed package: their errors do not count."""
    words = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--config-file="]
    cache = ROOT / ".mypy_cache" / "strict"
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    done = subprocess.run(
        [*words, f"--cache-dir={cache}", str(program)], env=environment, capture_output=True, text=True, timeout=600
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_program_passes() -> None:
    assert strictly(PROGRAM) == "Success: no issues found in 1 source file\n"


@pytest.mark.slow
def test_a_wrong_program_does_not(tmp_path: Path) -> None:
    """Otherwise the names would have no types."""
    wrong = tmp_path / "wrong.py"
    text = PROGRAM.read_text()
    changes = (
        ("learners=8", 'learners="8"'),
        ('ModelConfig(name="mlp")', "ModelConfig(name=1)"),
        ("lr=0.1, momentum", 'lr="x", momentum'),
    )
    for right, mistake in changes:
        assert text.count(right) == 1
        text = text.replace(right, mistake)
    wrong.write_text(text)
    report = strictly(wrong)
    assert report.count(" error: ") == len(changes), report
    assert report.count("[arg-type]") == len(changes), report


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "ddpcore" / "py.typed").read_text() == ""
