"""``tools/base_python``: which Python makes ``.venv``, of the first in PATH and the distribution's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DISTRIBUTED = "/usr/bin/python3"
WHOLE = "import os, sysconfig, ensurepip, venv; print(os.path.exists(sysconfig.get_path('include') + '/Python.h'))"


def output_of(python: str, code: str) -> str:
    try:
        return subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


@pytest.mark.skipif(sys.platform != "linux", reason="another system has no distribution's Python")
@pytest.mark.skipif(output_of(DISTRIBUTED, WHOLE) != "True", reason=f"{DISTRIBUTED} is missing, or has no headers")
@pytest.mark.parametrize(
    ("is_plain", "is_same", "expected"),
    [(True, True, DISTRIBUTED), (True, False, "python3"), (False, True, "python3")],
)
def test_the_distributions_python_takes_the_place_of_a_plain_one(
    is_plain: bool, is_same: bool, expected: str, tmp_path: Path
) -> None:
    """Of the same version alone. The first python3 in PATH answers here as one that was compiled plainly, or not."""
    version = output_of(DISTRIBUTED, "import sys; print(sys.version_info[:2])") if is_same else "(3, 0)"
    first = tmp_path / "python3"
    answers = f'case "$2" in *base_prefix*) exit {int(not is_plain)};; *) echo "{version}";; esac'
    first.write_text(f"#!/bin/sh\n{answers}\n")
    first.chmod(0o755)
    tool = Path(__file__).parents[1] / "tools" / "base_python"
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    found = subprocess.run(["bash", str(tool)], capture_output=True, text=True, check=True, env=environment)
    assert found.stdout.strip() == expected
