"""Loads the compiled operator library, once, when ``ddpcore.ops`` is imported."""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch


def load() -> Path:
    """Register ``torch.ops.ddpcore.*`` from the library beside this package and return its path.

    Raises:
        ImportError: the library was not built for this Python, or this torch cannot load it.
    """
    package = Path(__file__).resolve().parent.parent
    found = [path for suffix in EXTENSION_SUFFIXES if (path := package / f"_ops{suffix}").exists()]
    if not found:
        raise ImportError(
            f"ddpcore's operator library is not built in {package}: run 'pip install -e .' or 'make build'"
        )
    try:
        torch.ops.load_library(str(found[0]))
    except OSError as error:
        raise ImportError(f"torch {torch.__version__} cannot load {found[0]}: {error}; rebuild ddpcore") from error
    return found[0]


load()
