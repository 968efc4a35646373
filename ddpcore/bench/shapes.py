"""The shapes of the parameters of well-known networks: small, medium and large."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

Shapes = list[tuple[int, ...]]


def _lenet5() -> Shapes:
    """LeCun et al. 1998, with a head of 100 classes."""
    convolutions: Shapes = [(6, 3, 5, 5), (6,), (16, 6, 5, 5), (16,)]
    return convolutions + _linear(400, 120) + _linear(120, 84) + _linear(84, 100)


def _convolution(inputs: int, outputs: int, size: int) -> Shapes:
    """Without bias, with the scale and shift of its normalization."""
    return [(outputs, inputs, size, size), (outputs,), (outputs,)]


def _resnet18() -> Shapes:
    """He et al. 2016, for 1000 classes."""
    shapes = _convolution(3, 64, 7)
    inputs = 64
    for outputs in (64, 128, 256, 512):
        shapes += _convolution(inputs, outputs, 3) + _convolution(outputs, outputs, 3)
        if inputs != outputs:
            shapes += _convolution(inputs, outputs, 1)
        shapes += _convolution(outputs, outputs, 3) * 2
        inputs = outputs
    return shapes + _linear(512, 1000)


def _resnet50() -> Shapes:
    """He et al. 2016, with bottleneck blocks, for 1000 classes."""
    shapes = _convolution(3, 64, 7)
    inputs = 64
    for width, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(num_blocks):
            shapes += _convolution(inputs, width, 1) + _convolution(width, width, 3) + _convolution(width, 4 * width, 1)
            if block == 0:
                shapes += _convolution(inputs, 4 * width, 1)
            inputs = 4 * width
    return shapes + _linear(2048, 1000)


def _bert(width: int, num_layers: int) -> Shapes:
    """Devlin et al. 2019, uncased, with the pooler."""
    norm: Shapes = [(width,), (width,)]
    layer = _linear(width, width) * 4 + norm + _linear(width, 4 * width) + _linear(4 * width, width) + norm
    embeddings: Shapes = [(30522, width), (512, width), (2, width)]
    return embeddings + norm + layer * num_layers + _linear(width, width)


def _vit_s() -> Shapes:
    """Steiner et al. 2022, "How to train your ViT?": patches of 16 x 16 of images of 224 x 224, for 1000 classes."""
    width = 384
    norm: Shapes = [(width,), (width,)]
    block = norm + _linear(width, 3 * width) + _linear(width, width) + norm
    block += _linear(width, 4 * width) + _linear(4 * width, width)
    embeddings: Shapes = [(1, 1, width), (1, 197, width), (width, 3, 16, 16), (width,)]
    return embeddings + block * 12 + norm + _linear(width, 1000)


def _linear(inputs: int, outputs: int) -> Shapes:
    return [(outputs, inputs), (outputs,)]


@dataclass(frozen=True)
class ParameterList:
    """The parameters of a network.

    Attributes:
        name: on the command line.
        title: in tables.
    """

    name: str
    title: str
    shapes: Shapes

    def describe(self) -> dict[str, Any]:
        """Names and sizes, as in the JSON file of the optimizer bench."""
        sizes = {"parameters": sum(map(prod, self.shapes)), "num_tensors": len(self.shapes)}
        return {"list": self.name, "title": self.title, **sizes}


LISTS = {
    found.name: found
    for found in (
        ParameterList("lenet5", "LeNet-5", _lenet5()),
        ParameterList("resnet18", "ResNet-18", _resnet18()),
        ParameterList("resnet50", "ResNet-50", _resnet50()),
        ParameterList("vit-s", "ViT-S", _vit_s()),
        ParameterList("bert-base", "BERT-base", _bert(768, 12)),
        ParameterList("bert-large", "BERT-large", _bert(1024, 24)),
    )
}
USUAL = ("lenet5", "resnet18", "vit-s", "bert-base")  # small to large: the default of the bench
