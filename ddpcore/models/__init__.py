"""Models by name: `build("mlp")`. The caller's torch seed decides the initial weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from ddpcore.models import lenet5, mlp, simplenet


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a model takes: the shapes of one sample it fits, the default first, and its default number of classes."""

    input_shapes: tuple[tuple[int, ...], ...]
    num_classes: int
    make: Callable[[tuple[int, ...], int], nn.Module]  # (input_shape, num_classes)


_SPECS = {
    "simplenet": Spec(
        input_shapes=simplenet.INPUT_SHAPES,
        num_classes=simplenet.NUM_CLASSES,
        make=lambda input_shape, num_classes: simplenet.SimpleNet(num_classes),
    ),
    "mlp": Spec(
        input_shapes=mlp.INPUT_SHAPES,
        num_classes=mlp.NUM_CLASSES,
        make=lambda input_shape, num_classes: mlp.MLP(num_classes),
    ),
    "lenet5": Spec(input_shapes=lenet5.INPUT_SHAPES, num_classes=lenet5.NUM_CLASSES, make=lenet5.LeNet5),
}


def names() -> tuple[str, ...]:
    """The names `build` knows."""
    return tuple(_SPECS)


def spec(name: str) -> Spec:
    """What the model of a name takes. ValueError lists the names."""
    if name not in _SPECS:
        raise ValueError(f"unknown model '{name}': choose one of {', '.join(names())}")
    return _SPECS[name]


def check_input(name: str, input_shape: tuple[int, ...]) -> None:
    """ValueError, saying which models do, unless the model takes samples of this shape (without the batch)."""
    if tuple(input_shape) in spec(name).input_shapes:
        return
    shape = _spell(input_shape)
    fitting = [other for other in names() if tuple(input_shape) in _SPECS[other].input_shapes]
    advice = f"models that do: {', '.join(fitting)}" if fitting else "no model does"
    takes = " or ".join(_spell(allowed) for allowed in _SPECS[name].input_shapes)
    raise ValueError(f"model '{name}' takes samples of {takes} and does not fit {shape}: {advice}")


def build(name: str, *, input_shape: tuple[int, ...] | None = None, num_classes: int | None = None) -> nn.Module:
    """A new model on the CPU for samples of `input_shape` (without the batch); the defaults are the model's own.

    ValueError if the name is unknown, the shape does not fit or there are fewer than 2 classes.
    """
    chosen = spec(name)
    shape = chosen.input_shapes[0] if input_shape is None else tuple(input_shape)
    check_input(name, shape)
    classes = chosen.num_classes if num_classes is None else num_classes
    if classes < 2:
        raise ValueError(f"model '{name}': num_classes is {classes}, it must be at least 2")
    return chosen.make(shape, classes)


def _spell(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) if shape else "()"
