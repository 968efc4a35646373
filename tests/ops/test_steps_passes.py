"""LARS and LAMB in two calls, one pass each, so that the caller can add the squares of other shards between them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from ddpcore import ops
from ddpcore.ops import reference
from helpers import steps

every_rule = pytest.mark.parametrize("rule", steps.ADAPTIVE)
every_kind = pytest.mark.parametrize("kind", steps.KINDS)


def new_step(rule: str, kind: str, sizes: list[int], device: torch.device) -> steps.Step:
    dtype, masters = steps.KINDS[kind]
    return steps.new_step(rule, [torch.randn(size).to(device, dtype) for size in sizes], masters=masters)


def squares_of(step: steps.Step) -> Tensor:
    return torch.full((len(step.params), 2), torch.nan, dtype=torch.float64, device=step.params[0].device)


def run_pass(step: steps.Step, passes: str, squares: Tensor | None, where: object = ops) -> None:
    step.options.update(passes=passes, squares=squares)
    step.run(where)


@every_kind
@every_rule
def test_two_calls_are_one(rule, kind, device, assert_same_bits):
    step = new_step(rule, kind, [*steps.SIZES, 300_001], device)
    once = step.change(lambda tensor: tensor.clone()).run()
    squares = squares_of(step)
    run_pass(step, "first", squares)
    assert step.steps[0] == 3.0
    run_pass(step, "second", squares)
    for name, tensors in step.written().items():
        for index, (tensor, expected) in enumerate(zip(tensors, once.written()[name], strict=True)):
            assert_same_bits(tensor, expected, f"{name} {index}")
    assert_same_bits(step.trust, once.trust)


@every_kind
@every_rule
def test_each_pass_is_that_of_the_reference(rule, kind, device, assert_same_bits):
    step = new_step(rule, kind, [4097, 0, 17], device)
    expected = step.on_cpu()
    squares, expected_squares = squares_of(step), squares_of(expected)
    run_pass(step, "first", squares)
    run_pass(expected, "first", expected_squares, reference)
    torch.testing.assert_close(squares.cpu(), expected_squares, rtol=1e-12, atol=0.0)
    sums = 4 * expected_squares + 1  # those of other ranks too
    run_pass(step, "second", sums.to(device))
    run_pass(expected, "second", sums, reference)
    steps.assert_same_step(step, expected, assert_same_bits)
    torch.testing.assert_close(step.trust[:, 1].cpu(), sums[:, 0].sqrt(), rtol=1e-15, atol=0.0)


@every_rule
def test_shards_that_end_with_a_block(rule, device, assert_same_bits):
    """Each shard is a step of its own. Only the order in which partial sums of blocks are added differs."""
    whole = new_step(rule, "fp32", [3 * 4096 + 100], device)
    cuts = [0, 4096, 4096, 3 * 4096, 3 * 4096 + 100]  # one is empty
    shards = []
    for begin, end in pairwise(cuts):
        part = slice(begin, end)
        shard = whole.change(lambda tensor, part=part: tensor[part].clone() if tensor.numel() > 99 else tensor)
        shard.steps = [whole.steps[0].clone()]
        shard.scratch, shard.trust = ops.new_scratch(shard.params), ops.new_trust(shard.params)
        shards.append(shard)
    whole.run()
    squares = [squares_of(shard) for shard in shards]
    for shard, mine in zip(shards, squares, strict=True):
        run_pass(shard, "first", mine)
    total = sum(squares[1:], start=squares[0])
    for shard in shards:
        run_pass(shard, "second", total.clone())
        torch.testing.assert_close(shard.trust, whole.trust, rtol=1e-15, atol=0.0)
    assert_same_bits(torch.cat([shard.params[0] for shard in shards]), whole.params[0])


@every_rule
@pytest.mark.parametrize(
    ("passes", "squares", "message"),
    [
        ("third", None, "passes must be both, first or second, not third"),
        ("first", None, r"squares must be float64 \[params, 2\]"),
        ("second", torch.zeros(3, dtype=torch.float64), r"squares must be float64 \[params, 2\]"),
        ("first", torch.zeros(2, 2), r"squares must be float64 \[params, 2\]"),
        ("both", torch.zeros(2, 2, dtype=torch.float64), "or None with passes 'both'"),
    ],
)
def test_refusals(rule, passes, squares, message, assert_same_bits):
    step = new_step(rule, "fp32", [5, 7], torch.device("cpu"))
    before = step.on_cpu()
    with pytest.raises(RuntimeError, match=message):
        run_pass(step, passes, squares)
    steps.assert_unchanged(step, before, assert_same_bits)
