"""Models by name: `build("mlp")`. The caller's torch seed decides the initial weights.

Every one runs as virtual learners over stacked parameters and buffers, all but `speech_lstm` under `torch.func.vmap`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ddpcore.models import (
    cnn,
    densenet,
    efficientnet,
    googlenet,
    lenet5,
    mlp,
    mobilenet,
    resnet,
    resnext,
    saddle,
    senet,
    shufflenet,
    simplenet,
    speech_lstm,
    vgg,
    vit,
)
from ddpcore.options.suggest import suggest


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a model takes: the shapes of one sample it fits, the default first, and its default number of classes.

    Attributes:
        make: the model's class, called with (input_shape, num_classes) and options by keyword.
        any_size: whether samples of other sizes fit too, with as many dimensions.
    """

    input_shapes: tuple[tuple[int, ...], ...]
    num_classes: int
    make: Callable[..., nn.Module]
    any_size: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The options of `build` for this model, by name, with their defaults."""
        parameters = inspect.signature(self.make).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}

    def fits(self, input_shape: tuple[int, ...]) -> bool:
        """Whether the model takes samples of this shape (without the batch)."""
        if tuple(input_shape) in self.input_shapes:
            return True
        return self.any_size and len(input_shape) == len(self.input_shapes[0]) and min(input_shape) >= 1


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
    "vgg19": _spec(vgg.INPUT_SHAPES, vgg.NUM_CLASSES, vgg.VGG19),
    "googlenet": _spec(googlenet.INPUT_SHAPES, googlenet.NUM_CLASSES, googlenet.GoogLeNet),
    "resnext29": _spec(resnext.INPUT_SHAPES, resnext.NUM_CLASSES, resnext.ResNeXt29),
    "densenet121": _spec(densenet.INPUT_SHAPES, densenet.NUM_CLASSES, densenet.DenseNet121),
    "mobilenet": _spec(mobilenet.INPUT_SHAPES, mobilenet.NUM_CLASSES, mobilenet.MobileNet),
    "senet18": _spec(senet.INPUT_SHAPES, senet.NUM_CLASSES, senet.SENet18),
    "mobilenet_v2": _spec(mobilenet.INPUT_SHAPES, mobilenet.NUM_CLASSES, mobilenet.MobileNetV2),
    "shufflenet": _spec(shufflenet.INPUT_SHAPES, shufflenet.NUM_CLASSES, shufflenet.ShuffleNet),
    "efficientnet_b0": _spec(efficientnet.INPUT_SHAPES, efficientnet.NUM_CLASSES, efficientnet.EfficientNetB0),
    "saddle": Spec(input_shapes=saddle.INPUT_SHAPES, num_classes=saddle.NUM_CLASSES, make=saddle.Saddle, any_size=True),
    "speech_lstm": Spec(
        input_shapes=speech_lstm.INPUT_SHAPES,
        num_classes=speech_lstm.NUM_CLASSES,
        make=speech_lstm.SpeechLSTM,
        any_size=True,
    ),
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
    if spec(name).fits(input_shape):
        return
    shape = _spell(input_shape)
    fitting = [other for other in names() if _SPECS[other].fits(input_shape)]
    advice = f"models that do: {', '.join(fitting)}" if fitting else "no model does"
    takes = " or ".join(_spell(allowed) for allowed in _SPECS[name].input_shapes)
    takes += ", or other sizes" if _SPECS[name].any_size else ""
    raise ValueError(f"model '{name}' takes samples of {takes} and does not fit {shape}: {advice}")


def check_options(name: str, options: Iterable[str]) -> None:
    """ValueError, naming the nearest, unless the model has options of these names."""
    known = tuple(spec(name).options)
    for option in options:
        if option not in known:
            raise ValueError(f"model '{name}' has no option '{option}': {suggest(option, known)}")


def build(
    name: str, *, input_shape: tuple[int, ...] | None = None, num_classes: int | None = None, **options: Any
) -> nn.Module:
    """A new model on torch's default device, for samples of `input_shape` (without the batch).

    Shape and classes are the model's own by default.

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
    except (TypeError, ValueError) as error:
        raise ValueError(f"model '{name}': {error}") from error


def _spell(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) if shape else "()"
