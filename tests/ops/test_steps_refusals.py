"""Invalid arguments of the steps: every message of the bindings, raised before anything has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ddpcore import ops
from helpers import steps
from helpers.each import each

every_rule = pytest.mark.parametrize("rule", steps.RULES)
PER_GROUP = {"group_sizes", "lr", "weight_decay", "device_lr", "adapt"}
LENGTHS = "lr, weight_decay, device_lr, steps and adapt must have the length of group_sizes"
SUM = "group_sizes must add up to the number of params"


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


def make(rule: str, dtype: torch.dtype = torch.float32, masters: bool = False) -> steps.Step:
    return steps.new_step(rule, [torch.randn(4, 3).to(dtype), torch.randn(5).to(dtype)], masters=masters)


def options(**changed: Any) -> Callable[[steps.Step], None]:
    return lambda step: step.options.update(changed)


def lists(**changed: Any) -> Callable[[steps.Step], None]:
    return lambda step: vars(step).update(changed)


def first(name: str, tensor: Tensor) -> Callable[[steps.Step], None]:
    return lambda step: getattr(step, name).__setitem__(0, tensor)


def buffer(tensor: Tensor) -> Callable[[steps.Step], None]:
    return lambda step: step.buffers[-1].__setitem__(0, tensor)


def one_element_short(step: steps.Step) -> None:
    """SGD needs no sums, only the counters."""
    step.scratch = step.scratch[: -1 if step.rule in steps.ADAPTIVE else -5]


REFUSED: dict[str, tuple[Callable[[steps.Step], None], str]] = {
    "fewer grads": (lists(grads=[zeros(4, 3)]), "params and grads must have the same length"),
    "more grads": (lists(grads=[zeros(4, 3), zeros(5), zeros(5)]), "params and grads must have the same length"),
    "int params": (first("params", zeros(4, 3, dtype=torch.int32)), "params must be float32, bfloat16 or float16"),
    "float64": (first("params", zeros(4, 3, dtype=torch.float64)), "params must be float32, bfloat16 or float16"),
    "two dtypes": (
        lambda step: step.params.__setitem__(1, zeros(5, dtype=torch.float16)),
        "all params of one call must have one dtype and one device",
    ),
    "grad dtype": (
        first("grads", zeros(4, 3, dtype=torch.float16)),
        "a grad must have the device and dtype of its param",
    ),
    "grad shape": (first("grads", zeros(3, 4)), "a grad must have the shape of its param"),
    "grad dims": (first("grads", zeros(4, 3, 1)), "a grad must have the shape of its param"),
    "grad numel": (first("grads", zeros(4, 2)), "a grad must have the shape of its param"),
    "buffer dtype": (buffer(zeros(4, 3, dtype=torch.float16)), "(buffer|exp_avg_sq) must have the device and dtype of"),
    "buffer shape": (buffer(zeros(12)), "(buffer|exp_avg_sq) must have the shape of its param"),
    "fewer buffers": (lambda step: step.buffers[-1].pop(), "must have the length of params"),
    "no buffers": (lambda step: step.buffers[0].clear(), "must have the length of params"),
    "sizes too small": (options(group_sizes=[1]), SUM),
    "sizes too large": (options(group_sizes=[3]), SUM),
    "a size below 0": (options(group_sizes=[-1]), SUM),
    "no groups": (
        lambda step: (step.options.update({key: [] for key in PER_GROUP & step.options.keys()}), step.steps.clear()),
        SUM,
    ),
    "two lrs": (options(lr=[0.1, 0.1]), LENGTHS),
    "no lr": (options(lr=[]), LENGTHS),
    "two decays": (options(weight_decay=[0.1, 0.1]), LENGTHS),
    "two device_lr": (options(device_lr=[zeros(1), zeros(1)]), LENGTHS),
    "two steps": (lists(steps=[zeros(1), zeros(1)]), "steps .*must have the length of group_sizes"),
    "device_lr dtype": (options(device_lr=[zeros(1, dtype=torch.float64)]), "a device_lr must be one float32"),
    "device_lr numel": (options(device_lr=[zeros(2)]), "a device_lr must be one float32 on the device of params"),
    "step dtype": (lists(steps=[zeros(1, dtype=torch.int64)]), "a step must be one float32 on the device of params"),
    "step numel": (lists(steps=[zeros(0)]), "a step must be one float32 on the device of params"),
    "grad_scale dtype": (options(grad_scale=zeros(1).double()), "grad_scale must be one float32 on the device of"),
    "grad_scale numel": (options(grad_scale=zeros(2)), "grad_scale must be one float32 on the device of params"),
    "found_inf dtype": (options(found_inf=zeros(1).bool()), "found_inf must be one float32 on the device of params"),
    "norm dtype": (options(norm_squared=zeros(1)), "norm_squared must be one float64 on the device of params"),
    "norm numel": (options(norm_squared=zeros(2).double()), "norm_squared must be one float64 on the device of params"),
    "masters of fp32": (
        lists(masters=[zeros(4, 3), zeros(5)]),
        "masters must be empty, or one a param, of bfloat16 or float16 params",
    ),
    "short scratch": (one_element_short, "scratch must be float64 .* at least [48] elements, zero at first"),
    "scratch dtype": (lists(scratch=zeros(99)), "scratch must be float64 on the device of params"),
    "scratch strides": (lists(scratch=zeros(99).double()[::2]), "scratch must be float64 on the device of params"),
    "a param over itself": (first("params", zeros(3).expand(4, 3)), "written must not overlap itself in memory"),
    "a buffer over itself": (buffer(zeros(3).expand(4, 3)), "written must not overlap itself in memory"),
}
ADAPTIVE: dict[str, tuple[Callable[[steps.Step], None], str]] = {
    "two adapts": (options(adapt=[1, 1]), LENGTHS),
    "no adapt": (options(adapt=[]), LENGTHS),
    "trust of one": (lists(trust=zeros(1, 3).double()), r"trust must be float64 \[params, 3\] on the device of params"),
    "trust of three": (lists(trust=zeros(3, 3).double()), r"trust must be float64 \[params, 3\]"),
    "trust dtype": (lists(trust=zeros(2, 3)), r"trust must be float64 \[params, 3\]"),
    "trust strides": (lists(trust=zeros(3, 2).double().t()), r"trust must be float64 \[params, 3\]"),
}
MASTERS: dict[str, tuple[Callable[[steps.Step], None], str]] = {
    "fewer masters": (lambda step: step.masters.pop(), "masters must be empty, or one a param"),
    "16-bit master": (first("masters", zeros(4, 3).half()), "a master must be float32 on the device of its param"),
    "master shape": (first("masters", zeros(12)), "a master must have the shape of its param"),
    "16-bit buffer": (buffer(zeros(4, 3).half()), "(buffer|exp_avg_sq) must be float32 on the device of its param"),
}


def assert_refused(step: steps.Step, message: str, assert_same_bits: Any) -> None:
    before = step.on_cpu()
    with pytest.raises(RuntimeError, match=message):
        step.run()
    steps.assert_unchanged(step, before, assert_same_bits)


@each("case", REFUSED)
@every_rule
def test_bad_arguments(rule, case, assert_same_bits):
    step = make(rule)
    change, message = REFUSED[case]
    change(step)
    assert_refused(step, message, assert_same_bits)


@each("case", ADAPTIVE)
@pytest.mark.parametrize("rule", steps.ADAPTIVE)
def test_bad_trust(rule, case, assert_same_bits):
    step = make(rule)
    change, message = ADAPTIVE[case]
    change(step)
    assert_refused(step, message, assert_same_bits)


@each("case", MASTERS)
@every_rule
def test_bad_masters(rule, case, assert_same_bits):
    step = make(rule, torch.float16, masters=True)
    change, message = MASTERS[case]
    change(step)
    assert_refused(step, message, assert_same_bits)


def test_counting_needs_scratch_or_steps(assert_same_bits):
    step = make("sgd")
    step.scratch = None
    with pytest.raises(RuntimeError, match="steps need scratch"):
        ops.sgd_step_(step.params, step.grads, *step.buffers, [], step.steps, None, **step.options)
    assert step.steps[0] == 3.0
    for rule in steps.MOMENTS:
        step = make(rule)
        step.steps = []
        assert_refused(step, "steps must have the length of group_sizes", assert_same_bits)


@pytest.mark.parametrize(
    ("rule", "option", "value", "message"),
    [
        ("lars", "variant", "You2017", "variant must be you2017, scaled_grad or scaled_lr, not You2017"),
        ("lars", "variant", "", "variant must be you2017, scaled_grad or scaled_lr, not "),
        ("lamb", "decay_mode", "l2", "decay_mode must be in_update, coupled or decoupled, not l2"),
    ],
)
def test_unknown_names(rule, option, value, message, assert_same_bits):
    step = make(rule)
    step.options[option] = value
    assert_refused(step, message, assert_same_bits)


@every_rule
def test_a_step_needs_a_param(rule):
    step = make(rule)
    step.params, step.grads = [], []
    step.buffers = [[] for _ in step.buffers]
    step.options["group_sizes"] = [0]
    with pytest.raises(RuntimeError, match="a step needs at least one param"):
        step.run()
