"""Momentum and moments of bfloat16, rounded stochastically: kernels against references, and what a rounded step is."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ddpcore import ops
from ddpcore.ops.random import memory_order, round_to_bf16, words
from ddpcore.ops.steps import RULES
from helpers import steps

every_rule = pytest.mark.parametrize("rule", steps.RULES)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
# These tests are deterministic. Right code fails a check with a probability of 6e-7.
DEVIATIONS = 5.0


@pytest.fixture(autouse=True)
def few_threads(set_threads):
    set_threads(1)


def new_step(rule: str, device: torch.device, sizes: list[int], dtype: torch.dtype = torch.float32, **options: object):
    return steps.new_step(rule, [torch.randn(size).to(dtype).to(device) for size in sizes], **options).rounded()


def clone(tensor: Tensor) -> Tensor:
    return tensor.clone()


@every_dtype
@every_rule
def test_every_size(rule, dtype, device, assert_same_bits):
    step = new_step(rule, device, steps.SIZES, dtype)
    for offset in (0, 1, 3):
        for tensors in (step.params, step.grads, *step.buffers):
            bases = [torch.randn(tensor.numel() + 8).to(tensor) for tensor in tensors]
            tensors[:] = [
                base[offset : offset + tensor.numel()].copy_(tensor)
                for base, tensor in zip(bases, tensors, strict=True)
            ]
        expected = steps.run_reference(step)
        steps.assert_same_step(step.run(), expected, assert_same_bits)
        assert all(tensor.dtype == torch.bfloat16 for buffers in step.buffers for tensor in buffers)


@every_rule
def test_any_number_of_threads_has_the_same_bits(rule, set_threads, assert_same_bits):
    whole = new_step(rule, torch.device("cpu"), [100_003, 5, 40_000])
    for threads in (2, 5):
        other = whole.change(clone)
        set_threads(threads)
        other.run()
        set_threads(1)
        steps.assert_unchanged(other, whole.change(clone).run(), assert_same_bits)


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_a_list_has_the_bits_of_a_flat_buffer(rule, device, assert_same_bits):
    """With the indices of its places in the buffer."""
    sizes = [4096, 12, 8200, 4, 100]
    bounds = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    flat = new_step(rule, device, [bounds[-1]])
    parts = flat.change(clone)
    for tensors in (parts.params, parts.grads, *parts.buffers):
        tensors[:] = [tensors[0][begin : begin + size] for begin, size in zip(bounds, sizes, strict=False)]
    first = flat.options["state_firsts"][0]
    parts.options.update(state_firsts=[first + begin for begin in bounds[:-1]], group_sizes=[len(sizes)])
    parts.scratch = ops.new_scratch(parts.params)
    flat.run()
    parts.run()
    for left, right in zip([flat.params, *flat.buffers], [parts.params, *parts.buffers], strict=True):
        assert_same_bits(torch.cat(right), left[0])


@every_rule
def test_elements_are_numbered_in_the_order_of_memory(rule, device, assert_same_bits):
    images = torch.randn(2, 3, 5, 7).to(device).to(memory_format=torch.channels_last)
    gap = torch.randn(6, 8).to(device)[:, ::2]  # is copied for the step: numbered as its dense copy
    step = steps.new_step(rule, [images, images.clone().permute(3, 0, 2, 1), gap]).rounded()
    flat = step.change(clone)
    for tensors in (flat.params, flat.grads, *flat.buffers):
        orders = [memory_order(param).flatten().argsort() for param in step.params]
        tensors[:] = [tensor.flatten()[order] for tensor, order in zip(tensors, orders, strict=True)]
    expected = steps.run_reference(step)
    steps.assert_same_step(step.run(), expected, assert_same_bits)
    flat.run()
    for index, param in enumerate(step.params):
        order = memory_order(param).flatten().argsort()
        for left, right in zip([step.params, *step.buffers], [flat.params, *flat.buffers], strict=True):
            if rule not in steps.ADAPTIVE:  # norms are added in another order
                assert_same_bits(left[index].flatten()[order], right[index])


def bits_of(step: steps.Step, index: int) -> tuple[Tensor, Tensor]:
    """The random bits of both states of a tensor of one dimension."""
    first, count = step.options["state_firsts"][index], int(step.steps[0].item())
    drawn = words(step.params[index].numel(), step.options["state_seed"], count, first)
    return drawn & 0xFFFF, drawn >> 16


@every_rule
def test_a_state_is_that_of_fp32_rounded_by_its_bits(rule, device, assert_same_bits):
    """SGD and LARS step along the momentum before it is rounded; Adam and LAMB use the moments as they are stored."""
    step = new_step(rule, device, [9001, 17])
    wide = step.change(clone)
    wide.buffers = [[tensor.float() for tensor in buffers] for buffers in wide.buffers]
    del wide.options["state_firsts"], wide.options["state_seed"]
    drawn = [bits_of(step, index) for index in range(2)]
    begun = step.change(clone)
    step.run()
    wide.run()
    for index in range(2):
        for place, buffers in enumerate(step.buffers):
            expected = round_to_bf16(wide.buffers[place][index].cpu(), drawn[index][place])
            assert_same_bits(buffers[index], expected, f"state {place} of {index}")
        if rule not in steps.MOMENTS:
            assert_same_bits(step.params[index], wide.params[index], f"param {index}")
    if rule == "adamw":  # the same step again, of moments that stay: beta 1 and no debias is LAMB without a ratio
        for index, param in enumerate(begun.params):
            m, v = (buffers[index].float().cpu() for buffers in step.buffers)
            count = 4.0
            update = (m / (1 - 0.9**count)) / ((v / (1 - 0.99**count)).sqrt() + 1e-6)
            exact = (1 - 0.05 * 0.01) * param.cpu().double() - 0.05 * update.double()
            assert (step.params[index].cpu() - exact).abs().max() < 30 * steps.EPS * 8


@every_rule
def test_found_inf_changes_and_counts_nothing(rule, device, assert_same_bits):
    step = new_step(rule, device, [5000, 17], found_inf=torch.tensor(1.0, device=device))
    before = step.change(clone)
    steps.assert_unchanged(step.run(), before, assert_same_bits)
    step.options["found_inf"] = torch.zeros(1, device=device)
    expected = steps.run_reference(step)
    steps.assert_same_step(step.run(), expected, assert_same_bits)
    assert step.steps[0] == 4.0


@pytest.mark.parametrize("rule", ["sgd", "lars"])
def test_the_first_step_does_not_read_the_momentum(rule, device, assert_same_bits):
    step = new_step(rule, device, [5000], dampening=0.5)
    step.steps[0].zero_()
    step.buffers[0][0].fill_(math.nan)
    expected = steps.run_reference(step)
    steps.assert_same_step(step.run(), expected, assert_same_bits)
    assert step.buffers[0][0].isfinite().all()


@pytest.mark.parametrize("rule", ["sgd", "adamw", "lamb"])
def test_no_two_steps_draw_the_same_bits(rule, device, assert_same_bits):
    """Beyond 2**24 steps too, where a count of fp32 cannot go on by ones."""
    seen = []
    for begun in (0.0, 1.0, 2.0**24 - 1, 2.0**24, 2.0**24 + 2, 2.0**24 + 4, 2.0**61):
        torch.manual_seed(0)
        step = new_step(rule, device, [400])
        step.steps[0].fill_(begun)
        expected = steps.run_reference(step)
        steps.assert_same_step(step.run(), expected, assert_same_bits)
        assert step.steps[0] > begun
        step.run()
        step.steps[0].fill_(begun)
        seen.append(torch.stack(bits_of(step, 0)))
    assert all((one != two).any() for index, one in enumerate(seen) for two in seen[:index])
    plain = steps.new_step(rule, [torch.randn(5).to(device)])
    plain.steps[0].fill_(2.0**24)
    assert plain.run().steps[0] == 2.0**24, "as in torch"


VALUES = [1.0, 1.0 + 2**-8, 1.0 + 2**-20, -3.1415927, 1e-30, 1e-40, -1e-45, 65535.9, 3.0e38, 0.1]


@pytest.mark.parametrize("value", VALUES)
def test_rounding_is_unbiased(value):
    """Over all 2**16 random numbers: only the two neighbours, each as often as it is near. So the mean is exact."""
    one = torch.tensor([value], dtype=torch.float32)
    rounded = round_to_bf16(one.expand(2**16).contiguous(), torch.arange(2**16)).double()
    dropped = int(one.view(torch.int32)) & 0xFFFF
    lower = (one.view(torch.int32) & ~0xFFFF).view(torch.float32).double()
    upper = ((one.view(torch.int32) & ~0xFFFF) + 2**16).view(torch.float32).double()
    assert int((rounded == upper).sum()) == dropped and int((rounded == lower).sum()) == 2**16 - dropped
    assert rounded.mean() == one.double()


def test_special_values_stay_what_they_are():
    largest = torch.finfo(torch.bfloat16).max
    values = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, largest, -largest, 1.5, 2.0**-133])
    between = torch.tensor([torch.finfo(torch.float32).max, -3.395e38])  # beyond the largest bfloat16 number
    for random in (0, 1, 2**15, 2**16 - 1):
        rounded = round_to_bf16(values, torch.full((len(values),), random))
        kept = values.bfloat16()
        assert torch.equal(rounded.view(torch.int16)[:4], kept.view(torch.int16)[:4])
        assert rounded[4].isnan() and torch.equal(rounded[5:], kept[5:])
        assert round_to_bf16(between, torch.full((2,), random)).tolist() == [largest, -largest]
    payload = torch.tensor([0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert round_to_bf16(payload, torch.full((2,), 2**16 - 1)).isnan().all()


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_special_gradients_reach_their_own_element_only(rule, device, assert_same_bits):
    step = new_step(rule, device, [4100])
    for place, value in ((0, math.inf), (17, -math.inf), (4097, math.nan), (4099, 3.3e38)):
        step.grads[0][place] = value
    expected = steps.run_reference(step)
    steps.assert_same_step(step.run(), expected, assert_same_bits)
    finite = step.buffers[0][0].isfinite()
    assert finite.sum() >= 4096 and not finite[[0, 17, 4097]].any()


def correlation(left: Tensor, right: Tensor) -> float:
    """In standard deviations of the estimate, of bits that are uniform on [0, 2**16)."""
    left, right = ((bits.double() + 0.5) / 2**16 - 0.5 for bits in (left, right))
    return float((left * right).mean() * 12 * math.sqrt(len(left)))


def test_the_bits_of_states_elements_and_steps_are_not_correlated():
    numel = 400_000
    drawn = words(numel, 7, 11, 2**40)
    first, second = drawn & 0xFFFF, drawn >> 16
    assert abs(correlation(first, second)) < DEVIATIONS
    for bits in (first, second):
        assert abs(float(((bits.double() + 0.5) / 2**16).mean() - 0.5)) < DEVIATIONS / math.sqrt(12 * numel)
        for shift in (1, 2, 3, 4, 4096):
            assert abs(correlation(bits[:-shift], bits[shift:])) < DEVIATIONS, f"{shift} apart"
    for seed, step, index in ((7, 12, 2**40), (8, 11, 2**40), (7, 11, 2**41), (7, 11, 0)):
        assert abs(correlation(first, words(numel, seed, step, index) & 0xFFFF)) < DEVIATIONS


@pytest.mark.parametrize("rule", [*steps.MOMENTS, "sgd"])
def test_the_mean_of_a_state_is_that_of_float64(rule, device):
    """Of 2**16 elements with one gradient, after 300 steps. Rounding to nearest would leave exp_avg_sq where it begins.

    A rounding moves a state by less than an ulp, at most 2**-7 of it, with a variance of at most a quarter of that
    squared. Those of earlier steps decay with beta. The state moves from 1 towards the limit monotonically.
    """
    numel, num_steps, rate = 2**16, 300, {"sgd": 0.99}.get(rule, 0.999)
    step = new_step(rule, device, [numel], lr=[0.0], weight_decay=[0.0])
    step.options.update({"momentum": rate, "dampening": rate} if rule == "sgd" else {"beta2": rate})
    step.grads[0].fill_(0.6)
    step.buffers[-1][0].fill_(1.0)
    target, exact = (0.6, 1.0) if rule == "sgd" else (0.36, 1.0)
    for _ in range(num_steps):
        step.run()
        exact = rate * exact + (1 - rate) * target
    deviation = 2.0**-8 / math.sqrt(1 - rate**2)
    mean = float(step.buffers[-1][0].double().mean())
    arithmetic = num_steps * 4 * steps.EPS  # of fp32, of values of at most 1
    assert abs(mean - exact) < DEVIATIONS * deviation / math.sqrt(numel) + arithmetic
    nearest = torch.tensor(1.0)
    for _ in range(num_steps):
        nearest = (rate * nearest + (1 - rate) * target).bfloat16().float()
    if rule != "sgd":
        assert nearest == 1.0


def arguments(step: steps.Step) -> tuple[tuple[object, ...], dict[str, object]]:
    rows = [step.trust] if step.rule in steps.ADAPTIVE else []
    return (step.params, step.grads, *step.buffers, step.masters, step.steps, step.scratch, *rows), step.options


@every_rule
def test_opcheck(rule):
    positional, options = arguments(new_step(rule, torch.device("cpu"), [33, 4]))
    operator = getattr(torch.ops.ddpcore, f"{rule}_step_").default
    names = [argument.name for argument in RULES[rule].arguments][len(positional) :]
    ordered = [options[name] for name in names if name in options]
    assert [name for name in names if name not in options] in ([], ["squares", "passes"])
    if rule in steps.ADAPTIVE:
        ordered[-2:-2] = [None, "both"]
    torch.library.opcheck(operator, (*positional, *ordered))


BAD = [[2**33], [0, 2], [0, -4], [0, 4, 8]]


@pytest.mark.parametrize("firsts", BAD, ids=str)
@every_rule
def test_bad_indices_change_nothing(rule, firsts, assert_same_bits):
    step = new_step(rule, torch.device("cpu"), [33, 4])
    step.options["state_firsts"] = firsts
    for where in (ops, steps.reference):
        before = step.change(clone)
        with pytest.raises(RuntimeError, match="state_firsts must be empty, or a multiple of 4 for each param"):
            step.run(where)
        steps.assert_unchanged(step, before, assert_same_bits)


@every_rule
def test_bad_states_change_nothing(rule, assert_same_bits):
    step = new_step(rule, torch.device("cpu"), [33, 4])
    step.buffers[-1][1] = step.buffers[-1][1].float()
    before = step.change(clone)
    with pytest.raises(RuntimeError, match="must be bfloat16 on the device of its param"):
        step.run()
    steps.assert_unchanged(step, before, assert_same_bits)
    masters = steps.new_step(rule, [torch.randn(33).half()], masters=True).rounded()
    with pytest.raises(RuntimeError, match="with steps and without masters"):
        masters.run()
    uncounted = new_step(rule, torch.device("cpu"), [33], counted=False)
    with pytest.raises(RuntimeError, match=r"with steps and without masters|steps must have the length"):
        uncounted.run()
