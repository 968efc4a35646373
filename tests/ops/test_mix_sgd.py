"""``mix_sgd_step_`` is ``mix_`` and then ``sgd_step_``, bit for bit."""

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
SIZES = [0, 1, 15, 16, 17, 255, 256, 257, 1023, 1024, 1025, 4095, 4096, 4097, 100_003]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SWITCHES = ("momentum", "dampening", "weight_decay", "nesterov", "maximize", "decoupled")
RULES = [
    {**dict(zip(SWITCHES, values, strict=True)), "first_step": first_step}
    for values in itertools.product((0.0, 0.9), (0.0, 0.9), (0.0, 0.01), *[(False, True)] * 3)
    for first_step in (False, True)
    if values[2] or not values[5]  # decoupling needs decay
]
RULE: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
DEFAULTS = {"dampening": 0.0, "nesterov": False, "decoupled": False, "maximize": False}
RULE_OF_OP = {**RULE, **DEFAULTS}
TERMS = 11  # operations and rounded constants of the longest rule
SUM = {"rtol": 1e-12, "atol": 1e-300}  # float64 sums of the same fp32 differences in another order


def if_momentum(buffer: Tensor, rule: dict[str, Any]) -> Tensor | None:
    return buffer if rule["momentum"] else None


def name_of(rule: dict[str, Any]) -> str:
    return "-".join(f"{name}{value:g}" for name, value in rule.items() if value) or "plain"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_every_rule(rule, dtype, randn, assert_same_bits, assert_near):
    rule = {"lr": 0.05, **rule}
    count = torch.tensor([0.0 if rule.pop("first_step") else 5.0])
    weights, grad, buffer, *peers = (randn(5000, dtype) for _ in range(5))
    momentum = buffer if rule["momentum"] else None
    own, others = 0.5, [0.3, 0.2]
    same = [tensor.cpu().clone() for tensor in (weights, grad, buffer)]
    exact = [tensor.double() for tensor in same]
    magnitude = [tensor.abs() for tensor in exact]
    two_steps = [tensor.clone() for tensor in (weights, grad, buffer)]
    step = count.to(weights.device, copy=True)
    distances = ops.mix_sgd_step_(weights, peers, own, others, grad, momentum, step, **rule)
    assert step.item() == count.item() + 1

    expected = ops.mix_(two_steps[0], peers, own, others)
    lists = [[tensor] for tensor in two_steps]
    ops.sgd_step_(*lists, [], [count.to(weights.device, copy=True)], ops.new_scratch([weights]), **rule)
    assert_same_bits(distances, expected, "distances against mix_")
    for got, want, what in zip((weights, grad, buffer), two_steps, ("weights", "grad", "momentum"), strict=True):
        assert_same_bits(got, want, f"{what} against mix_ and sgd_step_")

    on_cpu = [peer.cpu() for peer in peers]
    expected = reference.mix_sgd_step_(
        same[0], on_cpu, own, others, same[1], if_momentum(same[2], rule), count.clone(), **rule
    )
    torch.testing.assert_close(distances.cpu(), expected, **SUM)
    assert_same_bits(weights, same[0], "weights against the reference")
    assert_same_bits(buffer, same[2], "momentum against the reference")

    wide = [peer.double() for peer in on_cpu]
    reference.mix_sgd_step_(exact[0], wide, own, others, exact[1], if_momentum(exact[2], rule), count.clone(), **rule)
    adding = {**rule, "lr": -rule["lr"], "maximize": False}  # every term adds
    absolute = [peer.abs() for peer in wide]
    buffer_terms = if_momentum(magnitude[2], rule)
    reference.mix_sgd_step_(magnitude[0], absolute, own, others, magnitude[1], buffer_terms, count.clone(), **adding)
    assert_near(weights, exact[0], magnitude[0], TERMS + 6, num_stores=2)  # the mix is rounded, then the step
    assert_near(buffer, exact[2], magnitude[2], TERMS + 6, num_stores=2)


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", SIZES)
def test_every_size(numel, dtype, offset, randn, assert_same_bits):
    tensors = [randn(numel, dtype, offset) for _ in range(3)]
    peers = [randn(numel, dtype, offset), randn(numel, dtype, 2)]
    bases = [tensor._base.clone() for tensor in tensors]
    weights, grad, buffer = (tensor.cpu().clone() for tensor in tensors)
    distances = ops.mix_sgd_step_(tensors[0], peers, 0.5, [0.3, 0.2], tensors[1], tensors[2], **RULE)
    on_cpu = [peer.cpu() for peer in peers]
    same = reference.mix_sgd_step_(weights, on_cpu, 0.5, [0.3, 0.2], grad, buffer, None, **RULE_OF_OP)
    torch.testing.assert_close(distances.cpu(), same, **SUM)
    for base, got, want in zip(bases, tensors, (weights, grad, buffer), strict=True):
        base[offset : offset + numel].copy_(want)
        assert_same_bits(got._base, base, "the buffer, what lies around the tensor included")


