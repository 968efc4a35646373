"""``sgd_step_`` against its reference in fp32 (bitwise) and float64 (within rounding), and ``torch.optim.SGD``."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ddpcore import ops
from ddpcore.ops import reference
from helpers import steps
from helpers.cases import each

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SWITCHES = ("momentum", "dampening", "weight_decay", "nesterov", "maximize", "decoupled", "first_step")
RULES = [
    dict(zip(SWITCHES, values, strict=True))
    for values in itertools.product((0.0, 0.9), (0.0, 0.9), (0.0, 0.01), *[(False, True)] * 4)
    if values[2] or not values[5]  # decoupling needs decay
]
# The rules of torch.optim.SGD: nesterov needs momentum without dampening, and torch detects the first step itself.
TORCH_RULES = [
    {name: value for name, value in rule.items() if name not in ("decoupled", "first_step")}
    for rule in RULES
    if not rule["first_step"]
    and not rule["decoupled"]
    and not (rule["nesterov"] and (rule["momentum"] == 0 or rule["dampening"] != 0))
]
PER_GROUP = ("lr", "weight_decay")
RULE: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
TERMS = 11  # operations and rounded constants of the longest rule


def run(where: Any, tensors: list[list[Tensor]], *, first_step: bool | None = None, **rule: Any) -> Tensor | None:
    """One step by ``ops`` or by ``reference``. ``first_step`` None: steps are not counted. Returns the count."""
    options = {**steps.COMMON, **steps.OPTIONS["sgd"], "momentum": 0.0, "weight_decay": [0.0], **rule}
    lists = {name: [options[name]] if isinstance(options[name], float) else options[name] for name in PER_GROUP}
    counts = [] if first_step is None else [torch.tensor([0.0 if first_step else 5.0], device=tensors[0][0].device)]
    scratch = ops.new_scratch(tensors[0]) if counts else None
    sizes = [len(tensors[0])]
    where.sgd_step_(*tensors, [], counts, scratch, **{**options, **lists, "group_sizes": sizes})
    return counts[0] if counts else None


def on_cpu(tensors: list[list[Tensor]], dtype: torch.dtype | None = None) -> list[list[Tensor]]:
    """Copies on the CPU, of the same strides."""
    return [[tensor.cpu().clone().to(dtype or tensor.dtype) for tensor in group] for group in tensors]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each(rule=RULES)
def test_every_rule(rule, dtype, randn, assert_same_bits, assert_near):
    rule = {"lr": 0.05, **rule}
    tensors = [[randn(5000, dtype)] for _ in range(3)]
    expected, exact, magnitude = on_cpu(tensors), on_cpu(tensors, torch.float64), on_cpu(tensors, torch.float64)
    count = run(ops, tensors, **rule)
    run(reference, expected, **rule)
    assert count == (1.0 if rule["first_step"] else 6.0)
    for got, want, what in zip(tensors, expected, ("param", "grad", "momentum"), strict=True):
        assert_same_bits(got[0], want[0], what)

    run(reference, exact, **rule)
    magnitude = [[tensor.abs() for tensor in group] for group in magnitude]
    run(reference, magnitude, **{**rule, "lr": -rule["lr"], "maximize": False})  # every term adds
    assert_near(tensors[0][0], exact[0][0], magnitude[0][0], TERMS)
    assert_near(tensors[2][0], exact[2][0], magnitude[2][0], TERMS)


def test_large(randn, assert_same_bits):
    tensors = [[randn(3_000_001)] for _ in range(3)]
    expected = on_cpu(tensors)
    run(ops, tensors, **RULE, nesterov=True)
    run(reference, expected, **RULE, nesterov=True)
    assert_same_bits(tensors[0][0], expected[0][0])
    assert_same_bits(tensors[2][0], expected[2][0])


def mixed_shapes(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    shapes = [(0,), (5,), (17, 9), (3, 4, 5, 6), (0, 3), (), (70, 90), (1, 6000), (8, 3, 3, 3), (4096,), (0,)]
    tensors = [torch.randn(shape).to(dtype).to(device) for shape in shapes]
    tensors[3] = tensors[3].contiguous(memory_format=torch.channels_last)
    tensors[8] = tensors[8].contiguous(memory_format=torch.channels_last)
    tensors[6] = tensors[6].t()
    return tensors


def memory_of(tensors: list[Tensor]) -> Tensor:
    """All elements in memory order."""
    return torch.cat([tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_list_is_flat(dtype, device, assert_same_bits):
    lists = [mixed_shapes(device, dtype) for _ in range(3)]
    flats = [[memory_of(tensors)] for tensors in lists]
    expected = on_cpu(lists)
    run(ops, lists, **RULE)
    run(ops, flats, **RULE)
    run(reference, expected, **RULE)
    for got, flat, want in zip(lists, flats, expected, strict=True):
        assert_same_bits(memory_of(got), flat[0], "list against flat")
        for left, right in zip(got, want, strict=True):
            assert_same_bits(left, right, f"shape {tuple(left.shape)}")


def test_any_number_of_threads(set_threads, assert_same_bits):
    start = [[torch.randn(size) for size in (1, 0, 300_000, 5, 77_777)] for _ in range(3)]
    results = []
    for num_threads in (1, 2):
        set_threads(num_threads)
        tensors = on_cpu(start)
        run(ops, tensors, **RULE)
        results.append([memory_of(group) for group in tensors])
    for one, two in zip(*results, strict=True):
        assert_same_bits(two, one)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each(rule=TORCH_RULES)
def test_torch_sgd(rule, dtype, randn):
    ours, buffer = randn(1000, dtype), randn(1000, dtype).fill_(math.nan)  # the first step reads no buffer
    theirs = torch.nn.Parameter(ours.clone())
    optimizer = torch.optim.SGD([theirs], lr=0.1, **rule)
    count, scratch = torch.zeros(1, device=ours.device), ops.new_scratch([ours])
    num_steps = 4
    scale = ours.abs().float()
    for _ in range(num_steps):
        gradient = randn(1000, dtype)
        theirs.grad = gradient.clone()
        optimizer.step()
        ops.sgd_step_([ours], [gradient], [buffer], [], [count], scratch, lr=0.1, **rule)
        scale = scale + gradient.abs().float()
    # torch rounds every intermediate to the storage type: about five roundings a step, of terms bounded by `scale`.
    bound = 5 * num_steps * torch.finfo(dtype).eps * scale
    assert ((ours.float() - theirs.detach().float()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_stay_where_they_are(dtype, device, assert_same_bits):
    param, grad, buffer = (torch.ones(40, dtype=dtype, device=device) for _ in range(3))
    grad[3], grad[17], param[20], buffer[39] = math.nan, math.inf, -math.inf, math.nan
    grad[5] = torch.finfo(dtype).max
    tensors = [[param], [grad], [buffer]]
    expected = on_cpu(tensors)
    run(ops, tensors, lr=4.0, momentum=0.9)
    run(reference, expected, lr=4.0, momentum=0.9)
    assert_same_bits(param, expected[0][0])
    assert_same_bits(buffer, expected[2][0])
    assert param.isnan().nonzero().flatten().tolist() == [3, 39]
    assert set(param.isinf().nonzero().flatten().tolist()) == {5, 17, 20}  # 4 * max overflows in every dtype


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_opcheck(momentum, randn):
    params, grads = [randn(33), randn(5).view(1, 5)], [randn(33), randn(5).view(1, 5)]
    buffers = [torch.zeros_like(param) for param in params] if momentum else []
    rule = {**steps.COMMON, **steps.OPTIONS["sgd"], "momentum": momentum, "group_sizes": [2]}
    torch.library.opcheck(torch.ops.ddpcore.sgd_step_.default, (params, grads, buffers, [], [], None), rule)


def test_fake_and_compiled(device, assert_same_bits):
    def step(param: Tensor, grad: Tensor, buffer: Tensor) -> Tensor:
        ops.sgd_step_([param], [grad * 2], [buffer], **RULE)
        return param + 1

    with FakeTensorMode():
        fake = [torch.empty(7, 3, device=device) for _ in range(3)]
        assert step(*fake).shape == (7, 3)

    eager = [torch.randn(7, 3, device=device) for _ in range(3)]
    compiled = [tensor.clone() for tensor in eager]
    expected = step(*eager)
    assert_same_bits(torch.compile(step, fullgraph=True, backend="aot_eager")(*compiled), expected)
    assert_same_bits(compiled[0], eager[0], "the mutated param")
    assert_same_bits(compiled[2], eager[2], "the mutated buffer")


def bad_arguments() -> dict[str, tuple[list[list[Tensor]], str]]:
    def one(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(*shape, dtype=dtype)

    return {
        "fewer grads": ([[one(4), one(4)], [one(4)], [one(4), one(4)]], "params and grads .* same length"),
        "no buffers": ([[one(4)], [one(4)], []], "momentum_buffers must have the length of params"),
        "float64": ([[one(4, dtype=torch.float64)]] * 3, "params must be float32, bfloat16 or float16"),
        "two dtypes": ([[one(4), one(4).half()]] * 3, "one dtype and one device"),
        "grad dtype": ([[one(4)], [one(4).half()], [one(4)]], "a grad must have the device and dtype of its param"),
        "grad shape": ([[one(4)], [one(5)], [one(4)]], "a grad must have the shape of its param"),
        "grad dims": ([[one(4)], [one(4, 1)], [one(4)]], "a grad must have the shape of its param"),
        "overlap": ([[one(1).expand(4)]] * 3, "must not overlap itself in memory"),
        "buffer dtype": ([[one(4)], [one(4)], [one(4).bfloat16()]], "a momentum buffer must have the device and dtype"),
        "buffer shape": ([[one(4)], [one(4)], [one(2, 2)]], "a momentum buffer must have the shape of its param"),
    }


@pytest.mark.parametrize("case", bad_arguments())
def test_bad_arguments(case):
    tensors, message = bad_arguments()[case]
    with pytest.raises(RuntimeError, match=message):
        ops.sgd_step_(*tensors, **RULE)


def test_other_strides_are_no_error(device, assert_same_bits):
    """Gradients and buffers in another memory order than their param, params with gaps: results are written back."""
    start = [torch.randn(4, 4) for _ in range(3)]
    expected = [tensor.clone() for tensor in start]
    run(reference, [[tensor] for tensor in expected], **RULE)
    for orders in (("t", "", ""), ("", "t", ""), ("", "", "t"), ("gaps", "gaps", "gaps"), ("t", "gaps", "")):
        tensors = []
        for tensor, order in zip(start, orders, strict=True):
            wide = torch.full((4, 8), 7.0)
            new = {"": tensor.clone(), "t": tensor.t().contiguous().t(), "gaps": wide[:, ::2].copy_(tensor)}[order]
            tensors.append([wide.to(device)[:, ::2] if order == "gaps" else new.to(device)])
        run(ops, tensors, **RULE)
        assert_same_bits(tensors[0][0], expected[0], f"the param of {orders}")
        assert_same_bits(tensors[1][0], start[1], f"the gradient of {orders}, which is not to change")
        assert_same_bits(tensors[2][0], expected[2], f"the buffer of {orders}")
