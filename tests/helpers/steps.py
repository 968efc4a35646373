"""One step of an optimizer as a value: tensors and options, for the kernels, the reference and float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddpcore import ops
from ddpcore.ops import reference

# One row of lanes, one tile and one block of the kernels, each -1, 0 and +1; none; one; several blocks a thread.
SIZES = [0, 1, 15, 16, 17, 1023, 1024, 1025, 4095, 4096, 4097, 100_003]
RULES = ["sgd", "adamw", "lars", "lamb"]
ADAPTIVE = ["lars", "lamb"]
MOMENTS = ["adamw", "lamb"]
# How the weights are stored, and whether fp32 masters stand behind them.
KINDS = {
    "fp32": (torch.float32, False),
    "bf16": (torch.bfloat16, False),
    "fp16": (torch.float16, False),
    "bf16-masters": (torch.bfloat16, True),
    "fp16-masters": (torch.float16, True),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "dampening": 0.0, "nesterov": False, "decoupled": False},
    "adamw": {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "decoupled": True},
    "lars": {
        "adapt": [1], "variant": "you2017", "trust_coefficient": 0.02, "eps": 1e-8,
        "momentum": 0.9, "dampening": 0.0, "nesterov": False, "decoupled": False,
    },
    "lamb": {
        "adapt": [1], "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "debias": True, "decay_mode": "in_update",
        "min_ratio": 0.0, "max_ratio": math.inf, "min_weight_norm": 0.0, "max_weight_norm": math.inf,
    },
}  # fmt: skip
COMMON: dict[str, Any] = {
    "lr": [0.05], "weight_decay": [0.01], "device_lr": [], "maximize": False,
    "grad_scale": None, "found_inf": None, "norm_squared": None, "max_norm": 0.0,
}  # fmt: skip
SCALARS = ("grad_scale", "found_inf", "norm_squared")
EPS = torch.finfo(torch.float32).eps
TERMS_OF_ONE = 8  # roundings by which two ways of writing one step can differ


class Step:
    """A call of ``<rule>_step_``. ``buffers`` holds the lists of the rule: the momentum, or both moments."""

    def __init__(self, rule: str, params: list[Tensor], grads: list[Tensor], buffers: list[list[Tensor]]) -> None:
        self.rule, self.params, self.grads, self.buffers = rule, params, grads, buffers
        self.masters: list[Tensor] = []
        self.steps: list[Tensor] = []
        self.options = {"group_sizes": [len(params)], **copy.deepcopy(COMMON), **copy.deepcopy(OPTIONS[rule])}
        self.scratch = ops.new_scratch(params)
        self.trust = ops.new_trust(params)

    def run(self, where: Any = ops) -> Step:
        rows = [self.trust] if self.rule in ADAPTIVE else []
        lists = [self.params, self.grads, *self.buffers, self.masters, self.steps]
        getattr(where, f"{self.rule}_step_")(*lists, self.scratch, *rows, **self.options)
        return self

    def written(self) -> dict[str, list[Tensor]]:
        """Everything that a step may change."""
        found = {"param": self.params, "master": self.masters, "step": self.steps}
        return found | {f"buffer {index}": buffers for index, buffers in enumerate(self.buffers)}

    def change(self, tensor_to: Callable[[Tensor], Tensor]) -> Step:
        """The same step on other tensors."""
        new = copy.copy(self)
        new.options = dict(self.options)
        for name in ("params", "grads", "masters", "steps"):
            setattr(new, name, [tensor_to(tensor) for tensor in getattr(self, name)])
        new.buffers = [[tensor_to(tensor) for tensor in buffers] for buffers in self.buffers]
        new.options["device_lr"] = [tensor_to(tensor) for tensor in self.options["device_lr"]]
        for name in SCALARS:
            if self.options[name] is not None:
                new.options[name] = tensor_to(self.options[name])
        new.scratch, new.trust = tensor_to(self.scratch), tensor_to(self.trust)
        return new

    def on_cpu(self) -> Step:
        """A copy on the CPU, of the same strides."""
        return self.change(lambda tensor: tensor.cpu().clone())

    def exact(self) -> Step:
        """A copy in float64, of the weights behind the params."""
        new = self.change(lambda tensor: tensor.cpu().double())
        new.params, new.masters = [weight.cpu().double() for weight in self.masters or self.params], []
        return new

    def only(self, indices: Sequence[int]) -> Step:
        """The step of some of the params, as one group with the options of the first one's."""
        new = copy.copy(self)
        group = self.group_of(indices[0])
        for name in ("params", "grads", "masters"):
            setattr(new, name, [getattr(self, name)[i] for i in indices] if getattr(self, name) else [])
        new.buffers = [[buffers[i] for i in indices] if buffers else [] for buffers in self.buffers]
        new.steps = [self.steps[group].clone()] if self.steps else []
        new.options = {**self.options, "group_sizes": [len(indices)]}
        for name in ("lr", "weight_decay", "device_lr", "adapt"):
            if new.options.get(name):
                new.options[name] = [self.options[name][group]]
        if "state_firsts" in new.options:
            new.options["state_firsts"] = [self.options["state_firsts"][i] for i in indices]
        new.scratch, new.trust = ops.new_scratch(new.params), ops.new_trust(new.params)
        return new

    def rounded(self, firsts: Sequence[int] | None = None, seed: int = 20_200_101) -> Step:
        """The same step with buffers of bfloat16 that are rounded stochastically; by default with indices far apart."""
        self.buffers = [[tensor.bfloat16() for tensor in buffers] for buffers in self.buffers]
        firsts = [(index + 1) << 33 for index in range(len(self.params))] if firsts is None else list(firsts)
        self.options.update(state_firsts=firsts, state_seed=seed)
        return self

    def group_of(self, index: int) -> int:
        return [group for group, size in enumerate(self.options["group_sizes"]) for _ in range(size)][index]

    def scales(self) -> list[float]:
        """What the trust ratio of each tensor becomes in the arithmetic of its elements."""
        if self.rule not in ADAPTIVE:
            return [1.0] * len(self.params)
        lr = [float(tensor) for tensor in self.options["device_lr"]] or self.options["lr"]
        alone = self.options.get("variant") == "scaled_grad"
        rates = [1.0 if alone else float(np.float32(lr[self.group_of(index)])) for index in range(len(self.params))]
        return [float(np.float32(rate * float(row[0]))) for rate, row in zip(rates, self.trust, strict=True)]


