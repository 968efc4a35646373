"""Optimizers by name: ddpcore's own, and torch's for comparison."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ddpcore.optim import FusedLAMB, FusedLARS, FusedSGD, param_groups

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": FusedSGD,
    "lars": FusedLARS,
    "lamb": FusedLAMB,
    "torch_sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
}


def names() -> tuple[str, ...]:
    """The names that :func:`build` knows."""
    return tuple(_OPTIMIZERS)


def options(name: str) -> tuple[str, ...]:
    """What the optimizer of a name takes beside parameters, learning rate and the bound of gradients."""
    known = inspect.signature(_OPTIMIZERS[name]).parameters
    return tuple(key for key in known if key not in ("params", "lr", "max_grad_norm"))


def clips_itself(name: str) -> bool:
    """Whether the optimizer of a name clips gradients inside its step."""
    return _OPTIMIZERS[name] in (FusedSGD, FusedLARS, FusedLAMB)


def build(
    name: str,
    model: nn.Module,
    *,
    lr: float,
    options: Mapping[str, Any],
    two_groups: bool = False,
    max_grad_norm: float | None = None,
) -> torch.optim.Optimizer:
    """A new optimizer of the model's parameters that need a gradient.

    Args:
        name: one of :func:`names`.
        model: may not be in training with another optimizer.
        lr: its learning rate.
        options: by keyword.
        two_groups: biases and norms apart, see :func:`ddpcore.optim.param_groups`.
        max_grad_norm: for those that clip themselves; others leave it to the caller.

    Raises:
        ValueError: an option has a value that the optimizer does not take.
    """
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    if max_grad_norm is not None and clips_itself(name):
        given["max_grad_norm"] = max_grad_norm
    params: Any = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if two_groups:
        default = inspect.signature(_OPTIMIZERS[name]).parameters["weight_decay"].default
        params = param_groups(model, given.get("weight_decay", default))
    try:
        return _OPTIMIZERS[name](params, lr=lr, **given)
    except Exception as error:  # torch's own raise IndexError and RuntimeError, too
        raise ValueError(f"optimizer {name}: {error}") from error
