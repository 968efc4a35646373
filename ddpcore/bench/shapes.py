"""The parameters of well-known networks, as shapes: small, medium and large."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

Shapes = list[tuple[int, ...]]


def _lenet5() -> Shapes:
    """LeCun et al. 1998, with a head of 100 classes."""
    convolutions: Shapes = [(6, 3, 5, 5), (6,), (16, 6, 5, 5), (16,)]
    return convolutions + _linear(400, 120) + _linear(120, 84) + _linear(84, 100)


def _convolution(inputs: int, outputs: int, size: int) -> Shapes:
    """Without bias, with scale and shift of its norm."""
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
    """The same paper's, of bottlenecks."""
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


def _linear(inputs: int, outputs: int) -> Shapes:
    return [(outputs, inputs), (outputs,)]


_LISTS: dict[str, tuple[str, Callable[[], Shapes]]] = {
    "lenet5": ("LeNet-5", _lenet5),
    "resnet18": ("ResNet-18", _resnet18),
    "resnet50": ("ResNet-50", _resnet50),
    "bert-base": ("BERT-base", lambda: _bert(768, 12)),
    "bert-large": ("BERT-large", lambda: _bert(1024, 24)),
}
USUAL = ("lenet5", "resnet18", "bert-base")
"""One of each size: what a bench takes unless it is told more."""


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
