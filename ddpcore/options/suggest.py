"""What an error line says to do about a name that is not known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

OTHER_NAMES = {"learning_rate": "lr"}  # what people write, and the name it has here


def suggest(value: Any, allowed: Iterable[str], others: Mapping[str, str] = MappingProxyType({})) -> str:
    """What to do about a value that is none of those allowed: the nearest one, or all of them.

    Args:
        value: what was written.
        allowed: what may be written.
        others: further names that may be meant, and what to write for each.
    """
    allowed = tuple(allowed)
    names = {name: name for name in allowed} | {other: name for other, name in OTHER_NAMES.items() if name in allowed}
    names = {**others, **names}
    nearest = get_close_matches(str(value), names, n=1)
    if nearest:
        return f"did you mean {names[nearest[0]]!r}?"
    return f"choose from {', '.join(allowed)}" if allowed else "it takes none, leave it out"
