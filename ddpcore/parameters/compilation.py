"""Methods that torch.compile leaves alone."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def exclude_from_compilation(kind: type[Any], *names: str, recursive: bool = True, reason: str | None = None) -> None:
    """Apply ``torch.compiler.disable`` to methods of a class. Call it when an object of the class is made.

    As a decorator, ``torch.compiler.disable`` would import torch's compiler together with the class. That takes as long
    as importing torch.

    Args:
        kind: the class.
        names: of its methods.
        recursive, reason: see ``torch.compiler.disable``.
    """
    for name in names:
        setattr(kind, name, torch.compiler.disable(getattr(kind, name), recursive, reason=reason))
