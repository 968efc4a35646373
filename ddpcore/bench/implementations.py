"""The optimizers that are compared: ours, torch's, and those of other libraries, if they are installed.

All use momentum 0.9 or betas (0.9, 0.999), and weight decay 1e-4.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch

from ddpcore.bench.foreach import ForeachStep

_DECAY = {"lr": 1e-3, "weight_decay": 1e-4}
_MOMENTUM = {**_DECAY, "momentum": 0.9}
_EXTRA = "pip install 'ddpcore[bench]'"


@dataclass(frozen=True)
class Implementation:
    """An optimizer of a library, with options that make it do the same work as its counterpart.

    Attributes:
        name: as printed.
        module: from which it is imported when it is needed.
        path: of the class in the module, or of the rule, if it is compiled.
        options: of the class or rule.
        install: how to install the library; empty for ddpcore and torch.
        listed: whether the table has a line for it even if it is not installed.
        cuda_only: it does not run on the CPU.
        matrices: it gets the parameters of two dimensions only.
        rounded: our optimizer with momentum and moments of bfloat16.
        compiled: ``torch.compile`` makes its kernels at the first step.
    """

    name: str
    module: str
    path: str
    options: dict[str, Any] = field(default_factory=dict)
    install: str = ""
    listed: bool = True
    cuda_only: bool = False
    matrices: bool = False
    rounded: bool = False
    compiled: bool = False

    @property
    def library(self) -> str:
        """The package that must be installed."""
        return self.module.partition(".")[0]

    def is_installed(self) -> bool:
        """Whether the library can be found. It is not imported."""
        return importlib.util.find_spec(self.library) is not None

    def build(self, params: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer | ForeachStep:
        """The optimizer of these parameters."""
        chosen = [param for param in params if param.ndim == 2 or not self.matrices]
        named = attrgetter(self.path)(importlib.import_module(self.module))
        if self.compiled:
            return ForeachStep(chosen, named, **self.options)
        optimizer: torch.optim.Optimizer = named(chosen, **self.options)
        return optimizer

    def why_unusable(self, device: str, dtype: torch.dtype) -> str | None:
        """The error, in one line, of a step on one small parameter; None if there is none.

        An installed library may be incompatible with this torch, or lack its compiled part.
        """
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


ROUNDED = {
    name: replace(
        own, name=f"{own.name}(bfloat16 state)", options={**own.options, "state_dtype": "bfloat16"}, rounded=True
    )
    for name, own in OURS.items()
    if name != "muon"
}
USUAL_OPTIMIZERS = tuple(name for name in OURS if name != "muon")  # whose steps take seconds


def _peer(optimizer: str, module: str, path: str, options: dict[str, Any], **more: Any) -> Comparison:
    name = f"{module.partition('.')[0]}.{path}"
    return Comparison(optimizer, Implementation(name, module, path, options, **more), OURS[optimizer])


def _compiled(optimizer: str) -> Comparison:
    options = OURS[optimizer].options
    name = f"torch.compile(foreach {optimizer})"
    return Comparison(
        optimizer, OURS[optimizer], Implementation(name, "ddpcore.bench.foreach", optimizer, options, compiled=True)
    )


_TIMM = {"install": "pip install timm", "listed": False}
_APEX = {"install": "build it from github.com/NVIDIA/apex", "listed": False, "cuda_only": True}
COMPARISONS = (
    Comparison("sgd", OURS["sgd"], _SGD),
    Comparison("adamw", OURS["adamw"], _ADAMW),
    Comparison("lars", OURS["lars"], _SGD),
    Comparison("lamb", OURS["lamb"], _ADAMW),
    *(Comparison(name, rounded, OURS[name]) for name, rounded in ROUNDED.items()),
    *map(_compiled, USUAL_OPTIMIZERS),
    _peer("lamb", "torch_optimizer", "Lamb", _DECAY, install=_EXTRA),
    _peer("lamb", "pytorch_optimizer", "Lamb", _DECAY, install=_EXTRA),
    _peer("lars", "torch_optimizer", "LARS", _MOMENTUM, install=_EXTRA),
    _peer("lars", "timm.optim", "Lars", _MOMENTUM, **_TIMM),
    _peer("lamb", "timm.optim", "Lamb", {**_DECAY, "max_grad_norm": None}, **_TIMM),
    _peer("sgd", "apex.optimizers", "FusedSGD", _MOMENTUM, **_APEX),
    _peer("lamb", "apex.optimizers", "FusedLAMB", _DECAY, **_APEX),
    Comparison("muon", OURS["muon"], _MUON),
)
"""In the order of the table."""
