"""The command ``ddpcore``: its version, its typing errors, and a Python without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

import ddpcore
from ddpcore.__main__ import COMMANDS, main
from helpers.ranks import environment

ROOT = Path(__file__).resolve().parent.parent


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ddpcore {ddpcore.__version__}\n"


@pytest.mark.parametrize(
    ("word", "remedy"), [("bnech", "did you mean 'bench'?"), ("zzz", f"choose from {', '.join(COMMANDS)}")]
)
def test_an_unknown_command_names_the_nearest(word, remedy, capsys):
    assert main([word]) == 2
    assert capsys.readouterr().err == f"ddpcore: unknown command {word!r}: {remedy}\n"


def without_torch(*words):
    """Run a Python that sees no installed package."""
    return subprocess.run([sys.executable, "-S", *words], cwd=ROOT, capture_output=True, text=True, timeout=900)


def test_a_command_without_torch_prints_one_line():
    found = without_torch("-m", "ddpcore", "demo")
    assert found.returncode == 1
    assert found.stderr.count("\n") == 1 and f"ddpcore: {sys.executable} has no torch: " in found.stderr
    assert "source .venv/bin/activate" in found.stderr


def test_an_import_without_torch_is_an_import_error():
    found = without_torch("-c", "import ddpcore")
    assert found.stderr.splitlines()[-1].startswith(f"ModuleNotFoundError: ddpcore: {sys.executable} has no torch")


@pytest.mark.slow
def test_a_part_of_the_current_folder_has_a_name(tmp_path):
    """The installed script begins with its own folder on the path, ``python -m`` with the current one."""
    (tmp_path / "mine.py").write_text("from ddpcore import Ring\n\n\nclass Mine(Ring):\n    pass\n")
    script = tmp_path / "bin" / "ddpcore"
    script.parent.mkdir()
    script.write_text("import sys\nfrom ddpcore.__main__ import main\nsys.exit(main())\n")
    line = [sys.executable, script, "bench", "topology", "mine:Mine", "--world-size", "4"]
    done = subprocess.run(line, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and "mine:Mine" in done.stdout, done.stderr
