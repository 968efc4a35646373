"""tools/wheels.py builds the plain wheel and those for CUDA into one folder. Nothing is compiled or installed here."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "tools" / "wheels.py"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The script in a folder with a source distribution, whose commands are written down and not run."""
    names = runpy.run_path(str(SCRIPT))
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "ddpcore-9.tar.gz").touch()
    seen: list[tuple[str, dict[str, str]]] = []
    built_for = {sys.executable: "None"}

    def output(*words: object, **variables: str) -> str:
        line = " ".join(map(str, words))
        seen.append((line, variables))
        if "pip wheel" in line:
            local = variables["DDPCORE_LOCAL_VERSION"]
            (tmp_path / "dist" / f"ddpcore-9{local and '+'}{local}-cp310-abi3-linux_x86_64.whl").touch()
        if "torch.version.cuda" in line:
            return built_for.get(str(words[0]), "13.0")
        return "Cuda compilation tools, release 13.0, V13.0.88" if "--version" in line else "/packages/nvidia/cu13"

    for name, value in {"ROOT": tmp_path, "output": output}.items():
        monkeypatch.setitem(names["main"].__globals__, name, value)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    return names | {"seen": seen}


def run(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    """The names of the wheels that the script has built."""
    monkeypatch.setattr(sys, "argv", ["wheels", *words])
    script["main"]()
    return sorted(path.name for path in (script["main"].__globals__["ROOT"] / "dist").glob("*.whl"))


def test_one_folder_holds_all_and_the_script_says_how_to_choose(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    (tmp_path / "cuda" / "bin" / "nvcc").touch()
    tag = "cp310-abi3-linux_x86_64.whl"
    assert run(script, monkeypatch, "13") == [f"ddpcore-9+cu13-{tag}", f"ddpcore-9-{tag}"]
    plain, cuda = (variables for line, variables in script["seen"] if "pip wheel" in line)
    assert plain == {"DDPCORE_CUDA": "0", "DDPCORE_LOCAL_VERSION": ""}
    assert cuda == {"DDPCORE_CUDA": "1", "DDPCORE_LOCAL_VERSION": "cu13", "CUDA_HOME": str(tmp_path / "cuda")}
    installed = [line for line, _ in script["seen"] if "pip install" in line]
    assert len(installed) == 1 and "torch==" in installed[0]  # this torch has no CUDA, and the compiler is there
    printed = capsys.readouterr().out.splitlines()[-2:]
    assert printed == [f"pip install --find-links dist ddpcore=={end}" for end in ("=9", "9+cu13")]


def test_the_compiler_comes_from_packages_where_no_toolkit_fits(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.glob
    monkeypatch.setattr(Path, "glob", lambda self, name: [] if self == Path("/usr/local") else real(self, name))
    run(script, monkeypatch, "13")
    assert any("nvidia-cuda-nvcc==13.0.*" in line for line, _ in script["seen"])
    assert script["seen"][-1][1]["CUDA_HOME"] == "/packages/nvidia/cu13"


def test_a_missing_toolkit_is_said_before_anything_is_downloaded_or_built(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=re.escape("no nvcc of CUDA 12, and PyPI has none")):
        run(script, monkeypatch, "13", "12")
    assert not any("pip" in line for line, _ in script["seen"])
    assert not list((tmp_path / "dist").glob("*.whl"))


def test_no_source_distribution(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "dist" / "ddpcore-9.tar.gz").unlink()
    with pytest.raises(SystemExit, match="run 'make sdist' first"):
        run(script, monkeypatch)
