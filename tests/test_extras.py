"""ddpcore without the packages of its extras, and with only some of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpcore import Star
from helpers import without_packages

pytestmark = pytest.mark.slow

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# jinja2 is not blocked: torch needs it too.
BLOCKED = {
    package
    for extra in ("train", "bench", "report")
    for package in EXTRAS[extra]
    if not package.startswith(("ddpcore", "jinja2"))
}


def without(*packages: str) -> dict[str, Any]:
    words = [sys.executable, without_packages.__file__, ",".join(packages)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def bare() -> dict[str, Any]:
    """What a process finds without any of the packages."""
    assert {"scipy", "rich", "safetensors", "matplotlib", "pooch", "h5py"} <= BLOCKED
    return without(*sorted(BLOCKED))


def test_training_needs_torch_and_numpy_alone(bare: dict[str, Any]) -> None:
    assert len(bare["trained"]) == 6
    assert all(found == [1, 3] for found in bare["trained"].values())
    assert bare["gap"][1] == pytest.approx(Star().spectral_gap(8))


def test_an_import_takes_little_more_than_that_of_torch(bare: dict[str, Any]) -> None:
    """No other package, and none of the parts of torch that torch itself imports late: they take as long as torch."""
    others = {name.partition(".")[0] for name in bare["imported"]} - {"ddpcore"}
    assert "ddpcore.optim.lamb" in bare["imported"]
    assert others <= sys.stdlib_module_names | {"numpy"}, others


def test_an_optimizer_is_there_without_the_compiler_of_torch() -> None:
    """Those of torch import it, which takes as long as torch: each command would, when it checks its options."""
    names = ("FusedSGD", "FusedAdamW", "FusedLARS", "FusedLAMB")
    code = "import sys, torch, ddpcore.optim\n" + "".join(
        f"ddpcore.optim.{name}([torch.nn.Parameter(torch.ones(2, 2))]); print('torch._dynamo' in sys.modules)\n"
        for name in names
    )
    words, environment = [sys.executable, "-c", code], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=900)
    assert done.stdout.split() == ["False"] * len(names), done.stderr


def test_what_needs_an_extra_names_it(bare: dict[str, Any]) -> None:
    assert bare["training"] == "safetensors is not installed: pip install 'ddpcore[train]'"


@pytest.mark.parametrize("command", [
    "bench", "bench comm", "experiments", "demo", "train", "training command", "report", "report command",
])  # fmt: skip
def test_a_command_says_in_one_line_which_extra_it_needs(command: str, bare: dict[str, Any]) -> None:
    code, error = bare[command]
    assert code == 2
    name = command.split()[0] if command in ("bench", "bench comm", "demo") else r"\w+"
    wanted = rf"ddpcore[. ]{name}: \w+ is not installed: pip install 'ddpcore\[(bench|train|report)\]'\n"
    assert re.fullmatch(wanted, error)


def test_every_package_that_the_code_names_is_in_that_extra() -> None:
    """``with extra(name):`` holds imports of packages that the extra, or one that it contains, installs."""
    used = re.compile(r'^( *)with extra\("(\w+)"\):\n((?:\1    .*\n)+)', re.MULTILINE)
    checked = set()
    for path in (ROOT / "ddpcore").rglob("*.py"):
        for _, name, body in used.findall(path.read_text()):
            packages = EXTRAS[name]
            for module in re.findall(r"^ +(?:from|import) ([\w.]+)", body, re.MULTILINE):
                package = module.removeprefix("torch.utils.").partition(".")[0]
                if package != "ddpcore":  # a module of ours, which imports packages of this extra
                    assert package in packages, f"{path}: {package} is not in the extra {name}"
                    checked.add(package)
    # rich is left out: without it, progress is shown as lines.
    trainers = {"lightning", "transformers", "accelerate"}
    assert checked == {"scipy", "safetensors", "pooch", "h5py", "matplotlib", *trainers}