def new_step(
    rule: str,
    weights: Sequence[Tensor],
    *,
    masters: bool = False,
    counted: bool = True,
    make: Callable[[Tensor], Tensor] = torch.randn_like,
    **options: Any,
) -> Step:
    """A step on the weights with gradients and buffers that ``make`` draws like them; ``counted``: after three."""
    params = list(weights)
    wide = masters or rule in MOMENTS
    like = [param.float() if wide else param for param in params]
    buffers = [[make(tensor) for tensor in like]]
    if rule in MOMENTS:  # second moments well above zero, so that the root keeps its digits
        buffers.append([make(tensor).clamp_(-1, 1).mul_(0.5).add_(1.0) for tensor in like])
    step = Step(rule, params, [make(param) for param in params], buffers)
    step.options.update(options)
    num_groups = len(step.options["group_sizes"])
    for name in ("lr", "weight_decay", "adapt"):
        if len(step.options.get(name, [])) == 1:
            step.options[name] = step.options[name] * num_groups
    if masters:  # fp32 weights that round to the params
        step.masters = [(param.float() * (1 + 1e-4)).clone() for param in params]
        for param, master in zip(params, step.masters, strict=True):
            param.copy_(master)
    if counted:
        step.steps = [torch.full((1,), 3.0, device=params[0].device) for _ in range(num_groups)]
    return step


def assert_same_step(got: Step, want: Step, assert_same_bits: Callable[..., None]) -> None:
    """Bitwise, given the trust ratios, which are sums of float64 in another order.

    Where such a ratio falls on the other side of a rounding to fp32, the elements of its tensor differ by one unit of
    the product of that ratio: at most eps of the largest number of the tensor before or after, and eps/2 for each of
    the four roundings that follow.
    """
    if got.rule in ADAPTIVE:
        torch.testing.assert_close(got.trust.cpu(), want.trust, rtol=1e-12, atol=0.0, equal_nan=True)
    same = [a == b or (a != a and b != b) for a, b in zip(got.scales(), want.scales(), strict=True)]
    for name, tensors in got.written().items():
        for index, (left, right) in enumerate(zip(tensors, want.written()[name], strict=True)):
            if name == "step" or same[index]:
                assert_same_bits(left, right, f"{name} {index}")
            else:
                largest = float(right.abs().max()) + float(want.grads[index].abs().max())
                bound = 3 * EPS * largest + torch.finfo(right.dtype).eps * right.abs().float()
                assert ((left.cpu().float() - right.float()).abs() <= bound).all(), f"{name} {index}"


def assert_unchanged(step: Step, before: Step, assert_same_bits: Callable[..., None]) -> None:
    for name, tensors in step.written().items():
        for index, (left, right) in enumerate(zip(tensors, before.written()[name], strict=True)):
            assert_same_bits(left, right, f"{name} {index}")
    assert_same_bits(step.trust, before.trust, "trust")


def run_reference(step: Step) -> Step:
    return step.on_cpu().run(reference)


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, which: range, gap: bool = False) -> None:
    """Take these steps with gradients that depend on the step alone; with ``gap`` some parameters have none."""
    for step in which:
        generator = torch.Generator().manual_seed(step)
        for index, param in enumerate(model.parameters()):
            grad = torch.randn(param.shape, generator=generator).to(param)
            param.grad = None if gap and (index + step) % 3 == 0 else grad
        optimizer.step()
