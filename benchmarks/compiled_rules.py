"""Our optimizers beside what ``torch.compile`` makes of the same rules in operations on lists of tensors.

    python benchmarks/compiled_rules.py [--models resnet18] [--rules sgd adamw lars lamb] [--device auto] [--json FILE]

Steps run in turn on the parameters of a model of ddpcore, with its defaults; the ratio is the median over pairs.
Compiling the rules for a list takes up to minutes. The rules are those of ``FusedSGD``, ``FusedAdamW``, ``FusedLARS``
and ``FusedLAMB`` with their default options, momentum 0.9 or betas (0.9, 0.999), and weight decay 1e-4.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import torch
from common import add_options, append, parse
from timing import interleaved
from torch import Tensor

from ddpcore.models import MODELS
from ddpcore.optim import FusedAdamW, FusedLAMB, FusedLARS, FusedSGD
from ddpcore.runtime.machine import machine
from ddpcore.runtime.timing import quantiles

BETAS = (0.9, 0.999)
Tensors = list[Tensor] | tuple[Tensor, ...]


class ForeachStep:
    """An optimizer without groups: ``step()`` applies a rule to all parameters.

    Args:
        params: with gradients.
        rule: a function of this module.
        compiled: whether ``torch.compile`` compiles the rule, at the first step.
    """

    def __init__(
        self, params: Iterable[Tensor], rule: Callable[..., None], *, compiled: bool = True, **options: float
    ) -> None:
        self._params, self._options = list(params), options
        self._rule = torch.compile(rule, fullgraph=True, dynamic=False) if compiled else rule
        self._states = [[torch.zeros_like(param, dtype=torch.float32) for param in self._params] for _ in range(2)]
        self._count = torch.zeros((), device=self._params[0].device)

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters."""
        grads = [param.grad for param in self._params]
        self._rule(self._params, grads, *self._states, self._count, **self._options)


def sgd(
    params: Tensors, grads: Tensors, buffers: Tensors, _: Tensors, __: Tensor,
    *, lr: float, momentum: float, weight_decay: float,
) -> None:  # fmt: skip
    """SGD with momentum."""
    _momentum_step(params, torch._foreach_add(grads, params, alpha=weight_decay), buffers, lr, momentum)


def lars(
    params: Tensors, grads: Tensors, buffers: Tensors, _: Tensors, __: Tensor,
    *, lr: float, momentum: float, weight_decay: float, trust_coefficient: float = 0.001, eps: float = 1e-8,
) -> None:  # fmt: skip
    """LARS as in You et al. 2017."""
    weights, slopes = _norms(params), _norms(grads)
    ratio = trust_coefficient * weights / (slopes + weight_decay * weights + eps)
    ratio = torch.where((weights > 0) & (slopes > 0), ratio, 1.0)
    update = torch._foreach_add(grads, params, alpha=weight_decay)
    _momentum_step(params, torch._foreach_mul(update, (lr * ratio).unbind()), buffers, 1.0, momentum)


def adamw(
    params: Tensors, grads: Tensors, means: Tensors, squares: Tensors, count: Tensor,
    *, lr: float, weight_decay: float, eps: float = 1e-8,
) -> None:  # fmt: skip
    """Adam with decoupled weight decay."""
    update = _adam_update(grads, means, squares, count, eps)
    torch._foreach_mul_(params, 1 - lr * weight_decay)
    torch._foreach_add_(params, update, alpha=-lr)


def lamb(
    params: Tensors, grads: Tensors, means: Tensors, squares: Tensors, count: Tensor,
    *, lr: float, weight_decay: float, eps: float = 1e-6,
) -> None:  # fmt: skip
    """LAMB as in You et al. 2020."""
    update = _adam_update(grads, means, squares, count, eps)
    update = torch._foreach_add(update, params, alpha=weight_decay)
    weights, lengths = _norms(params), _norms(update)
    ratio = torch.where((weights > 0) & (lengths > 0), weights / lengths, 1.0)
    torch._foreach_sub_(params, torch._foreach_mul(update, (lr * ratio).unbind()))


def _norms(tensors: Tensors) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors))


def _momentum_step(params: Tensors, update: Tensors, buffers: Tensors, lr: float, momentum: float) -> None:
    torch._foreach_mul_(buffers, momentum)
    torch._foreach_add_(buffers, update)
    torch._foreach_add_(params, buffers, alpha=-lr)


def _adam_update(grads: Tensors, means: Tensors, squares: Tensors, count: Tensor, eps: float) -> Tensors:
    """The corrected mean over the root of the corrected square. Updates both and the count."""
    beta1, beta2 = BETAS
    torch._foreach_lerp_(means, grads, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
    count += 1
    roots = torch._foreach_sqrt(squares)
    torch._foreach_mul_(roots, (1 - beta2**count).rsqrt())
    torch._foreach_add_(roots, eps)
    return torch._foreach_mul(torch._foreach_div(means, roots), 1 / (1 - beta1**count))


DECAY = {"lr": 1e-3, "weight_decay": 1e-4}
MOMENTUM = {**DECAY, "momentum": 0.9}
RULES: dict[str, tuple[Any, Callable[..., None], dict[str, float]]] = {
    "sgd": (FusedSGD, sgd, MOMENTUM),
    "adamw": (FusedAdamW, adamw, DECAY),
    "lars": (FusedLARS, lars, MOMENTUM),
    "lamb": (FusedLAMB, lamb, DECAY),
}


def parameters(name: str, device: str) -> list[torch.nn.Parameter]:
    """Of a model, with gradients."""
    params = [*MODELS.build(name).to(device).parameters()]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", choices=MODELS.names(), nargs="+", default=["resnet18"])
    parser.add_argument("--rules", choices=list(RULES), nargs="+", default=list(RULES))
    add_options(parser, repeats=21)
    options = parse(parser)
    for name, rule in product(options.models, options.rules):
        make, function, settings = RULES[rule]
        ours = make(parameters(name, options.device), **settings)
        compiled = ForeachStep(parameters(name, options.device), function, **settings)
        own, theirs = interleaved([ours.step, compiled.step], options.device, options.repeats)
        row = {
            "case": f"{make.__name__} / torch.compile, {name}",
            "numel": sum(param.numel() for param in parameters(name, "cpu")),
            "ms": quantiles(1e3 * seconds for seconds in own),
            "compiled_ms": quantiles(1e3 * seconds for seconds in theirs),
            "ratio": quantiles(one / other for one, other in zip(own, theirs, strict=True)),
            "repeats": options.repeats,
            "threads": torch.get_num_threads(),
            **machine(options.device),
        }
        ratio = row["ratio"]
        print(f"{row['case']:40}{ratio['p50']:>8.3f}  ({ratio['p20']:.3f}-{ratio['p80']:.3f})")
        append(options.json, row)


if __name__ == "__main__":
    main()
