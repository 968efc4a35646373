"""Models by name: `build("mlp")`. The caller's torch seed decides the initial weights.

Every one runs under `torch.func.vmap` over stacked parameters and buffers, as virtual learners do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from torch import nn

from ddpcore.models import cnn, lenet5, mlp, resnet, simplenet, vit


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a model takes: the shapes of one sample it fits, the default first, and its default number of classes.

    Attributes:
        make: the model's class, called with (input_shape, num_classes) and options by keyword.
    """

    input_shapes: tuple[tuple[int, ...], ...]
    num_classes: int
    make: Callable[..., nn.Module]

    @property
    def options(self) -> dict[str, Any]:
        """The options of `build` for this model, by name, with their defaults."""
        parameters = inspect.signature(self.make).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def _spec(shapes: tuple[tuple[int, ...], ...], num_classes: int, make: Callable[..., nn.Module]) -> Spec:
    return Spec(input_shapes=shapes, num_classes=num_classes, make=make)


_SPECS = {
    "simplenet": _spec(simplenet.INPUT_SHAPES, simplenet.NUM_CLASSES, simplenet.SimpleNet),
    "mlp": _spec(mlp.INPUT_SHAPES, mlp.NUM_CLASSES, mlp.MLP),
    "lenet5": _spec(lenet5.INPUT_SHAPES, lenet5.NUM_CLASSES, lenet5.LeNet5),
    "mnist_cnn": _spec(cnn.MNIST_SHAPES, cnn.NUM_CLASSES, cnn.MnistCNN),
    "simple_cnn": _spec(cnn.SIMPLE_SHAPES, cnn.NUM_CLASSES, cnn.SimpleCNN),
    "resnet": _spec(resnet.INPUT_SHAPES, resnet.NUM_CLASSES, resnet.ResNet),
    "resnet18": _spec(resnet.INPUT_SHAPES, resnet.NUM_CLASSES, resnet.ResNet18),
    "vit": _spec(vit.INPUT_SHAPES, vit.NUM_CLASSES, vit.ViT),
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


def check_options(name: str, options: Iterable[str]) -> None:
    """ValueError, naming the nearest, unless the model has options of these names."""
    known = tuple(spec(name).options)
    for option in options:
        if option not in known:
            raise ValueError(f"model '{name}' has no option '{option}': {_advice(option, known)}")


def build(
    name: str, *, input_shape: tuple[int, ...] | None = None, num_classes: int | None = None, **options: Any
) -> nn.Module:
    """A new model on the CPU for samples of `input_shape` (without the batch); the defaults are the model's own.

    ValueError if the name or an option is unknown, the shape does not fit, there are fewer than 2 classes, or the model
    refuses an option's value.
    """
    chosen = spec(name)
    shape = chosen.input_shapes[0] if input_shape is None else tuple(input_shape)
    check_input(name, shape)
    classes = chosen.num_classes if num_classes is None else num_classes
    if classes < 2:
        raise ValueError(f"model '{name}': num_classes is {classes}, it must be at least 2")
    check_options(name, options)
    try:
        return chosen.make(shape, classes, **options)
    except ValueError as error:
        raise ValueError(f"model '{name}': {error}") from error


def _advice(option: str, known: tuple[str, ...]) -> str:
    if not known:
        return "it has none"
    nearest = get_close_matches(option, known, n=1)
    return f"did you mean '{nearest[0]}'?" if nearest else f"choose from {', '.join(known)}"


def _spell(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) if shape else "()"
