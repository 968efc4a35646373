"""``sgd_step_`` against its twin (bitwise), the twin in float64 (within rounding) and ``torch.optim.SGD``."""

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

# One row of lanes, one tile and one block of the kernels, each -1, 0 and +1; none; one; several blocks a thread.
SIZES = [0, 1, 15, 16, 17, 1023, 1024, 1025, 4095, 4096, 4097, 100_003]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RULES = [
    dict(zip(("momentum", "dampening", "weight_decay", "nesterov", "maximize", "first_step"), values, strict=True))
    for values in itertools.product((0.0, 0.9), (0.0, 0.9), (0.0, 0.01), *[(False, True)] * 3)
]
# What torch.optim.SGD takes: nesterov needs momentum and no dampening, and the first step is its own affair.
TORCH_RULES = [
    {name: value for name, value in rule.items() if name != "first_step"}
    for rule in RULES
    if not rule["first_step"] and not (rule["nesterov"] and (rule["momentum"] == 0 or rule["dampening"] != 0))
]
RULE: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
TERMS = 10  # operations and rounded constants of the longest rule


def name_of(rule: dict[str, Any]) -> str:
    return "-".join(f"{name}{value:g}" for name, value in rule.items() if value) or "plain"


def twin(tensors: list[list[Tensor]], dtype: torch.dtype | None = None) -> list[list[Tensor]]:
    """Copies on the CPU, of the same strides."""
    return [[tensor.cpu().clone().to(dtype or tensor.dtype) for tensor in group] for group in tensors]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_every_rule(rule, dtype, randn, assert_same_bits, assert_near):
    rule = {"lr": 0.05, **rule}
    tensors = [[randn(5000, dtype)] for _ in range(3)]
    expected, exact, magnitude = twin(tensors), twin(tensors, torch.float64), twin(tensors, torch.float64)
    ops.sgd_step_(*tensors, **rule)
    reference.sgd_step_(*expected, **rule)
    for got, want, what in zip(tensors, expected, ("param", "grad", "momentum"), strict=True):
        assert_same_bits(got[0], want[0], what)

    reference.sgd_step_(*exact, **rule)
    magnitude = [[tensor.abs() for tensor in group] for group in magnitude]
    reference.sgd_step_(*magnitude, **{**rule, "lr": -rule["lr"], "maximize": False})  # every term adds
    assert_near(tensors[0][0], exact[0][0], magnitude[0][0], TERMS)
    assert_near(tensors[2][0], exact[2][0], magnitude[2][0], TERMS)


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", SIZES)
def test_every_size(numel, dtype, offset, randn, assert_same_bits):
    tensors = [[randn(numel, dtype, offset)] for _ in range(3)]
    bases = [group[0]._base.clone() for group in tensors]
    expected = twin(tensors)
    ops.sgd_step_(*tensors, **RULE)
    reference.sgd_step_(*expected, **RULE)
    for base, got, want in zip(bases, tensors, expected, strict=True):
        base[offset : offset + numel].copy_(want[0])
        assert_same_bits(got[0]._base, base, "the buffer, what lies around the tensor included")


