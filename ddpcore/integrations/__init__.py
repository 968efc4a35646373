"""ddpcore inside trainers of other packages. Each module imports its package, so none is imported here."""

from collections.abc import Mapping
from typing import Any


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError if the options of ``distribute`` hold one that a trainer gives."""
    if given := [f"{name}=" for name in ("learners", "scaler") if name in options]:
        raise ValueError(f"a trainer calls one model a process, with its own scaler: leave {' and '.join(given)} out")
