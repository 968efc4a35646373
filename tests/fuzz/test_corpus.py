"""The inputs that the fuzzers began with or found: each is read or refused in one line, in bounded memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("safetensors")
pytest.importorskip("h5py")
from fuzz.targets import TARGETS

pytestmark = pytest.mark.slow

CORPUS = Path(__file__).resolve().parent / "corpus"


@pytest.mark.parametrize("target", TARGETS)
def test_the_corpus(target: str) -> None:
    inputs = sorted((CORPUS / target).iterdir())
    assert inputs
    for path in inputs:
        TARGETS[target](path.read_bytes())


def test_the_corpus_is_small_and_no_input_is_left_out() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
    assert sum(path.stat().st_size for path in CORPUS.rglob("*")) < 200_000


def test_a_defect_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that raises anything but one printable line is a defect."""
    for error in (TypeError("x"), ValueError("two\nlines"), ValueError("\x1b[31m")):

        def fail(*words: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr("ddpcore.data.mnist._parse", fail)
        with pytest.raises((TypeError, AssertionError)):
            TARGETS["idx"](b"")


def test_without_atheris_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "atheris.py").write_text("raise ImportError")
    script = CORPUS.parent / "fuzz.py"
    words = [sys.executable, "-c", f"import runpy, sys; sys.path.insert(0, {str(tmp_path)!r}); "
             f"sys.argv = ['fuzz.py']; runpy.run_path({str(script)!r}, run_name='__main__')"]  # fmt: skip
    ended = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2 and "pip install atheris" in ended.stdout
