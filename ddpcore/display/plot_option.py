"""The option ``--plot`` of benches and studies. Imports no matplotlib: that takes half a second."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddpcore.options.fields import field
from ddpcore.storage.limits import shown

SUFFIXES = (".png", ".svg")
PLOT: Any = field(None, "also draw the result, .png or .svg (extra `report`)", is_file=True)


def check_plot(path: Path | None) -> None:
    """Check the value of ``--plot``; None is allowed.

    Raises:
        ValueError: the file is neither PNG nor SVG, or matplotlib is not installed.
    """
    if path is None:
        return
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--plot: {shown(path)} ends in neither {' nor '.join(SUFFIXES)}: name such a file")
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'ddpcore[report]', or leave --plot out")
