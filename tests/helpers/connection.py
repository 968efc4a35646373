"""Options of ``distribute`` in one mapping, as many tests have them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ddpcore import Connection

_NAMES = {item.name for item in fields(Connection)}


def connected(**options: Any) -> dict[str, Any]:
    """The arguments of ``distribute``: options that belong to a connection become one."""
    own = {name: value for name, value in options.items() if name in _NAMES}
    others = {name: value for name, value in options.items() if name not in _NAMES}
    return {**others, "connection": Connection(**own)} if own else others