@pytest.mark.parametrize("num_peers", [0, 1, 2, 5, 40])
def test_every_number_of_peers(num_peers, randn, assert_same_bits):
    weights, grad, buffer = (randn(5000, torch.bfloat16) for _ in range(3))
    peers, share = [randn(5000, torch.bfloat16) for _ in range(num_peers)], 1 / (num_peers + 1)
    copies = [tensor.clone() for tensor in (weights, buffer)]
    distances = ops.mix_sgd_step_(weights, peers, share, [share] * num_peers, grad, buffer, **RULE)
    assert_same_bits(distances, ops.mix_(copies[0], peers, share, [share] * num_peers))
    ops.sgd_step_([copies[0]], [grad], [copies[1]], **RULE)
    assert_same_bits(weights, copies[0])
    assert_same_bits(buffer, copies[1])


@pytest.mark.parametrize("num_peers", [0, 1, 2, 9])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", RULES[::7], ids=name_of)
def test_the_result_may_go_elsewhere(rule, dtype, num_peers, randn, assert_same_bits):
    weights, grad, buffer = (randn(5001, dtype) for _ in range(3))
    peers, share = [randn(5001, dtype, 1) for _ in range(num_peers)], 1 / (num_peers + 1)
    in_place, before, same_buffer, out = weights.clone(), weights.clone(), buffer.clone(), randn(5001, dtype, 3)
    rule = {name: value for name, value in rule.items() if name != "first_step"}
    arguments = (peers, share, [share] * num_peers, grad)
    distances = ops.mix_sgd_step_(weights, *arguments, if_momentum(buffer, rule), lr=0.1, out=out, **rule)
    assert_same_bits(distances, ops.mix_sgd_step_(in_place, *arguments, if_momentum(same_buffer, rule), lr=0.1, **rule))
    assert_same_bits(out, in_place)
    assert_same_bits(buffer, same_buffer)
    assert_same_bits(weights, before, "weights that gave their place away")


def test_large(randn, assert_same_bits):
    weights, grad, buffer, peer = (randn(3_000_001) for _ in range(4))
    same = [tensor.cpu().clone() for tensor in (weights, grad, buffer)]
    distances = ops.mix_sgd_step_(weights, [peer], 0.75, [0.25], grad, buffer, **RULE)
    expected = reference.mix_sgd_step_(same[0], [peer.cpu()], 0.75, [0.25], same[1], same[2], None, **RULE_OF_OP)
    assert_same_bits(weights, same[0])
    assert_same_bits(buffer, same[2])
    torch.testing.assert_close(distances.cpu(), expected, **SUM)


def test_any_number_of_threads(set_threads, assert_same_bits):
    start = [torch.randn(300_001) for _ in range(4)]
    results = []
    for num_threads in (1, 2):
        set_threads(num_threads)
        weights, grad, buffer, peer = (tensor.clone() for tensor in start)
        distances = ops.mix_sgd_step_(weights, [peer], 0.5, [0.5], grad, buffer, **RULE)
        results.append([weights, buffer, distances])
    for one, two in zip(*results, strict=True):
        assert_same_bits(two, one)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity(dtype, device, assert_same_bits):
    weights, grad, buffer, peer = (torch.ones(40, dtype=dtype) for _ in range(4))
    grad[3], peer[17], peer[20], buffer[39] = math.nan, math.inf, torch.finfo(dtype).max, math.nan
    got = [tensor.to(device, copy=True) for tensor in (weights, grad, buffer)]
    distances = ops.mix_sgd_step_(got[0], [peer.to(device)], 1.0, [4.0], got[1], got[2], lr=1.0, momentum=0.9)
    rule = {**DEFAULTS, "lr": 1.0, "momentum": 0.9, "weight_decay": 0.0}
    reference.mix_sgd_step_(weights, [peer], 1.0, [4.0], grad, buffer, None, **rule)
    assert_same_bits(got[0], weights)
    assert_same_bits(got[2], buffer)
    assert got[0].isnan().nonzero().flatten().tolist() == [3, 39]
    assert got[0].isinf().nonzero().flatten().tolist() == [17, 20]  # 4 * max overflows in every dtype
    assert distances.isinf().all()


