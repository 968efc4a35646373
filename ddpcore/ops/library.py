"""Defines the operators of ``torch.ops.ddpcore`` and loads their compiled kernels.

Every operator has a pure-torch twin (``reference.py``), which runs where no kernel does: on devices without one, and
everywhere when the compiled library cannot be loaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch

_LIBRARY = torch.library.Library("ddpcore", "DEF")


def define(schema: str, twin: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define an operator and return it.

    Args:
        schema: as torch writes it, without the namespace. The argument order is that of csrc/bindings/operators.h.
        twin: what runs where no compiled kernel does.
        fake: the shapes of its results, for ``torch.compile``.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, torch.no_grad()(twin), "CompositeExplicitAutograd")  # kernels record no gradient either
    torch.library.register_fake(f"ddpcore::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.ddpcore, name).default


def load() -> str | None:
    """Register the compiled kernels from the library beside this package. Returns why not, where it cannot."""
    package = Path(__file__).resolve().parent.parent
    found = [path for suffix in EXTENSION_SUFFIXES if (path := package / f"_ops{suffix}").exists()]
    if not found:
        return f"ddpcore's operator library is not built in {package}: run 'pip install -e .' or 'make build'"
    try:
        torch.ops.load_library(str(found[0]))
    except OSError as error:
        return f"torch {torch.__version__} cannot load {found[0]}: {error}; rebuild ddpcore"
    return None


WHY_NOT_COMPILED = load()
"""None, or one line that says why the compiled kernels are not there."""
if WHY_NOT_COMPILED is not None:
    warnings.warn(
        f"{WHY_NOT_COMPILED}. Until then operators and optimizers run on plain torch operations, several times slower",
        RuntimeWarning,
        stacklevel=2,
    )
