"""What the steps of all optimizers share: each against its reference and against itself."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ddpcore import ops
from helpers import steps

OFFSETS = [0, 1, 3]
every_rule = pytest.mark.parametrize("rule", steps.RULES)
every_kind = pytest.mark.parametrize("kind", steps.KINDS)


@pytest.fixture(autouse=True)
def one_thread(set_threads: Callable[[int], None]) -> None:
    set_threads(1)


def weights_of(device: torch.device, sizes: list[int], kind: str = "fp32") -> list[Tensor]:
    return [torch.randn(size).to(steps.KINDS[kind][0]).to(device) for size in sizes]


def inside(tensor: Tensor, offset: int) -> Tensor:
    base = torch.randn(tensor.numel() + offset + 8).to(tensor)
    return base[offset : offset + tensor.numel()].copy_(tensor)


def new_step(rule: str, device: torch.device, sizes: list[int], kind: str = "fp32", **options: object) -> steps.Step:
    return steps.new_step(rule, weights_of(device, sizes, kind), masters=steps.KINDS[kind][1], **options)


@every_kind
@every_rule
def test_every_size(rule, kind, device, assert_same_bits):
    """All sizes at all offsets in one call, each tensor inside a larger buffer whose rest must not change."""
    step = new_step(rule, device, steps.SIZES * len(OFFSETS), kind)
    for name, tensors in step.written().items():
        if name != "step":
            tensors[:] = [inside(tensor, OFFSETS[i // len(steps.SIZES)]) for i, tensor in enumerate(tensors)]
    step.grads = [inside(tensor, OFFSETS[i // len(steps.SIZES)]) for i, tensor in enumerate(step.grads)]
    around = {name: [t._base.clone() for t in tensors] for name, tensors in step.written().items() if name != "step"}
    grads = [tensor._base.clone() for tensor in step.grads]
    expected = steps.run_reference(step)
    step.run()
    steps.assert_same_step(step, expected, assert_same_bits)
    for name, bases in around.items():
        for index, (tensor, base) in enumerate(zip(step.written()[name], bases, strict=True)):
            base[tensor.storage_offset() :][: tensor.numel()].copy_(tensor)
            assert_same_bits(tensor._base, base, f"what lies around {name} {index}")
    for tensor, base in zip(step.grads, grads, strict=True):
        assert_same_bits(tensor._base, base, "a gradient, which is not to change")


@every_rule
def test_a_scratch_serves_steps_on_some_of_the_tensors(rule, device, assert_same_bits):
    """As where all learners step together and then one of them: on CUDA the counters stay zero between steps."""
    whole = new_step(rule, device, [70_001, 5, 4097, 9000])
    for indices in ([0, 1, 2, 3], [0], [1, 2], [3], [0, 1, 2, 3]):
        step = whole.only(indices)
        step.scratch = whole.scratch
        expected = steps.run_reference(step)
        step.run()
        steps.assert_same_step(step, expected, assert_same_bits)


@pytest.mark.slow
@every_rule
def test_ten_million_elements(rule, device, assert_same_bits):
    step = new_step(rule, device, [10_000_001], "fp32")
    expected = steps.run_reference(step)
    steps.assert_same_step(step.run(), expected, assert_same_bits)


@every_kind
@every_rule
def test_groups(rule, kind, device, assert_same_bits):
    """A call with several groups, empty ones too, has the bits of one call per group."""
    options = {
        "group_sizes": [0, 2, 0, 0, 1, 3, 0],
        "lr": [9.0, 0.05, 9.0, 9.0, 0.7, 0.0, 9.0],
        "weight_decay": [9.0, 0.0, 9.0, 9.0, 0.1, 0.02, 9.0],
    }
    if rule in steps.ADAPTIVE:
        options["adapt"] = [1, 1, 0, 1, 0, 1, 0]
    step = new_step(rule, device, [5000, 17, 4096, 0, 33, 8200], kind, **options)
    for group, count in enumerate([1.0, 0.0, 2.0, 3.0, 7.0, 1.0, 4.0]):
        step.steps[group].fill_(count)
    if rule == "sgd":
        step.options["dampening"] = 0.5
    alone = [step.on_cpu().only(indices) for indices in ([0, 1], [2], [3, 4, 5])]
    expected = steps.run_reference(step)
    step.run()
    steps.assert_same_step(step, expected, assert_same_bits)
    assert [count.item() for count in step.steps] == [2.0, 1.0, 3.0, 4.0, 8.0, 2.0, 5.0]
    if device.type == "cpu":
        for part, indices in zip(alone, ([0, 1], [2], [3, 4, 5]), strict=True):
            part.run()
            for place, index in enumerate(indices):
                assert_same_bits(step.params[index], part.params[place], f"param {index} of its own call")
                assert_same_bits(step.buffers[0][index], part.buffers[0][place])
                assert_same_bits(step.trust[index], part.trust[place])
    if rule in steps.ADAPTIVE:
        assert step.trust[2, 0] == 1.0 and (step.trust[[0, 1, 4, 5], 0] != 1.0).all()


@every_rule
def test_lr_from_the_device(rule, device, assert_same_bits):
    step = new_step(rule, device, [5000, 17], group_sizes=[1, 1], lr=[0.05, 0.7], decoupled=True)
    if rule == "lamb":
        step.options.pop("decoupled")
        step.options["decay_mode"] = "decoupled"
    expected, other = step.on_cpu().run(), step.on_cpu()
    for this in (step, other):
        this.options["device_lr"] = [torch.tensor(lr, device=this.params[0].device) for lr in (0.05, 0.7)]
        this.options["lr"] = [math.nan, math.nan]  # not read
    steps.assert_same_step(step.run(), expected, assert_same_bits)
    steps.assert_same_step(step, other.run(steps.reference), assert_same_bits)


@every_kind
@every_rule
def test_scaled_gradients_count_as_what_they_were(rule, kind, device, assert_same_bits):
    """A scale that is a power of two rounds nothing, so the step has the same bits as without it."""
    step = new_step(rule, device, [5000, 0, 17], kind)
    scaled = step.on_cpu().change(lambda tensor: tensor.to(device))
    for grad in step.grads + scaled.grads:  # no subnormal numbers, which would be rounded
        grad.copy_(torch.where(grad.abs() < 0.01, 0.01, grad))
    for grad in scaled.grads:
        grad.mul_(1024.0)
    scaled.options["grad_scale"] = torch.tensor([1024.0], device=device)
    expected = step.on_cpu().run()
    steps.assert_same_step(scaled.run(), expected, assert_same_bits)
    step.options["grad_scale"] = torch.tensor(3.0, device=device)
    expected = steps.run_reference(step)
    steps.assert_same_step(step.run(), expected, assert_same_bits)


@every_kind
@every_rule
def test_found_inf_changes_and_counts_nothing(rule, kind, device, assert_same_bits):
    step = new_step(rule, device, [5000, 17], kind, found_inf=torch.tensor(1.0, device=device))
    step.steps[0].fill_(0.0)
    step.grads[0][3] = math.inf
    step.trust.fill_(7.0)
    before = step.on_cpu()
    steps.assert_unchanged(step.run(), before, assert_same_bits)
    steps.assert_unchanged(before.on_cpu().run(steps.reference), before, assert_same_bits)
    step.grads[0][3] = 1.0
    step.options["found_inf"] = torch.zeros(1, device=device)
    expected = step.on_cpu()
    expected.options["found_inf"] = None
    steps.assert_same_step(step.run(), expected.run(), assert_same_bits)
    assert step.steps[0] == 1.0


@every_rule
def test_the_first_step_begins_the_buffers(rule, device, assert_same_bits):
    """Dampening starts with the second step; the first step does not read the buffer."""
    step = new_step(rule, device, [5000, 17], group_sizes=[1, 1])
    step.steps[0].zero_()
    if rule in steps.MOMENTS:
        for buffers in step.buffers:
            buffers[0].zero_()
    else:
        step.options["dampening"] = 0.75
        step.buffers[0][0].fill_(math.nan)
    expected = steps.run_reference(step)
    plain = step.on_cpu()
    steps.assert_same_step(step.run(), expected, assert_same_bits)
    assert [count.item() for count in step.steps] == [1.0, 4.0]
    if rule not in steps.MOMENTS:
        plain.options["momentum"] = 0.0
        plain.run()
        assert_same_bits(step.params[0], plain.params[0], "momentum at the first step is the direction")
        assert step.buffers[0][0].isfinite().all()
    expected = steps.run_reference(step)
    steps.assert_same_step(step.run(), expected, assert_same_bits)


@pytest.mark.parametrize("rule", ["sgd", "lars"])
def test_what_is_not_counted_is_no_first_step(rule, device, assert_same_bits):
    step = new_step(rule, device, [5000], counted=False, dampening=0.5)
    counted = step.on_cpu()
    counted.steps = [torch.ones(1)]
    expected = steps.run_reference(step)
    steps.assert_same_step(step.run(), expected, assert_same_bits)
    for got, want in zip(step.params + step.buffers[0], counted.run().params + counted.buffers[0], strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("scaled", [False, True])
@every_rule
def test_long_gradients_are_shortened(rule, scaled, device, assert_same_bits):
    """As ``torch.nn.utils.clip_grad_norm_`` does; ``norm_squared`` is of the gradients as they are stored."""
    sizes = [5000, 0, 17, 4097]
    step = new_step(rule, device, sizes)
    norms = torch.zeros(1 + ops.num_blocks(step.grads), dtype=torch.float64, device=device)
    ops.total_norm_(step.grads, norms)
    step.options.update(norm_squared=norms[:1], max_norm=1.5)
    if scaled:
        step.options["grad_scale"] = torch.tensor(4.0, device=device)
    exact = step.exact()
    parameters = [torch.nn.Parameter(weight) for weight in exact.params]
    for parameter, grad in zip(parameters, exact.grads, strict=True):
        parameter.grad = grad / 4 if scaled else grad
    torch.nn.utils.clip_grad_norm_(parameters, 1.5)
    exact.grads = [parameter.grad for parameter in parameters]
    exact.options.update(norm_squared=None, grad_scale=None)

    plain, expected = step.on_cpu(), steps.run_reference(step)
    steps.assert_same_step(step.run(), expected, assert_same_bits)
    exact.run(steps.reference)
    for got, want in zip(step.params, exact.params, strict=True):  # weights, gradients and steps are all below 8
        assert ((got.cpu().double() - want).abs() <= 20 * steps.EPS * 8).all()

    plain.options["max_norm"] = 1e6  # longer than they are
    expected = plain.on_cpu()
    expected.options["norm_squared"] = None
    steps.assert_same_step(plain.run(), expected.run(), assert_same_bits)


@every_rule
def test_a_norm_that_is_no_number_leaves_no_weight_a_number(rule, device, assert_same_bits):
    step = new_step(rule, device, [50, 17], max_norm=1.0)
    step.options["norm_squared"] = torch.tensor([math.nan], dtype=torch.float64, device=device)
    expected = steps.run_reference(step)
    steps.assert_same_step(step.run(), expected, assert_same_bits)
    assert all(param.isnan().all() for param in step.params)


@pytest.mark.parametrize("kind", ["bf16-masters", "fp16-masters"])
@every_rule
def test_masters_are_stepped_as_fp32_weights_are(rule, kind, device, assert_same_bits):
    step = new_step(rule, device, steps.SIZES[:-1], kind)
    expected = step.on_cpu()
    expected.params, expected.masters = expected.masters, []
    expected.grads = [grad.float() for grad in expected.grads]
    step.run()
    expected.run()
    for index, (param, master) in enumerate(zip(step.params, step.masters, strict=True)):
        assert_same_bits(master, expected.params[index], f"master {index}")
        assert_same_bits(param, expected.params[index].to(param.dtype), f"param {index}")
        assert_same_bits(step.buffers[0][index], expected.buffers[0][index], f"buffer {index}")
    assert_same_bits(step.trust, expected.trust)


@pytest.mark.parametrize("kind", ["bf16-masters", "fp16-masters"])
@every_rule
def test_a_param_that_was_written_overrules_its_master(rule, kind, device, assert_same_bits):
    step = new_step(rule, device, [5000], kind)
    written = torch.zeros(5000, dtype=torch.bool)
    written[[0, 17, 4095, 4096, 4999]] = True
    step.params[0][written] = 2.0
    step.params[0][1], step.masters[0][1] = 0.0, -0.0  # zeros of different sign are different numbers
    truth = step.on_cpu()
    truth.masters[0] = torch.where(written, 2.0, truth.masters[0])
    truth.masters[0][1] = 0.0
    expected = steps.run_reference(step)
    steps.assert_same_step(step.run(), expected, assert_same_bits)
    steps.assert_same_step(step, truth.run(), assert_same_bits)
