"""FlatParameters: the same Parameter objects, values and layouts, as views of one buffer."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from ddpcore.parameters.copies import copies_of
from ddpcore.parameters.flat import ALIGNMENT, FlatParameters
from helpers import flat as helper

network, flatten, fill_gradients, inside = helper.network, helper.flatten, helper.fill_gradients, helper.inside


# --- what stays --------------------------------------------------------------------------------------------------


def test_objects_values_strides_and_order_stay() -> None:
    model = network()
    objects = list(model.parameters())
    names = [name for name, _ in model.named_parameters()]
    layouts = [(p.shape, p.stride(), p.dtype, p.requires_grad) for p in objects]
    values = copy.deepcopy(model.state_dict())
    flat = flatten(model)
    assert all(after is before for after, before in zip(model.parameters(), objects, strict=True))
    assert [name for name, _ in model.named_parameters()] == names
    assert [(p.shape, p.stride(), p.dtype, p.requires_grad) for p in objects] == layouts
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not model[1].weight.is_contiguous()
    assert list(model.state_dict()) == list(values)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.is_leaf for p in objects)
    assert all(inside(p, flat.param_LP) for p in objects)
    assert set(flat.names) == set(names)
    assert all(dict(model.named_parameters())[n] is p for n, p in zip(flat.names, flat.parameters, strict=True))


def test_segments_say_where_everything_is() -> None:
    model = network()
    flat = flatten(model)
    taken = torch.zeros(flat.numel, dtype=torch.int64)
    for parameter, segment in zip(flat.parameters, flat.segments, strict=True):
        assert segment.offset % ALIGNMENT == 0
        assert segment.numel == parameter.numel()
        address = flat.param_LP.data_ptr() + segment.offset * 4
        assert parameter.data_ptr() == address
        taken[segment.offset : segment.offset + segment.numel] += 1
    assert taken.max() == 1, "segments overlap"
    assert taken.sum() == sum(p.numel() for p in model.parameters())
    assert flat.numel % ALIGNMENT == 0
    assert (flat.param_LP[0][taken == 0] == 0).all(), "padding must be zero"
    assert flat.grad_LP.shape == flat.param_LP.shape == (1, flat.numel)


def test_the_last_registered_comes_first() -> None:
    """The backward pass computes its gradient first."""
    flat = flatten(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    assert flat.names == ("1.bias", "1.weight", "0.bias", "0.weight")


def test_state_dict_round_trip_writes_the_buffer() -> None:
    model = network()
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data.normal_()
    flat = flatten(model)
    before = flat.param_LP.clone()
    model.load_state_dict(other.state_dict())
    assert all(inside(p, flat.param_LP) for p in model.parameters())
    assert not torch.equal(before, flat.param_LP)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_tied_weights_are_one_segment() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    flat = flatten(model)
    assert sorted(flat.names) == ["0.bias", "0.weight", "1.bias"]
    assert model[1].weight is model[0].weight
    pairs = [("a", model[0].weight), ("b", model[0].weight)]
    assert FlatParameters([pairs]).names == ("a",)


def test_frozen_parameters_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    pointers = [p.data_ptr() for p in model[0].parameters()]
    flat = flatten(model)
    assert flat.names == ("1.bias", "1.weight")
    assert [p.data_ptr() for p in model[0].parameters()] == pointers


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_floating_types(dtype: torch.dtype) -> None:
    model = nn.Linear(5, 3).to(dtype)
    values = model.weight.detach().clone()
    flat = flatten(model)
    assert flat.param_LP.dtype == flat.grad_LP.dtype == dtype
    assert torch.equal(model.weight, values)


# --- several learners --------------------------------------------------------------------------------------------


def test_each_learner_has_a_row() -> None:
    models = copies_of(network(), 3)
    values = {name: p.detach().clone() for name, p in models[0].named_parameters()}
    strides = {name: p.stride() for name, p in models[0].named_parameters()}
    flat = FlatParameters([model.named_parameters() for model in models])
    assert flat.param_LP.shape[0] == 3
    assert len(flat.parameters) == 3 * len(flat.names)
    for row, model in zip(flat.param_LP, models, strict=True):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, values[name])
            assert parameter.stride() == strides[name]
            assert inside(parameter, row)
            assert parameter.grad is None
    flat.param_LP[1].add_(1.0)
    for model, more in zip(models, (0, 1, 0), strict=True):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, values[name] + more)
    (models[2][1].weight.square().sum() + 0 * models[2].scale.sum()).backward()
    assert flat.gather_grads() is False
    assert torch.equal(models[2][1].weight.grad, 2 * models[2][1].weight)
    assert not flat.grad_LP[:2].any()


def test_views_and_stacks_of_another_buffer() -> None:
    for num in (1, 2):
        flat = FlatParameters([model.named_parameters() for model in copies_of(network(), num)])
        buffer = torch.arange(2 * flat.param_LP.numel(), dtype=torch.float32).view(-1, flat.numel)
        buffer = buffer[1 : 1 + num]  # another storage offset
        views, segments = flat.views_of(buffer), flat.segments * num
        for index, (view, parameter, segment) in enumerate(zip(views, flat.parameters, segments, strict=True)):
            source = buffer[index // len(flat.segments)]
            assert view.shape == parameter.shape
            assert inside(view, buffer)
            assert view.flatten()[0] == source[segment.offset]
            assert view.sum() == source[segment.offset : segment.offset + segment.numel].sum()
        for index, stack in enumerate(flat.stacks_of(buffer)):
            for row in range(num):
                assert stack[row].data_ptr() == views[row * len(flat.segments) + index].data_ptr()
                assert torch.equal(stack[row], views[row * len(flat.segments) + index])


# --- a new order -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [1, 2])
def test_reorder_moves_values_and_gradients_along(num: int) -> None:
    models = copies_of(network(), num)
    flat = FlatParameters([model.named_parameters() for model in models])
    flat.param_LP[-1].mul_(2.0)
    given = [fill_gradients(model) for model in models]
    for model in models:
        model[0].bias.grad = None
    values = [{name: p.detach().clone() for name, p in model.named_parameters()} for model in models]
    strides = {name: p.stride() for name, p in models[0].named_parameters()}
    objects = [{name: id(p) for name, p in model.named_parameters()} for model in models]
    buckets = flat.buckets
    order = [2, 0, 1, 6, 4, 3, 5]
    names = [flat.names[index] for index in order]
    old = flat.param_LP
    flat.reorder(order)
    assert list(flat.names) == names
    assert [segment.name for segment in flat.segments] == names
    assert [segment.offset for segment in flat.segments] == sorted(segment.offset for segment in flat.segments)
    assert flat.buckets == buckets
    assert not inside(old, flat.param_LP)
    for row, model in enumerate(models):
        for name, parameter in model.named_parameters():
            index = row * len(names) + names.index(name)
            assert id(parameter) == objects[row][name] == id(flat.parameters[index])
            assert torch.equal(parameter, values[row][name])
            assert parameter.stride() == strides[name]
            assert inside(parameter, flat.param_LP[row])
            if name == "0.bias":
                assert parameter.grad is None
            else:
                assert torch.equal(parameter.grad, given[row][name])
                assert parameter.grad is flat.grad_views[index]
    for model in models:
        fill_gradients(model)
    assert flat.gather_grads()


def test_reorder_holds_three_buffers_at_most() -> None:
    """Of four: the old weights are gone before the new gradients are there."""
    alive: list[int] = []
    buffers: list[weakref.ref[torch.UntypedStorage]] = []

    def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer = torch.zeros(shape, dtype=dtype, device=device)
        storages = [storage for known in buffers if (storage := known()) is not None]
        alive.append(1 + len({storage.data_ptr() for storage in storages}))
        buffers.append(weakref.ref(buffer.untyped_storage()))
        return buffer

    model = network()
    flat = FlatParameters([model.named_parameters()], allocate=allocate)
    fill_gradients(model)
    flat.gather_grads()
    flat.reorder([2, 0, 1, 6, 4, 3, 5])
    assert alive == [1, 2, 3, 3]


def test_reorder_to_the_same_order_moves_nothing() -> None:
    flat = flatten(network())
    buffer = flat.param_LP
    flat.reorder(range(len(flat.segments)))
    assert flat.param_LP is buffer


@pytest.mark.parametrize("order", [[0], [0, 0], [1, 2], [0, 1, 2]])
def test_reorder_needs_every_parameter_once(order: list[int]) -> None:
    with pytest.raises(ValueError, match="once"):
        flatten(nn.Linear(3, 2)).reorder(order)


def test_moving_to_another_row() -> None:
    """Parameters are views of it, nothing is copied, and the way back is as short."""
    model = network()
    flat = flatten(model)
    first, other = flat.param_LP, flat.param_LP.clone() + 1
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    versions = [parameter._version for parameter in flat.parameters]
    flat.move_to(None)
    assert flat.param_LP is first
    flat.move_to(other[0])
    assert flat.param_LP.data_ptr() == other.data_ptr()
    assert [parameter.data_ptr() for parameter in flat.parameters] == list(flat.param_pointers)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name] + 1) and parameter.stride() == before[name].stride()
    flat.move_to(first[0])
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert [parameter._version for parameter in flat.parameters] == versions


# --- buckets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "first"), [(256, 64), (4096, 128), (100, 100), (64, 1000), (10**9, 10**9)])
def test_buckets_cover_the_buffer_and_none_overshoots(size: int, first: int) -> None:
    """Weights of 6 x 9 elements do not divide evenly: cuts fall inside a tensor, at aligned places."""
    model = nn.Sequential(*(nn.Linear(6, 9) for _ in range(5)))
    flat = flatten(model, bucket_bytes=size, first_bucket_bytes=first)
    ends = [0]
    for index, (begin, end) in enumerate(flat.buckets):
        assert begin == ends[-1]
        assert begin % ALIGNMENT == 0
        assert 0 < 4 * (end - begin) <= (first if index == 0 else size)
        ends.append(end)
    assert ends[-1] == flat.numel
    starts = {segment.offset for segment in flat.segments}
    if size == 256:
        assert any(begin not in starts for begin, _ in flat.buckets), "no cut inside a tensor: this case tries nothing"
    if size == 10**9:
        assert len(flat.buckets) == 1


def test_bucket_bytes_are_bytes() -> None:
    """Half the bytes an element, twice the elements a bucket."""
    sizes = {}
    for dtype in (torch.float32, torch.bfloat16):
        flat = flatten(nn.Linear(64, 64).to(dtype), bucket_bytes=1024, first_bucket_bytes=512)
        sizes[dtype] = [end - begin for begin, end in flat.buckets[:2]]
    assert sizes == {torch.float32: [128, 256], torch.bfloat16: [256, 512]}


def test_a_bucket_too_small_for_an_aligned_piece() -> None:
    with pytest.raises(ValueError, match="16 elements"):
        flatten(nn.Linear(3, 2), bucket_bytes=60)
    with pytest.raises(ValueError, match="16 elements"):
        flatten(nn.Linear(3, 2), first_bucket_bytes=60)
