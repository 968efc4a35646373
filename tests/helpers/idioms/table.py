"""The table of idioms: the files that fill it, in order."""

from __future__ import annotations

from helpers.idioms import (
    around,
    changes,
    distributed,
    families,
    hooks,
    loops,
    models,
    optimizers,
    parts,
    passes,
    state,
)
from helpers.idioms.run import IDIOMS

__all__ = [
    "IDIOMS",
    "around",
    "changes",
    "distributed",
    "families",
    "hooks",
    "loops",
    "models",
    "optimizers",
    "parts",
    "passes",
    "state",
]
