"""Bucket plans, and the hooks that report complete buckets in one fixed order."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpcore.parameters.buckets import GradientBuckets, messages
from ddpcore.parameters.copies import copies_of
from ddpcore.parameters.flat import ALIGNMENT, FlatParameters, plan_buckets

# --- plan_buckets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 100, 1000])
@pytest.mark.parametrize(("size", "first"), [(16, 16), (100, 20), (33, 64), (5000, 16)])
def test_plan(numel: int, size: int, first: int) -> None:
    plan = plan_buckets(numel, size, first)
    assert [begin for begin, _ in plan] == [0, *(end for _, end in plan)][: len(plan)]
    assert (plan[-1][1] if plan else 0) == numel
    for index, (begin, end) in enumerate(plan):
        assert begin % ALIGNMENT == 0
        assert 0 < end - begin <= (size if index else first)
    # As few as possible: each except the last has the largest aligned size.
    for index, (begin, end) in enumerate(plan[:-1]):
        assert end - begin == (size if index else first) // ALIGNMENT * ALIGNMENT


@pytest.mark.parametrize("bad", [(10, 0, 16), (10, 16, 0), (0, 15, 16)])
def test_an_impossible_plan(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="a bucket must have at least 16 elements"):
        plan_buckets(*bad)


# --- messages ----------------------------------------------------------------------------------------------------


def last_of(flat: FlatParameters, end: int) -> int:
    """The last parameter, in the order of the layout, that has columns before ``end``."""
    return max(index for index, segment in enumerate(flat.segments) if segment.offset < end)


@pytest.mark.parametrize(("size", "first"), [(64, 64), (128, 64), (4096, 64), (2**20, 2**20)])
@pytest.mark.parametrize("widths", [(6, 6, 6, 6), (3, 200, 2), (64, 1, 1, 64), (1, 1)])
def test_buckets_of_one_moment_are_one_message(widths: tuple[int, ...], size: int, first: int) -> None:
    """Messages end at the end of a bucket if the next bucket is completed by another parameter."""
    model = nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(widths)))
    flat = FlatParameters([model.named_parameters()], bucket_bytes=size, first_bucket_bytes=first)
    ends = [end for _, end in flat.buckets]
    kept = [end for end, later in itertools.pairwise(ends) if last_of(flat, end) != last_of(flat, later)]
    cuts = [0, *kept, flat.numel]
    assert messages(flat) == list(itertools.pairwise(cuts))


def test_a_parameter_of_many_buckets_is_one_message() -> None:
    flat = FlatParameters([nn.Linear(64, 64).named_parameters()], bucket_bytes=1024, first_bucket_bytes=256)
    assert flat.names == ("bias", "weight")
    assert len(flat.buckets) == 1 + 16
    assert messages(flat) == [(0, 64), (64, 64 + 64 * 64)]
    flat.reorder([1, 0])
    assert messages(flat) == [flat.buckets[0][:1] + flat.buckets[-2][1:], flat.buckets[-1]], "the bias is still to come"


# --- GradientBuckets ---------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Five layers; a forward pass uses those of ``path``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def forward(self, inputs: Tensor, path: Any = range(5)) -> Tensor:
        for index in path:
            inputs = self.layers[index](inputs).tanh()
        return inputs


class Recorder:
    """A list that receives the messages, with copies of their contents."""

    def __init__(self, *models: nn.Module) -> None:
        learners = [model.named_parameters() for model in models]
        self.flat = FlatParameters(learners, bucket_bytes=128, first_bucket_bytes=64)
        self.handed: list[tuple[int, int]] = []
        self.contents: list[Tensor] = []
        self.ends: list[list[int]] = []
        self.buckets = GradientBuckets(self.flat, self.on_message, self.on_end)

    def on_message(self, columns: Tensor) -> None:
        begin = (columns.data_ptr() - self.flat.grad_LP.data_ptr()) // 4
        self.handed.append((begin, begin + columns.shape[1]))
        self.contents.append(columns.clone())

    def on_end(self, order: list[int]) -> None:
        self.ends.append(list(order))

    def forget(self) -> None:
        self.handed, self.contents, self.ends = [], [], []


def backward(model: Layers, path: Any = range(5)) -> None:
    model(torch.ones(2, 6), path).sum().backward()


def test_complete_buckets_in_order_and_the_end_before_backward_returns() -> None:
    model = Layers()
    seen = Recorder(model)
    for _ in range(2):
        seen.forget()
        model.zero_grad()
        backward(model)
        assert len(seen.flat.buckets) > len(seen.handed) > 5
        assert seen.handed == messages(seen.flat)
        assert torch.equal(torch.cat(seen.contents, dim=1), seen.flat.grad_LP), "handed out before it was complete"
        assert len(seen.ends) == 1
        assert sorted(seen.ends[0]) == list(range(10))
        assert all(p.grad is v for p, v in zip(seen.flat.parameters, seen.flat.grad_views, strict=True))


@pytest.mark.parametrize("path", [[4, 3, 2, 1, 0], [2, 0, 4, 1, 3]])
def test_the_order_does_not_follow_the_gradients(path: list[int]) -> None:
    model = Layers()
    seen = Recorder(model)
    backward(model, path)
    assert seen.handed == messages(seen.flat)
    assert torch.equal(torch.cat(seen.contents, dim=1), seen.flat.grad_LP)
    layers = [int(seen.flat.names[index].split(".")[1]) for index in seen.ends[0]]
    assert layers[::2] == path[::-1], "on_end is told the order in which gradients came"


def test_buckets_start_before_backward_ends() -> None:
    """Communication overlaps: the last layer's message is sent before the first layer has its gradient."""
    model = Layers()
    seen = Recorder(model)
    early: list[int] = []
    model.layers[0].weight.register_hook(lambda grad: early.append(len(seen.handed)))
    backward(model)
    assert 0 < early[0] < len(seen.handed)


