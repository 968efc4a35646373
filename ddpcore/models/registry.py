"""Models by name."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from typing_extensions import override

from ddpcore.models import convolutional, mobile, residual, small, transformers
from ddpcore.options.registry import Registry
from ddpcore.options.typed import check_range


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a model takes."""

    input_shapes: tuple[tuple[int, ...], ...]  #: of one sample that fit, the default first; empty where any may fit
    num_classes: int = 2  #: the default
    any_size: bool = False  #: samples of other sizes fit too, with as many dimensions
    tokens: bool = False  #: samples are tokens, int64 [T] below num_classes, and not images or floating samples

    def fits(self, input_shape: tuple[int, ...], tokens: bool = False) -> bool:
        """Whether the model takes samples of this shape (without the batch)."""
        if tokens != self.tokens:
            return False
        if not self.input_shapes or tuple(input_shape) in self.input_shapes:
            return True
        return self.any_size and len(input_shape) == len(self.input_shapes[0]) and min(input_shape) >= 1


class ModelRegistry(Registry[nn.Module]):
    """Models by name, with the samples that they take.

    A class or function is called with ``input_shape`` and ``num_classes``, if it has these parameters. It may say
    what fits by attributes ``input_shapes`` (shapes, the default first), ``num_classes``, ``any_size`` and ``tokens``.
    """

    def spec(self, name: str) -> Spec:
        """What the model of a name takes. ValueError as :meth:`find`."""
        make = self.find(name)
        others = {key: getattr(make, key) for key in ("num_classes", "any_size", "tokens") if hasattr(make, key)}
        return Spec(input_shapes=tuple(map(tuple, getattr(make, "input_shapes", ()))), **others)

    def check_input(self, name: str, input_shape: tuple[int, ...], tokens: bool | None = None) -> None:
        """Raise ValueError, with the models that do, unless the model takes samples of this shape, without the batch.

        ``tokens`` says whether they are tokens; None: as the model takes.
        """
        spec = self.spec(name)
        tokens = spec.tokens if tokens is None else tokens
        if spec.fits(input_shape, tokens):
            return
        fitting = [other for other in self.names() if self.spec(other).fits(input_shape, tokens)]
        advice = f"models that do: {', '.join(fitting)}" if fitting else "no model does"
        kinds, given = ("images or floating samples", "tokens"), _spell(input_shape)
        takes = " or ".join(map(_spell, spec.input_shapes)) + (", or other sizes" if spec.any_size else "")
        takes = f"samples of {takes}"
        if tokens != spec.tokens:
            takes, given = kinds[spec.tokens], f"{kinds[tokens]} of {given}"
        raise ValueError(f"model {name} takes {takes} and does not fit {given}: {advice}")

    @override
    def build(self, name: str, *arguments: Any, **options: Any) -> nn.Module:
        """A new model on torch's default device; torch's seed decides its weights.

        The options are the model's, ``input_shape`` of one sample and ``num_classes``, both with the model's defaults.

        ValueError: no such model or option, the shape does not fit, fewer than 2 classes, or a value is refused.
        """
        spec = self.spec(name)
        shape, classes = options.get("input_shape"), options.get("num_classes")
        if shape is None and spec.input_shapes:
            shape = spec.input_shapes[0]
        if shape is not None:
            shape = tuple(shape)
            self.check_input(name, shape)
        classes = spec.num_classes if classes is None else classes
        check_range(f"model {name}: num_classes", classes, least=2)
        sizes = {"num_classes": classes} if shape is None else {"input_shape": shape, "num_classes": classes}
        return super().build(name, *arguments, **{**options, **sizes})


MODELS = ModelRegistry("model", "ddpcore.models", nn.Module, {
    "simplenet": small.SimpleNet, "mlp": small.MLP, "lenet5": small.LeNet5, "mnist_cnn": small.MnistCNN,
    "simple_cnn": small.SimpleCNN, "resnet": residual.ResNet, "resnet18": residual.ResNet18,
    "vit": transformers.ViT, "byte_transformer": transformers.ByteTransformer,
    "vgg19": convolutional.VGG19, "googlenet": convolutional.GoogLeNet, "resnext29": residual.ResNeXt29,
    "densenet121": convolutional.DenseNet121, "mobilenet": mobile.MobileNet, "senet18": residual.SENet18,
    "mobilenet_v2": mobile.MobileNetV2, "shufflenet": mobile.ShuffleNet, "efficientnet_b0": mobile.EfficientNetB0,
    "saddle": small.Saddle, "speech_lstm": small.SpeechLSTM,
}, reserved=("input_shape", "num_classes"))  # fmt: skip


def _spell(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) if shape else "()"
