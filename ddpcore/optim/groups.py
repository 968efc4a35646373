"""Parameter groups with and without weight decay."""

from __future__ import annotations

from typing import Any

from torch import nn

from ddpcore.optim.checks import check_number


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups of named parameters for any optimizer: weights with decay, and biases and norms without.

    Vectors and scalars (``ndim <= 1``: biases, scales and shifts of norms, class tokens of one dimension) are in the
    second group, with ``weight_decay=0`` and ``always_adapt=False``, as in the papers on LARS and LAMB.

    Args:
        model: parameters that need no gradient are left out; tied ones are taken once.
        weight_decay: of the first group.

    Returns:
        Groups for ``FusedLARS(param_groups(model, 1e-4), lr=...)``, without empty ones. Optimizers of other libraries
        accept them too.

    Raises:
        ValueError: weight_decay is negative or not a number, or the model has no trainable parameter.
    """
    check_number("weight_decay", weight_decay)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError("the model has no parameter that needs a gradient: there is nothing to train")
    groups = [
        {"params": [(name, p) for name, p in named if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [(name, p) for name, p in named if p.ndim <= 1], "weight_decay": 0.0, "always_adapt": False},
    ]
    return [group for group in groups if group["params"]]
