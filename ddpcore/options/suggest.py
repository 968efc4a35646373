"""What an error line says to do about a name that is not known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


def suggest(value: Any, allowed: Iterable[str]) -> str:
    """What to do about a value that is none of those allowed: the nearest one, or all of them."""
    allowed = tuple(allowed)
    nearest = get_close_matches(str(value), allowed, n=1)
    if nearest:
        return f"did you mean {nearest[0]!r}?"
    return f"choose from {', '.join(allowed)}" if allowed else "it takes none, leave it out"
