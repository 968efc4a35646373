"""The optimizers that are compared: ours, torch's, and other libraries' if installed; and the parameters.

All use momentum 0.9 or betas (0.9, 0.999), and weight decay 1e-4. Parameters have the shapes of well-known networks.
"""

import importlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

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


# Name on the command line -> title in tables, and shapes.
LISTS = {
    "lenet5": ("LeNet-5", _lenet5()),
    "resnet18": ("ResNet-18", _resnet18()),
    "resnet50": ("ResNet-50", _resnet50()),
    "vit-s": ("ViT-S", _vit_s()),
    "bert-base": ("BERT-base", _bert(768, 12)),
    "bert-large": ("BERT-large", _bert(1024, 24)),
}
USUAL = ("lenet5", "resnet18", "vit-s", "bert-base")  # small to large: the default


def describe(name: str) -> dict[str, Any]:
    """Names and sizes of the parameters of a network, as in the JSON file of the optimizer bench."""
    title, shapes = LISTS[name]
    return {"list": name, "title": title, "parameters": sum(map(prod, shapes)), "num_tensors": len(shapes)}


_DECAY = {"lr": 1e-3, "weight_decay": 1e-4}
_MOMENTUM = {**_DECAY, "momentum": 0.9}


@dataclass(frozen=True)
class Implementation:
    """An optimizer of a library, with options that make it do the same work as its counterpart."""

    name: str  # as printed
    module: str  # from which it is imported when it is needed
    path: str  # of the class in the module
    options: dict[str, Any] = field(default_factory=dict)  # of the class
    install: str = ""  # how to install the library; empty for ddpcore and torch
    matrices: bool = False  # it gets the parameters of two dimensions only
    rounded: bool = False  # our optimizer with momentum and moments of bfloat16

    @property
    def library(self) -> str:
        """The package that must be installed."""
        return self.module.partition(".")[0]

    def is_installed(self) -> bool:
        """Whether the library can be found. It is not imported."""
        return importlib.util.find_spec(self.library) is not None

    def build(self, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of these parameters."""
        chosen = [param for param in params if param.ndim == 2 or not self.matrices]
        named = getattr(importlib.import_module(self.module), self.path)
        optimizer: torch.optim.Optimizer = named(chosen, **self.options)
        return optimizer

    def why_unusable(self, device: str, dtype: torch.dtype) -> str | None:
        """The error, in one line, of a step on one small parameter, as of a library that does not fit this torch."""
        try:
            param = torch.nn.Parameter(torch.ones(4, 4, device=device, dtype=dtype))
            param.grad = torch.ones_like(param)
            self.build([param]).step()
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            return f"{self.name} is left out: {type(error).__name__}: {first_line}"
        return None


@dataclass(frozen=True)
class Comparison:
    """Two implementations; the ratio is the time of the left over the time of the right."""

    optimizer: str
    left: Implementation
    right: Implementation

    @property
    def name(self) -> str:
        """As printed."""
        return f"{self.left.name} / {self.right.name}"

    @property
    def peer(self) -> Implementation | None:
        """The implementation of another library, if there is one."""
        return self.left if self.left.install else None


_SGD = Implementation("torch.optim.SGD(fused=True)", "torch.optim", "SGD", {**_MOMENTUM, "fused": True})
_ADAMW = Implementation("torch.optim.AdamW(fused=True)", "torch.optim", "AdamW", {**_DECAY, "fused": True})
_MUON = Implementation("torch.optim.Muon", "torch.optim", "Muon", _DECAY, matrices=True)
OURS = {
    "sgd": Implementation("FusedSGD", "ddpcore.optim", "FusedSGD", _MOMENTUM),
    "adamw": Implementation("FusedAdamW", "ddpcore.optim", "FusedAdamW", _DECAY),
    "lars": Implementation("FusedLARS", "ddpcore.optim", "FusedLARS", _MOMENTUM),
    "lamb": Implementation("FusedLAMB", "ddpcore.optim", "FusedLAMB", _DECAY),
    "muon": Implementation("Muon", "ddpcore.optim", "Muon", _DECAY, matrices=True),
}

USUAL_OPTIMIZERS = ("sgd", "adamw", "lars", "lamb")  # without Muon, whose steps take seconds


def _rounded(optimizer: str) -> Comparison:
    """Our optimizer with momentum and moments of bfloat16 beside the one with float32."""
    own = OURS[optimizer]
    options = {**own.options, "state_dtype": "bfloat16"}
    return Comparison(optimizer, replace(own, name=f"{own.name}(bfloat16 state)", options=options, rounded=True), own)


def _peer(optimizer: str, module: str, path: str, options: dict[str, Any]) -> Comparison:
    """Another library beside our optimizer."""
    other = Implementation(f"{module}.{path}", module, path, options, install="pip install 'ddpcore[bench]'")
    return Comparison(optimizer, other, OURS[optimizer])


COMPARISONS = (
    Comparison("sgd", OURS["sgd"], _SGD),
    Comparison("adamw", OURS["adamw"], _ADAMW),
    Comparison("lars", OURS["lars"], _SGD),
    Comparison("lamb", OURS["lamb"], _ADAMW),
    *map(_rounded, USUAL_OPTIMIZERS),
    _peer("lamb", "torch_optimizer", "Lamb", _DECAY),
    _peer("lamb", "pytorch_optimizer", "Lamb", _DECAY),
    _peer("lars", "torch_optimizer", "LARS", _MOMENTUM),
    Comparison("muon", OURS["muon"], _MUON),
)
"""In the order of the result."""