def test_large(randn, assert_same_bits):
    tensors = [[randn(3_000_001)] for _ in range(3)]
    expected = twin(tensors)
    ops.sgd_step_(*tensors, **RULE, nesterov=True)
    reference.sgd_step_(*expected, **RULE, nesterov=True)
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
    """All elements in the order in which they lie in memory."""
    return torch.cat([tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_list_is_flat(dtype, device, assert_same_bits):
    lists = [mixed_shapes(device, dtype) for _ in range(3)]
    flats = [[memory_of(tensors)] for tensors in lists]
    expected = twin(lists)
    ops.sgd_step_(*lists, **RULE)
    ops.sgd_step_(*flats, **RULE)
    reference.sgd_step_(*expected, **RULE)
    for got, flat, want in zip(lists, flats, expected, strict=True):
        assert_same_bits(memory_of(got), flat[0], "list against flat")
        for left, right in zip(got, want, strict=True):
            assert_same_bits(left, right, f"shape {tuple(left.shape)}")


def test_any_number_of_threads(set_threads, assert_same_bits):
    start = [[torch.randn(size) for size in (1, 0, 300_000, 5, 77_777)] for _ in range(3)]
    results = []
    for num_threads in (1, 2):
        set_threads(num_threads)
        tensors = twin(start)
        ops.sgd_step_(*tensors, **RULE)
        results.append([memory_of(group) for group in tensors])
    for one, two in zip(*results, strict=True):
        assert_same_bits(two, one)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", TORCH_RULES, ids=name_of)
def test_torch_sgd(rule, dtype, randn):
    ours, buffer = randn(1000, dtype), randn(1000, dtype).fill_(math.nan)  # the first step reads no buffer
    theirs = torch.nn.Parameter(ours.clone())
    optimizer = torch.optim.SGD([theirs], lr=0.1, **rule)
    num_steps = 4
    scale = ours.abs().float()
    for step in range(num_steps):
        gradient = randn(1000, dtype)
        theirs.grad = gradient.clone()
        optimizer.step()
        ops.sgd_step_([ours], [gradient], [buffer], lr=0.1, **rule, first_step=step == 0)
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
    expected = twin(tensors)
    ops.sgd_step_(*tensors, lr=4.0, momentum=0.9)
    reference.sgd_step_(*expected, lr=4.0, momentum=0.9)
    assert_same_bits(param, expected[0][0])
    assert_same_bits(buffer, expected[2][0])
    assert param.isnan().nonzero().flatten().tolist() == [3, 39]
    assert set(param.isinf().nonzero().flatten().tolist()) == {5, 17, 20}  # 4 * max is beyond every storage type


ARGUMENTS = {"lr": 0.1, "dampening": 0.0, "weight_decay": 0.1, "nesterov": False, "maximize": False}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_opcheck(momentum, randn):
    params, grads = [randn(33), randn(5).view(1, 5)], [randn(33), randn(5).view(1, 5)]
    buffers = [torch.zeros_like(param) for param in params] if momentum else []
    rule = {**ARGUMENTS, "momentum": momentum, "first_step": False}
    torch.library.opcheck(torch.ops.ddpcore.sgd_step_.default, (params, grads, buffers), rule)


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

    square = one(4, 4)
    return {
        "fewer grads": ([[one(4), one(4)], [one(4)], [one(4), one(4)]], "params and grads .* same length"),
        "no buffers": ([[one(4)], [one(4)], []], "momentum_buffers must have the length of params"),
        "float64": ([[one(4, dtype=torch.float64)]] * 3, "params must be float32, bfloat16 or float16"),
        "two dtypes": ([[one(4), one(4).half()]] * 3, "one dtype and one device"),
        "grad dtype": ([[one(4)], [one(4).half()], [one(4)]], "a grad must have the device and dtype of its param"),
        "grad shape": ([[one(4)], [one(5)], [one(4)]], "a grad must have the shape and strides of its param"),
        "grad dims": ([[one(4)], [one(4, 1)], [one(4)]], "a grad must have the shape and strides of its param"),
        "grad strides": ([[square], [square.t()], [square]], "a grad must have the shape and strides of its param"),
        "param strides": (
            [[square.t()], [square], [square.t()]],
            "a grad must have the shape and strides of its param",
        ),
        "holes": ([[square[:, ::2]]] * 3, "both dense"),
        "overlap": ([[one(1).expand(4)]] * 3, "both dense"),
        "buffer dtype": ([[one(4)], [one(4)], [one(4).bfloat16()]], "a momentum buffer must have the device and dtype"),
        "buffer shape": ([[one(4)], [one(4)], [one(2, 2)]], "a momentum buffer must have the shape and strides"),
    }


@pytest.mark.parametrize("case", bad_arguments())
def test_bad_arguments(case):
    tensors, message = bad_arguments()[case]
    with pytest.raises(RuntimeError, match=message):
        ops.sgd_step_(*tensors, **RULE)
