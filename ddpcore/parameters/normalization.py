"""Which modules are normalization layers."""

from __future__ import annotations

import re

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_CLASSES = (_NormBase, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
_NAME = re.compile(r"Norm(\dd)?$")  # of classes of other libraries


def is_normalization(module: nn.Module) -> bool:
    """Whether the module is a normalization layer, of torch or by the name of its class, such as ``LlamaRMSNorm``."""
    return isinstance(module, _CLASSES) or (
        _NAME.search(type(module).__name__) is not None and not any(True for _ in module.children())
    )
