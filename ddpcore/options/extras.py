"""Packages that only some parts of ddpcore need. The extras of ``pyproject.toml`` install them."""

from collections.abc import Iterator
from contextlib import contextmanager

_OURS = ("ddpcore", "torch")  # if a module of these is missing, no extra helps


class MissingPackage(ImportError, ValueError):
    """A package of an extra is not installed. The message is one line with the command that installs it.

    It is a ValueError too, so that commands print it as they print other mistakes.
    """


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Import packages of an extra inside ``with extra(name):``. MissingPackage: one of them is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package in _OURS:
            raise
        raise MissingPackage(f"{package} is not installed: pip install 'ddpcore[{name}]'") from None
