"""tools/release_check.py reports what does not pass, and writes its table into a page. Nothing is installed here."""

from __future__ import annotations

import importlib.util
import re
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tools" / "release_check.py"
PYTHON = ["--python", f"{sys.version_info.major}.{sys.version_info.minor}"]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, in a folder with a wheel, where every command succeeds."""
    spec = importlib.util.spec_from_file_location("release_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "dist").mkdir()
    with zipfile.ZipFile(tmp_path / "dist" / "ddpcore-0-cp310-abi3-linux_x86_64.whl", "w") as archive:
        archive.writestr("ddpcore/__init__.py", "")
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "page.md").write_text(f"before\n{module.BEGIN}\nold\n{module.END}\nafter\n")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module.importlib.metadata, "version", lambda package: "1")
    monkeypatch.setattr(
        sys, "argv", ["release_check", "--torch", "2.10.0,2.13.0", "--write", str(tmp_path / "page.md"), *PYTHON]
    )
    monkeypatch.setenv("DDPCORE_CUDA", "0")
    return module


def commands(module: ModuleType, monkeypatch: pytest.MonkeyPatch, fails: str = "nothing") -> list[str]:
    """Replace commands: those that contain ``fails`` fail. Returns the list of those that are run."""
    seen: list[str] = []

    def run(*words: object, cwd: Path = ROOT, log: Path | None = None) -> tuple[bool, str]:
        seen.append(" ".join(map(str, words)))
        if log is not None:
            log.touch()
        passed = fails not in seen[-1]
        return passed, "3 passed in 1.00s" if passed else "1 failed, 2 passed in 1.00s"

    monkeypatch.setattr(module, "run", run)
    return seen


def test_what_passes_is_written_into_the_page(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = commands(script, monkeypatch)
    assert script.main() == 0
    page = (script.ROOT / "page.md").read_text()
    assert page.startswith("before\n") and page.endswith("\nafter\n") and "old" not in page
    rows = [line for line in page.splitlines() if line.startswith("| ddpcore-0-cp310")]
    assert len(rows) == 2 and all("| yes | passes | 3 passed in 1.00s |" in row for row in rows)
    assert sum("twine check --strict" in words for words in seen) == 1
    assert sum("torch-abi-audit --check torch" in words for words in seen) == 1


def test_other_pythons_meet_the_newest_torch_that_they_install(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "interpreter_of", lambda release: None if release == "3.14" else f"python{release}")
    monkeypatch.setattr(script, "THIS_PYTHON", "3.11")
    commands(script, monkeypatch, "torch-2.13.0-py3.10/bin/python -m pip install")
    pairs = script.pairs_of(["2.10.0", "2.13.0"], ["3.10", "3.11", "3.14"], None)
    none = "no such Python here"
    assert pairs == [("2.10.0", "3.10", ""), ("2.10.0", "3.11", ""), ("2.13.0", "3.11", ""), ("2.13.0", "3.14", none)]
    assert script.VERSIONS[-1] == "2.15.0" and script.PYTHONS[-1] == "3.14"
    row = script.check_install(Path("ddpcore.whl"), *pairs[-1], None)
    assert row["installs"] == f"not checked: {none}" and row["Python"] == "3.14"


def test_a_torch_that_this_python_cannot_install_is_an_error(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "environment_of", lambda *pair: None)
    commands(script, monkeypatch)
    assert script.main() == 1
    assert "torch 2.13.0: does not pass" in capsys.readouterr().err


@pytest.mark.parametrize(
    "fails", ["twine", "torch-abi-audit", "pip install -q --no-cache-dir", "smoke.py", "pytest -q"]
)
def test_what_fails_is_an_error(
    fails: str, script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands(script, monkeypatch, fails)
    assert script.main() == 1
    assert "does not pass" in capsys.readouterr().err


def test_a_large_wheel_is_an_error(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands(script, monkeypatch)
    monkeypatch.setattr(script, "MAX_WHEEL_BYTES", 10)
    assert script.main() == 1
    assert "is larger than" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [("--cuda 12", "run 'make wheel CUDA=12' first"), ("--only sdist", "run 'make wheel sdist' first")],
)
def test_nothing_to_check(words: str, says: str, script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["release_check", *words.split()])
    with pytest.raises(SystemExit, match=re.escape(says)):
        script.main()


def test_the_suite_exists_and_the_page_has_a_place_for_the_table(script: ModuleType) -> None:
    assert all((ROOT / "tests" / name).exists() for name in script.SUITE)
    page = (ROOT / "docs" / "compatibility.md").read_text()
    assert page.count(script.BEGIN) == page.count(script.END) == 1