def test_opcheck(randn, device):
    op = torch.ops.ddpcore.mix_sgd_step_.default
    tensors = (randn(33), [randn(33)], 0.5, [0.5], randn(33), randn(33), torch.ones(1, device=device))
    noise = {"noise_std": 0.5, "noise_seed": 1, "noise_step": 2, "noise_first": 3}
    torch.library.opcheck(op, tensors, {**RULE_OF_OP, **noise})
    torch.library.opcheck(op, tensors, {**RULE_OF_OP, **noise, "out": randn(33)})
    plain = {**RULE_OF_OP, **noise, "momentum": 0.0, "noise_std": 0.0}
    torch.library.opcheck(op, (randn(33), [randn(33)], 0.5, [0.5], randn(33), None, None), plain)


def test_fake_and_compiled(device, assert_same_bits):
    def step(weights: Tensor, peer: Tensor, grad: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
        distances = ops.mix_sgd_step_(weights, [peer, peer * 2], 0.5, [0.25, 0.25], grad, buffer, **RULE)
        return distances, weights + 1

    with FakeTensorMode():
        distances, moved = step(*(torch.empty(7, 3, device=device, dtype=torch.bfloat16) for _ in range(4)))
        assert distances.shape == (2,) and distances.dtype == torch.float64 and distances.device.type == device.type
        assert moved.shape == (7, 3) and moved.dtype == torch.bfloat16

    eager = [torch.randn(7, 3).to(device) for _ in range(4)]
    compiled = [tensor.clone() for tensor in eager]
    expected = step(*eager)
    results = torch.compile(step, fullgraph=True, backend="aot_eager")(*compiled)
    for result, want in zip(results, expected, strict=True):
        assert_same_bits(result, want)
    assert_same_bits(compiled[0], eager[0], "the mutated weights")
    assert_same_bits(compiled[3], eager[3], "the mutated momentum")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"momentum_buffer": None}, "momentum needs a momentum_buffer"),
        ({"momentum_buffer": torch.zeros(15)}, "momentum_buffer must have the shape of weights"),
        ({"momentum_buffer": torch.zeros(16).half()}, "momentum_buffer must have the device and dtype of weights"),
        ({"grad": torch.zeros(4, 4)}, "grad must have the shape of weights"),
        ({"grad": torch.zeros(32)[::2]}, "grad must have the strides of weights, both dense"),
        ({"momentum_buffer": torch.zeros(32)[::2]}, "momentum_buffer must have the strides of weights, both dense"),
        ({"peers": [torch.zeros(32)[::2]]}, "a peer must have the strides of weights, both dense"),
        ({"step": torch.zeros(2)}, "step must be one float32 on the device of"),
        ({"step": torch.zeros(1).double()}, "step must be one float32 on the device of"),
        ({"grad": torch.zeros(16).double()}, "grad must have the device and dtype of weights"),
        ({"peers": [torch.zeros(15)]}, "a peer must have the shape of weights"),
        ({"peers": [torch.zeros(16).half()]}, "a peer must have the device and dtype of weights"),
        ({"peer_weights": [0.5, 0.5]}, "peers and peer_weights must have the same length"),
        ({"weights": torch.zeros(32)[::2]}, "weights must be contiguous"),
    ],
)
def test_bad_arguments(changed, message):
    arguments = {"weights": torch.zeros(16), "peers": [torch.zeros(16)], "self_weight": 0.5, "peer_weights": [0.5]}
    arguments |= {"grad": torch.zeros(16), "momentum_buffer": torch.zeros(16)}
    with pytest.raises(RuntimeError, match=message):
        ops.mix_sgd_step_(**{**arguments, **changed}, **RULE)


def test_the_weights_are_no_peer():
    weights = torch.zeros(16)
    with pytest.raises(RuntimeError, match="a peer must not be the weights themselves"):
        ops.mix_sgd_step_(weights, [weights], 0.5, [0.5], torch.zeros(16), None, lr=0.1)


def test_only_three_storage_types():
    doubles = [torch.zeros(16, dtype=torch.float64) for _ in range(2)]
    with pytest.raises(RuntimeError, match="weights must be float32, bfloat16 or float16"):
        ops.mix_sgd_step_(doubles[0], [], 1.0, [], doubles[1], None, lr=0.1)
