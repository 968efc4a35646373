"""The steps give the same bits for every form of their tensors: lists, views, batches, threads, strides."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ddpcore import ops
from helpers import steps
from helpers.each import each

every_rule = pytest.mark.parametrize("rule", steps.RULES)
every_kind = pytest.mark.parametrize("kind", steps.KINDS)
SHAPES = [(0,), (5,), (17, 9), (3, 4, 5, 6), (0, 3), (), (70, 90), (1, 6000), (8, 3, 3, 3), (4096,), (0,)]


@pytest.fixture(autouse=True)
def one_thread(set_threads: Callable[[int], None]) -> None:
    set_threads(1)


def new_step(rule: str, kind: str, weights: list[Tensor]) -> steps.Step:
    dtype, masters = steps.KINDS[kind]
    return steps.new_step(rule, [weight.to(dtype) for weight in weights], masters=masters)


def dense_weights(device: torch.device) -> list[Tensor]:
    """Weights of many shapes and memory orders."""
    weights = [torch.randn(shape, device="cpu").to(device) for shape in SHAPES]
    for index in (3, 8):
        weights[index] = weights[index].contiguous(memory_format=torch.channels_last)
    weights[6] = weights[6].t()
    return weights


@every_kind
@every_rule
def test_a_list_is_views_of_a_flat_buffer(rule, kind, device, assert_same_bits):
    def flat(tensor: Tensor) -> Tensor:
        return torch.cat([torch.empty_like(tensor).flatten()[:1], memory_of(tensor)])[tensor.numel() and 1 :]

    def memory_of(tensor: Tensor) -> Tensor:
        return tensor.as_strided((tensor.numel(),), (1,)) if tensor.dim() else tensor.view(1)

    step = new_step(rule, kind, dense_weights(device))
    views = step.change(lambda tensor: flat(tensor).clone())
    views.trust = step.trust.clone()
    expected = steps.run_reference(step)
    step.run()
    views.run()
    steps.assert_same_step(step, expected, assert_same_bits)
    assert_same_bits(views.trust, step.trust)
    for name, tensors in step.written().items():
        for index, (tensor, view) in enumerate(zip(tensors, views.written()[name], strict=True)):
            assert_same_bits(view, memory_of(tensor), f"{name} {index}")


@pytest.mark.parametrize("kind", ["fp32", "bf16-masters"])
@every_rule
def test_many_tensors_at_once_are_each_alone(rule, kind, device, assert_same_bits):
    """Several cache-sized batches, whose boundaries are before, behind and inside of empty or very large tensors."""
    sizes = [100_000, 31_072, 0, 70_001, 1, 150_000, 300_001, 0, 0, 131_072, 131_073, 17, 262_144, 4096, 0]
    step = new_step(rule, kind, [torch.randn(size).to(device) for size in sizes])
    start = step.change(lambda tensor: tensor.clone())
    step.run()
    for index in range(len(sizes)):
        alone = start.only([index]).run()
        assert_same_bits(alone.params[0], step.params[index], f"param {index}")
        assert_same_bits(alone.buffers[-1][0], step.buffers[-1][index], f"buffer {index}")
        assert_same_bits(alone.trust[0], step.trust[index], f"trust {index}")
    assert step.steps[0] == 4.0


@pytest.mark.parametrize("kind", ["fp32", "fp16-masters"])
@every_rule
def test_any_number_of_threads(rule, kind, set_threads, assert_same_bits):
    start = new_step(rule, kind, [torch.randn(size) for size in (1, 0, 300_000, 5, 77_777, 40_000)])
    results = []
    for num_threads in (1, 2):
        set_threads(num_threads)
        results.append(start.on_cpu().run())
    one, two = results
    assert_same_bits(two.trust, one.trust)
    for name, tensors in one.written().items():
        for left, right in zip(two.written()[name], tensors, strict=True):
            assert_same_bits(left, right, name)


def others(tensor: Tensor) -> list[Tensor]:
    """The same numbers with other strides: another memory order, gaps, or both."""
    dims = range(tensor.dim())
    turned = tensor.permute(*reversed(dims)).contiguous().permute(*reversed(dims))
    spread = torch.full([2 * size for size in tensor.shape], 7.0, dtype=tensor.dtype, device=tensor.device)
    gaps = spread[tuple(slice(1, None, 2) for _ in dims)].copy_(tensor)
    wide = torch.full((tensor.shape[-1], 9, tensor.shape[0], *tensor.shape[1:-1]), 7.0).to(tensor)
    both = wide[:, 4].permute(*range(1, tensor.dim()), 0).copy_(tensor)
    return [tensor.clone(), turned, gaps, both]


@each("change", ["params", "grads", "buffers", "masters", "everything"])
@pytest.mark.parametrize("layout", [1, 2, 3])
@every_rule
def test_any_strides(rule, layout, change, device, assert_same_bits):
    """Results are written back into tensors that are not dense or have another memory order; gaps do not change."""
    kind = "bf16-masters" if change in ("masters", "everything") else "fp32"
    step = new_step(rule, kind, [torch.randn(3, 5, 4).to(device), torch.randn(7, 9).to(device)])
    expected = step.on_cpu().run()
    for name in ("params", "grads", "masters") if change == "everything" else (change,):
        if name != "buffers":
            setattr(step, name, [others(tensor)[layout] for tensor in getattr(step, name)])
    if change in ("buffers", "everything"):
        step.buffers = [[others(tensor)[layout] for tensor in buffers] for buffers in step.buffers]
    in_order = change == "everything" and layout == 1  # all have the same other order, in which sums are computed
    grads = [tensor.clone() for tensor in step.grads]
    step.run()
    if in_order:
        assert not step.params[0].is_contiguous()
        expected.trust = expected.trust.clone()
    steps.assert_same_step(step, expected, assert_same_bits)
    for got, want in zip(step.grads, grads, strict=True):
        assert_same_bits(got, want, "a gradient, which is not to change")
    for name, tensors in step.written().items():
        for tensor in tensors:
            if tensor._base is not None and name != "step" and layout > 1:
                gaps = tensor._base.numel() - tensor.numel()
                assert (tensor._base == 7.0).sum() == gaps > 0, f"the gaps of {name}"


@every_rule
def test_gradients_that_share_their_memory(rule, device, assert_same_bits):
    """Expanded gradients, as ``sum().backward()`` makes them."""
    step = new_step(rule, "fp32", [torch.randn(4, 6).to(device), torch.randn(6, 4).to(device).t()])
    step.grads = [torch.full((1, 1), 0.5, device=device).expand(4, 6), torch.ones(6, device=device).expand(4, 6)]
    expected = step.on_cpu()
    expected.grads = [torch.full((4, 6), 0.5), torch.ones(4, 6)]
    expected.run(steps.reference)
    steps.assert_same_step(step.run(), expected, assert_same_bits)


@every_kind
@every_rule
def test_nan_and_infinity_stay_in_their_tensor(rule, kind, device, assert_same_bits):
    """At the first, a middle and the last element; the other tensors keep the bits of a step without it."""
    for place, value, index in itertools.product(("param", "grad"), (math.nan, math.inf), (0, 4096, 8191)):
        step = new_step(rule, kind, [torch.randn(size).to(device) for size in (17, 8192, 33)])
        clean = step.on_cpu().run()
        if place == "grad":
            step.grads[1][index] = value
        else:
            step.params[1][index] = value  # its master no longer rounds to it
        expected = steps.run_reference(step)
        steps.assert_same_step(step.run(), expected, assert_same_bits)
        for other in (0, 2):
            assert_same_bits(step.params[other], clean.params[other], f"the neighbour at {other}")
        broken = ~step.params[1].isfinite()
        assert broken[index]
        if rule not in steps.ADAPTIVE:
            assert broken.sum() == 1


# Whether something scales the gradients, for each kind: of those with and of those without masters both.
SCALED = {"fp32": False, "bf16": True, "fp16": False, "bf16-masters": True, "fp16-masters": False}
FAST = ("fp32", "bf16-masters")


@pytest.mark.parametrize("kind", [pytest.param(one, marks=() if one in FAST else pytest.mark.slow) for one in SCALED])
@every_rule
def test_opcheck(rule, kind, device):
    step = new_step(rule, kind, [torch.randn(33).to(device), torch.randn(1, 5).to(device)])
    operator = getattr(torch.ops.ddpcore, f"{rule}_step_").default
    rows = [step.trust] if rule in steps.ADAPTIVE else []
    lists = (step.params, step.grads, *step.buffers, step.masters, step.steps, step.scratch, *rows)
    scalar = torch.tensor([2.0], device=device)
    squared = torch.tensor([4.0], device=device, dtype=torch.float64)
    scaling = {"grad_scale": scalar, "found_inf": scalar * 0, "norm_squared": squared, "max_norm": 1.0}
    more = {**scaling, "device_lr": [scalar]} if SCALED[kind] else {}
    torch.library.opcheck(operator, lists, {**step.options, **more})


@every_rule
def test_fake_and_compiled(rule, device, assert_same_bits):
    step = new_step(rule, "fp32", [torch.randn(7, 3).to(device)])

    def call(param: Tensor, grad: Tensor, buffers: list[list[Tensor]], count: Tensor, scratch: Tensor, trust: Tensor):
        rows = [trust] if rule in steps.ADAPTIVE else []
        operator = getattr(ops, f"{rule}_step_")
        operator([param], [grad * 2], *buffers, [], [count], scratch, *rows, **step.options)
        return param + 1, count * 2

    def arguments(this: steps.Step) -> tuple:
        return this.params[0], this.grads[0], this.buffers, this.steps[0], this.scratch, this.trust

    with FakeTensorMode() as mode:
        fake = step.change(lambda tensor: mode.from_tensor(tensor))
        assert [tuple(tensor.shape) for tensor in call(*arguments(fake))] == [(7, 3), (1,)]
    compiled = step.change(lambda tensor: tensor.clone())
    expected = call(*arguments(step))
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(*arguments(compiled))
    for left, right in zip(got, expected, strict=True):
        assert_same_bits(left, right)
    for name, tensors in step.written().items():
        for left, right in zip(compiled.written()[name], tensors, strict=True):
            assert_same_bits(left, right, f"the mutated {name}")
    assert_same_bits(compiled.trust, step.trust, "the mutated trust")
