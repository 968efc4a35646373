"""Small versions of the models, for tests that run each of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ddpcore.models import MODELS
from ddpcore.models.blocks import SqueezeExcitation
from ddpcore.models.registry import Spec

SMALL: dict[str, dict[str, Any]] = {
    "vgg19": {"width": 1 / 16},
    "googlenet": {"width": 1 / 16},
    "resnext29": {"blocks": (1, 2), "base_width": 4},
    "densenet121": {"blocks": (2, 2), "growth_rate": 4},
    "mobilenet": {"width": 1 / 8},
    "senet18": {"blocks": (1, 2), "widths": (8, 16)},
    "mobilenet_v2": {"width": 1 / 8},
    "shufflenet": {"blocks": (2, 2), "widths": (8, 16), "head_width": 16},
    "efficientnet_b0": {"width": 1 / 8, "depth": 0.5},
    "byte_transformer": {"width": 8, "num_heads": 2, "mlp_width": 12},
    "speech_lstm": {"depth": 2, "width": 8, "bottleneck": 6},
}


def small(name: str, **options: Any) -> nn.Module:
    """The model of a name, with as few parameters as show what it does."""
    return MODELS.build(name, **{**SMALL.get(name, {}), **options})


def random_batch(
    spec: Spec, *rows: int, input_shape: tuple[int, ...] | None = None, num_classes: int | None = None
) -> tuple[Tensor, Tensor]:
    """Random inputs ``[*rows, *input_shape]`` and labels ``[*rows]``; tokens have labels of their shape."""
    shape = spec.input_shapes[0] if input_shape is None else input_shape
    classes = spec.num_classes if num_classes is None else num_classes
    if spec.tokens:
        tokens, labels = torch.randint(classes, (2, *rows, *shape))
        return tokens, labels
    return torch.randn(*rows, *shape), torch.randint(classes, rows)


def awake(model: nn.Module) -> nn.Module:
    """The same model, with no gate whose few hidden units all happen to be zero at the start."""
    for module in model.modules():
        if isinstance(module, SqueezeExcitation):
            nn.init.ones_(module.gate[0].bias)
    return model


def idle(model: nn.Module) -> set[str]:
    """Biases that a batch normalization takes away again: their gradient is rounding, or nothing."""
    names = set()
    for prefix, module in model.named_modules():
        if isinstance(module, nn.Sequential):
            for (name, layer), (_, after) in pairwise(module.named_children()):
                if isinstance(layer, nn.Conv2d) and layer.bias is not None and isinstance(after, nn.BatchNorm2d):
                    names.add(f"{prefix}.{name}.bias")
    return names
