"""The parameters of three well-known networks, as shapes: small, medium and large."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

Shapes = list[tuple[int, ...]]


def _lenet5() -> Shapes:
    """LeCun et al. 1998, with a head of 100 classes."""
    convolutions: Shapes = [(6, 3, 5, 5), (6,), (16, 6, 5, 5), (16,)]
    return convolutions + _linear(400, 120) + _linear(120, 84) + _linear(84, 100)


def _resnet18() -> Shapes:
    """He et al. 2016, for 1000 classes: convolutions without bias, each with scale and shift of its norm."""

    def convolution(inputs: int, outputs: int, size: int) -> Shapes:
        return [(outputs, inputs, size, size), (outputs,), (outputs,)]

    shapes = convolution(3, 64, 7)
    inputs = 64
    for outputs in (64, 128, 256, 512):
        shapes += convolution(inputs, outputs, 3) + convolution(outputs, outputs, 3)
        if inputs != outputs:
            shapes += convolution(inputs, outputs, 1)
        shapes += convolution(outputs, outputs, 3) * 2
        inputs = outputs
    return shapes + _linear(512, 1000)


def _bert_base() -> Shapes:
    """Devlin et al. 2019, uncased, with the pooler."""
    width = 768
    norm: Shapes = [(width,), (width,)]
    layer = _linear(width, width) * 4 + norm + _linear(width, 4 * width) + _linear(4 * width, width) + norm
    embeddings: Shapes = [(30522, width), (512, width), (2, width)]
    return embeddings + norm + layer * 12 + _linear(width, width)


def _linear(inputs: int, outputs: int) -> Shapes:
    return [(outputs, inputs), (outputs,)]


_LISTS: dict[str, tuple[str, Callable[[], Shapes]]] = {
    "lenet5": ("LeNet-5", _lenet5),
    "resnet18": ("ResNet-18", _resnet18),
    "bert-base": ("BERT-base", _bert_base),
}


def names() -> tuple[str, ...]:
    """What ``shapes`` and ``title`` take, by size."""
    return tuple(_LISTS)


def title(name: str) -> str:
    """The list's name as people write it."""
    return _LISTS[name][0]


def shapes(name: str) -> Shapes:
    """The shapes of a list's parameters."""
    return _LISTS[name][1]()


def num_elements(shapes: Sequence[tuple[int, ...]]) -> int:
    """Elements of all together."""
    return sum(prod(shape) for shape in shapes)