def test_unused_parameters_count_as_zero() -> None:
    model = Layers()
    seen = Recorder(model)
    seen.flat.grad_LP.fill_(3.0)
    backward(model, [0, 2])
    assert seen.handed == messages(seen.flat)
    assert torch.equal(torch.cat(seen.contents, dim=1), seen.flat.grad_LP)
    assert sorted({seen.flat.names[i].split(".")[1] for i in seen.ends[0]}) == ["0", "2"]
    for name, parameter, view in zip(seen.flat.names, seen.flat.parameters, seen.flat.grad_views, strict=True):
        if name.split(".")[1] in "02":
            assert parameter.grad is view
        else:
            assert parameter.grad is None
            assert not view.any()


def test_paused() -> None:
    """No message is sent. The next pass sends what has accumulated, also for layers that it does not use."""
    model = Layers()
    seen = Recorder(model)
    seen.buckets.paused = True
    backward(model, [0, 1])
    assert not seen.handed
    assert not seen.ends
    piled = [parameter.grad.clone() for parameter in model.layers[:2].parameters()]
    seen.buckets.paused = False
    backward(model, [2])
    assert seen.handed == messages(seen.flat)
    assert torch.equal(torch.cat(seen.contents, dim=1), seen.flat.grad_LP)
    for parameter, before in zip(model.layers[:2].parameters(), piled, strict=True):
        assert torch.equal(parameter.grad, before)


def test_backward_twice_accumulates() -> None:
    model = Layers()
    seen = Recorder(model)
    backward(model)
    once = seen.flat.grad_LP.clone()
    seen.forget()
    backward(model)
    assert seen.handed == messages(seen.flat)
    assert len(seen.ends) == 1
    assert torch.equal(seen.flat.grad_LP, 2 * once)
    assert torch.equal(torch.cat(seen.contents, dim=1), 2 * once)


def test_a_parameter_used_twice_in_one_pass() -> None:
    model = Layers()
    seen = Recorder(model)
    backward(model, [0, 1, 0, 1, 0])
    assert seen.handed == messages(seen.flat)
    assert torch.equal(torch.cat(seen.contents, dim=1), seen.flat.grad_LP)


@pytest.mark.parametrize("num_passes", [1, 3])
def test_several_learners_hand_out_the_columns_of_all_rows(num_passes: int) -> None:
    """In one backward pass over the sum of their losses, and in a pass for each of them."""
    models = copies_of(nn.Linear(6, 6), 3)
    seen = Recorder(*models)
    losses = [model.weight.square().sum() + model.bias.sum() for model in models]
    for _ in range(2):
        for loss in losses if num_passes == 3 else [sum(losses)]:
            assert not seen.ends
            loss.backward(retain_graph=True)
        assert seen.ends == [[0, 1]]
        assert seen.handed == messages(seen.flat)
        assert all(columns.shape[0] == 3 for columns in seen.contents)
        assert torch.equal(torch.cat(seen.contents, dim=1), seen.flat.grad_LP)
        assert seen.flat.grad_LP.any(dim=1).all()
        seen.forget()


def test_rebuild_after_a_new_order() -> None:
    model = Layers()
    seen = Recorder(model)
    backward(model, [4, 3, 2, 1, 0])
    model.zero_grad()
    seen.flat.reorder(seen.ends[0])
    seen.buckets.rebuild()
    seen.forget()
    backward(model, [4, 3, 2, 1, 0])
    assert seen.handed == messages(seen.flat)
    assert torch.equal(torch.cat(seen.contents, dim=1), seen.flat.grad_LP)
    assert seen.ends[0] == list(range(10)), "gradients now come in the order of the layout"


def test_an_error_inside_backward_is_forgotten_by_the_next() -> None:
    model = Layers()
    seen = Recorder(model)

    def explode(grad: Tensor) -> None:
        raise ArithmeticError("boom")

    handle = model.layers[1].weight.register_hook(explode)
    with pytest.raises(ArithmeticError, match="boom"):
        backward(model)
    handle.remove()
    assert seen.handed, "the pass must fail after the first bucket, or this test tries nothing"
    assert not seen.ends
    model.zero_grad()
    seen.forget()
    backward(model)
    assert seen.handed == messages(seen.flat)
    assert torch.equal(torch.cat(seen.contents, dim=1), seen.flat.grad_LP)
    assert len(seen.ends) == 1
    assert sorted(seen.ends[0]) == list(range(10))
