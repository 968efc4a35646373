"""The parameters that a flat buffer takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import Parameter


def unique_trainable(parameters: Iterable[tuple[str, Parameter]]) -> list[tuple[str, Parameter]]:
    """The parameters that need a gradient, each once."""
    seen: dict[int, tuple[str, Parameter]] = {}
    for name, parameter in parameters:
        if parameter.requires_grad:
            seen.setdefault(id(parameter), (name, parameter))
    return list(seen.values())


def _is_dense(tensor: Tensor) -> bool:
    if tensor.numel() == 0:
        return True
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda d: (d[1], d[0])):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def check_parameters(named: Sequence[tuple[str, Tensor]]) -> None:
    """Refuse parameters that cannot be views of one buffer.

    Raises:
        ValueError: as :class:`~ddpcore.parameters.flat.FlatParameters`.
    """
    if not named:
        raise ValueError("the model has no parameter that needs a gradient: there is nothing to train")
    first_name, first = named[0]
    spans = []
    for name, parameter in named:
        if parameter.layout != torch.strided:
            raise ValueError(f"parameter {name} is sparse: flat buffers take dense parameters only")
        if parameter.is_meta:
            raise ValueError(f"parameter {name} is on the meta device: materialise the model first (model.to_empty)")
        if parameter.device != first.device:
            raise ValueError(
                f"parameters are on two devices ({first_name} on {first.device}, {name} on {parameter.device}): "
                "move the model to one device"
            )
        if parameter.dtype != first.dtype:
            raise ValueError(
                f"parameters have two dtypes ({first_name} is {first.dtype}, {name} is {parameter.dtype}): "
                "convert the model to one"
            )
        if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
            raise ValueError(
                f"parameter {name} is {parameter.dtype}: flat buffers take real floating-point parameters of 16 to 64 "
                "bits: convert it, or freeze it with requires_grad_(False)"
            )
        if not _is_dense(parameter):
            raise ValueError(
                f"parameter {name} is not dense in memory: use parameter.data = parameter.data.contiguous()"
            )
        start = parameter.data_ptr()
        spans.append((start, start + parameter.numel() * parameter.element_size(), name))
    spans.sort()
    for (_, end, name), (start, _, other) in pairwise(spans):
        if start < end:
            raise ValueError(f"parameters {name} and {other} share memory: tie weights by sharing one Parameter object")
