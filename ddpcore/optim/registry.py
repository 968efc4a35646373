"""Optimizers by name: ddpcore's own, torch's for comparison, and a user's."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ddpcore.optim.adamw import FusedAdamW
from ddpcore.optim.groups import param_groups
from ddpcore.optim.lamb import FusedLAMB
from ddpcore.optim.lars import FusedLARS
from ddpcore.optim.muon import Muon
from ddpcore.optim.sgd import FusedSGD
from ddpcore.options.registry import Registry

OPTIMIZERS: Registry[torch.optim.Optimizer] = Registry("optimizer", "ddpcore.optimizers", torch.optim.Optimizer, {
    "sgd": FusedSGD, "lars": FusedLARS, "lamb": FusedLAMB, "adamw": FusedAdamW, "muon": Muon,
    "torch_sgd": torch.optim.SGD, "adam": torch.optim.Adam, "torch_adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam, "radam": torch.optim.RAdam, "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad, "adadelta": torch.optim.Adadelta,
}, reserved=("params", "lr", "max_grad_norm", "process_group"))  # fmt: skip


def clips_itself(name: str) -> bool:
    """Whether the optimizer of a name clips gradients inside its step: it has an argument ``max_grad_norm``."""
    return OPTIMIZERS.takes(name, "max_grad_norm")


def build_optimizer(
    name: str,
    model: nn.Module,
    *,
    lr: float,
    options: Mapping[str, Any],
    two_groups: bool = False,
    max_grad_norm: float | None = None,
) -> torch.optim.Optimizer:
    """A new optimizer, by its name in ``OPTIMIZERS``, of the model's parameters that need a gradient.

    Args:
        model: may not be in training with another optimizer.
        two_groups: biases and norms apart, see :func:`ddpcore.optim.param_groups`; ``always_adapt`` of the options,
            if it is there, counts for them too.
        max_grad_norm: for those that clip gradients themselves; the caller clips for others.

    ValueError: no such optimizer or option, or an option has a value that the optimizer does not take.
    """
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    if max_grad_norm is not None:
        given["max_grad_norm"] = max_grad_norm
    params: Any = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for_muon = OPTIMIZERS.takes(name, "adjust_lr_fn") and OPTIMIZERS.takes(name, "adamw_lr")
    if two_groups or for_muon:
        default = OPTIMIZERS.options(name).get("weight_decay", inspect.Parameter.empty)
        if default is inspect.Parameter.empty:
            raise ValueError(f"optimizer {name} has no weight_decay with a default: leave param_groups out")
        params = param_groups(model, given.get("weight_decay", default), rule="muon" if for_muon else None)
        for group in params if "always_adapt" in given else ():  # a given option counts for all groups
            group.pop("always_adapt", None)
    return OPTIMIZERS.build(name, params, lr=lr, **given)
