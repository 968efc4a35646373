"""Which parameters decay and are adapted, and which are not."""

from __future__ import annotations

from typing import Any

from torch import nn

from ddpcore.optim.checks import check_number


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups of named parameters for any optimizer: one that decays, and one of biases and norms that does not.

    Vectors and scalars (``ndim <= 1``: biases, the scales and shifts of norms, class tokens of one dimension) are in
    the second group, with ``weight_decay=0`` and ``always_adapt=False``, as the authors of LARS and LAMB leave them.

    Args:
        model: parameters that need no gradient are left out; tied ones are taken once.
        weight_decay: of the first group.

    Returns:
        Groups for ``FusedLARS(param_groups(model, 1e-4), lr=...)``; an empty one is left out. Optimizers of other
        libraries take them too.

    Raises:
        ValueError: weight_decay is negative or no number, or the model has no trainable parameter.
    """
    check_number("weight_decay", weight_decay)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError("the model has no parameter that needs a gradient: there is nothing to train")
    decayed = [(name, p) for name, p in named if p.ndim > 1]
    others = [(name, p) for name, p in named if p.ndim <= 1]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0, "always_adapt": False},
    ]
    return [group for group in groups if group["params"]]
