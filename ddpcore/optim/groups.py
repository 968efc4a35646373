"""Parameter groups with and without weight decay, and for Muon."""

from __future__ import annotations

from typing import Any

from torch import nn

from ddpcore.optim.checks import check_number


def param_groups(model: nn.Module, weight_decay: float, *, rule: str | None = None) -> list[dict[str, Any]]:
    """Groups of named parameters for any optimizer: weights with decay, and biases and norms without.

    Vectors and scalars (``ndim <= 1``: biases, scales and shifts of norms, class tokens of one dimension) are in the
    last group, with ``weight_decay=0`` and ``always_adapt=False``, as in the papers on LARS and LAMB.

    Args:
        model: parameters that need no gradient are left out; tied ones are taken once.
        weight_decay: of all groups but the last.
        rule: None; or ``muon``, for :class:`~ddpcore.optim.Muon`: hidden matrices and convolution kernels have
            ``rule="muon"``. Embeddings, the last layer with a weight of two dimensions or more, weights of one row
            (class token and positions of a vision transformer) and the vectors have ``rule="adamw"``.

    Returns:
        Groups for ``FusedLARS(param_groups(model, 1e-4), lr=...)``, without empty ones. Optimizers of other libraries
        accept them too.

    Raises:
        ValueError: weight_decay is negative or not a number, the rule is unknown, or the model has no trainable
            parameter.
    """
    check_number("weight_decay", weight_decay)
    if rule not in (None, "muon"):
        raise ValueError(f"rule is {rule!r}: it must be None or 'muon'")
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError("the model has no parameter that needs a gradient: there is nothing to train")
    weights = [(name, p) for name, p in named if p.ndim > 1]
    vectors = [(name, p) for name, p in named if p.ndim <= 1]
    groups: list[dict[str, Any]]
    if rule is None:
        groups = [
            {"params": weights, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0, "always_adapt": False},
        ]
    else:
        ends = _embeddings_and_head(model) | {id(p) for _, p in weights if len(p) == 1}
        hidden = [(name, p) for name, p in weights if id(p) not in ends]
        others = [(name, p) for name, p in weights if id(p) in ends]
        groups = [
            {"params": hidden, "weight_decay": weight_decay, "rule": "muon"},
            {"params": others, "weight_decay": weight_decay, "rule": "adamw"},
            {"params": vectors, "weight_decay": 0.0, "rule": "adamw"},
        ]
    return [group for group in groups if group["params"]]


def _embeddings_and_head(model: nn.Module) -> set[int]:
    """Ids of the weights of embeddings, and of the last module that has a weight of two dimensions or more."""
    owned = [(module, [p for p in module.parameters(recurse=False) if p.ndim > 1]) for module in model.modules()]
    layers = [(module, weights) for module, weights in owned if weights]
    ends = [weights for module, weights in layers if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    ends += [weights for _, weights in layers[-1:]]
    return {id(weight) for weights in ends for weight in weights}
