"""Models by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from typing_extensions import override

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
from ddpcore.options.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a model takes.

    Attributes:
        input_shapes: shapes of one sample that fit, the default first; empty where any may fit.
        num_classes: the default number.
        make: the model's class or function.
        any_size: whether samples of other sizes fit too, with as many dimensions.
    """

    input_shapes: tuple[tuple[int, ...], ...]
    num_classes: int
    make: Callable[..., nn.Module]
    any_size: bool = False

    def fits(self, input_shape: tuple[int, ...]) -> bool:
        """Whether the model takes samples of this shape (without the batch)."""
        if not self.input_shapes or tuple(input_shape) in self.input_shapes:
            return True
        return self.any_size and len(input_shape) == len(self.input_shapes[0]) and min(input_shape) >= 1


class ModelRegistry(Registry[nn.Module]):
    """Models by name, with the samples that they take.

    A user's class or function is called with those of ``input_shape`` and ``num_classes`` that it has as parameters. It
    may say what fits by attributes ``input_shapes`` (a tuple of shapes, the default first) and ``num_classes``.
    """

    def __init__(self, specs: Mapping[str, Spec]) -> None:
        own = {name: spec.make for name, spec in specs.items()}
        super().__init__("model", "ddpcore.models", nn.Module, own, reserved=("input_shape", "num_classes"))
        self._specs = dict(specs)

    def spec(self, name: str) -> Spec:
        """What the model of a name takes.

        Raises:
            ValueError: as :meth:`find`.
        """
        if name in self._specs:
            return self._specs[name]
        make = self.find(name)
        shapes = tuple(tuple(shape) for shape in getattr(make, "input_shapes", ()))
        return Spec(input_shapes=shapes, num_classes=getattr(make, "num_classes", 2), make=make)

    def check_input(self, name: str, input_shape: tuple[int, ...]) -> None:
        """Raise ValueError, with the models that do, unless the model takes samples of this shape."""
        spec = self.spec(name)
        if spec.fits(input_shape):
            return
        fitting = [other for other, its in self._specs.items() if its.fits(input_shape)]
        advice = f"models that do: {', '.join(fitting)}" if fitting else "no model does"
        takes = " or ".join(map(_spell, spec.input_shapes)) + (", or other sizes" if spec.any_size else "")
        raise ValueError(f"model {name} takes samples of {takes} and does not fit {_spell(input_shape)}: {advice}")

    @override
    def build(self, name: str, *arguments: Any, **options: Any) -> nn.Module:
        """A new model on torch's default device; torch's seed decides its weights.

        Args:
            name: see :mod:`ddpcore.options.registry`.
            arguments: none.
            options: of the model; ``input_shape`` of one sample, without the batch, and ``num_classes``, both with the
                model's own defaults.

        Raises:
            ValueError: no such model or option, the shape does not fit, there are fewer than 2 classes, or the model
                refuses a value.
        """
        spec = self.spec(name)
        shape, classes = options.get("input_shape"), options.get("num_classes")
        if shape is None:
            shape = spec.input_shapes[0] if spec.input_shapes else None
        if shape is not None:
            shape = tuple(shape)
            self.check_input(name, shape)
        classes = spec.num_classes if classes is None else classes
        if classes < 2:
            raise ValueError(f"model {name}: num_classes is {classes}, it must be at least 2")
        sizes = {"num_classes": classes} if shape is None else {"input_shape": shape, "num_classes": classes}
        return super().build(name, *arguments, **{**options, **sizes})


def _spec(shapes: tuple[tuple[int, ...], ...], num_classes: int, make: Callable[..., nn.Module]) -> Spec:
    return Spec(input_shapes=shapes, num_classes=num_classes, make=make)


MODELS = ModelRegistry(
    {
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
        "saddle": Spec(
            input_shapes=saddle.INPUT_SHAPES, num_classes=saddle.NUM_CLASSES, make=saddle.Saddle, any_size=True
        ),
        "speech_lstm": Spec(
            input_shapes=speech_lstm.INPUT_SHAPES,
            num_classes=speech_lstm.NUM_CLASSES,
            make=speech_lstm.SpeechLSTM,
            any_size=True,
        ),
    }
)


def _spell(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) if shape else "()"
