"""The algorithms, one a file, by name; and the baselines single and ddp."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ddpcore.strategies.compression import CODECS, Codec
from ddpcore.topology import Topology

from .base import Baseline, Strategy
from .baselines import DDP, Single
from .dpsgd import DPSGD, ORDERS
from .local_sgd import LocalSGD, MakeOptimizer
from .noisy_ssgd import NoisySSGD
from .push_sum import PushSum
from .slowmo import SlowMo
from .ssgd import SSGD

__all__ = [
    "Baseline",
    "DDP",
    "DPSGD",
    "LocalSGD",
    "NoisySSGD",
    "ORDERS",
    "PushSum",
    "SSGD",
    "Single",
    "SlowMo",
    "Strategy",
    "build",
    "names",
    "options",
]

_ALL: tuple[type[Strategy] | type[Baseline], ...] = (SSGD, DPSGD, LocalSGD, NoisySSGD, SlowMo, PushSum, Single, DDP)


def names() -> list[str]:
    """The names that :func:`build` knows."""
    return [cls.name for cls in _ALL]


def options(name: str) -> dict[str, Any]:
    """The options of :func:`build` for a strategy, with the defaults of its class. ValueError lists the names."""
    parameters = inspect.signature(_class_of(name).__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.kind in _NAMED and p.name not in ("self", "topology")}


def build(name: str, *, topology: Topology | None = None, **given: Any) -> Strategy | Baseline:
    """A strategy by name, from values that a file or a command line can hold.

    Args:
        name: one of :func:`names`.
        topology: for dpsgd and slowmo, where None is their default, and push_sum, which must be given one.
        given: the arguments of its class by keyword, but for three. ``compression`` of dpsgd is ``"none"``, a name of
            :data:`.compression.CODECS`, or ``{"name": ..., **settings}``. ``outer`` of local_sgd holds the settings of
            ``torch.optim.SGD``, such as ``{"lr": 0.7, "momentum": 0.9, "nesterov": True}``. ``base`` of
            slowmo is ``"dpsgd"`` (the default) or ``"none"``.

    Raises:
        ValueError: no such strategy or option, or its options do not go together.
    """
    made = _class_of(name)
    known = options(name)
    for option in given:
        if option not in known:
            raise ValueError(f"{name} has no option {option!r}: choose from {', '.join(known) or 'none'}")
    arguments = dict(given)
    if "topology" in inspect.signature(made.__init__).parameters and topology is not None:
        arguments["topology"] = topology
    if made is SlowMo:
        arguments["base"] = _base(arguments.get("base", DPSGD.name), topology)
    if "compression" in arguments:
        arguments["compression"] = _codec(arguments["compression"])
    if arguments.get("outer") is not None:
        arguments["outer"] = _outer(name, arguments["outer"])
    try:
        return made(**arguments)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from error


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _class_of(name: str) -> type[Strategy] | type[Baseline]:
    for cls in _ALL:
        if cls.name == name:
            return cls
    raise ValueError(f"unknown strategy {name!r}: choose from {', '.join(names())}")


def _base(name: str, topology: Topology | None) -> DPSGD | None:
    if name not in (DPSGD.name, "none"):
        raise ValueError(f"slowmo: unknown base {name!r}: choose from {DPSGD.name}, none")
    return None if name == "none" else DPSGD(topology)


def _outer(name: str, settings: Any) -> MakeOptimizer:
    if not isinstance(settings, Mapping):
        raise ValueError(f"{name}: outer is {settings!r}: it must be a mapping, settings of an SGD")
    make: MakeOptimizer = partial(torch.optim.SGD, **settings)
    try:
        make([torch.zeros(1)])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: outer: {error}") from error
    return make


def _codec(wanted: str | Mapping[str, Any]) -> Codec | None:
    if not isinstance(wanted, str | Mapping):
        raise ValueError(f"compression is {wanted!r}: it must be a name, or a mapping of a name and its settings")
    settings = {"name": wanted} if isinstance(wanted, str) else dict(wanted)
    name = settings.pop("name", None)
    if name == "none":
        return None
    if not isinstance(name, str) or name not in CODECS:
        raise ValueError(f"unknown compression {name!r}: choose from none, {', '.join(CODECS)}")
    try:
        return CODECS[name](**settings)
    except TypeError as error:
        raise ValueError(f"compression {name}: {error}") from error
