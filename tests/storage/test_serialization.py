"""State as JSON and tensors."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ddpcore.storage.serialization import copy_of, pack, unpack


def there_and_back(state: Any) -> Any:
    tree, tensors = pack(state)
    assert all(tensor.dim() == 1 and tensor.is_contiguous() for tensor in tensors.values())
    return unpack(json.loads(json.dumps(tree)), tensors, "cpu")


def test_everything_that_is_no_tensor_comes_back() -> None:
    state = {
        "none": None,
        "numbers": [1, 0.1, 1e-300, math.inf, True, -(2**70)],
        "tuple": (1, ("a", [])),
        "by number": {3: "three", 0: {1: "one"}},
        "empty": {},
    }
    assert there_and_back(state) == state
    assert type(there_and_back({"t": (1,)})["t"]) is tuple
    assert list(there_and_back({2: "b", 1: "a"})) == [2, 1], "the order too"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool])
def test_tensors_keep_bits_shape_and_order(dtype: torch.dtype) -> None:
    images = torch.randn(2, 3, 4, 5).to(dtype)
    for tensor in (
        images,
        images.to(memory_format=torch.channels_last),
        images.permute(3, 1, 0, 2),
        images[0, 0, 0, 0],
    ):
        back: Tensor = there_and_back({"x": tensor})["x"]
        assert torch.equal(back, tensor)
        assert (back.dtype, back.stride()) == (tensor.dtype, tensor.stride())


def test_tensors_with_one_path_both_come_back() -> None:
    one, two, three = (torch.full((2,), float(number)) for number in range(3))
    for state in (
        {"a.b": one, "a": {"b": two}},
        {"a": {"b.c": one, "b": {"c": two}}, "a.b.c": three},
        {1: one, "1": two},
        {"a": [one], "a.0": two, "a.0'": three},
        {"x": (one,), "x.0": two},
    ):
        back = there_and_back(state)
        assert list(back) == list(state)
        torch.testing.assert_close(back, state, rtol=0, atol=0)


def test_keys_that_mark_tensors_come_back() -> None:
    for key in ("__tensor__", "__tuple__", "__items__"):
        state = {"outer": {key: [1, 2], "shape": [3]}, "x": torch.ones(2)}
        assert there_and_back(state)["outer"] == state["outer"]


def test_files_of_version_0_2() -> None:
    """A tree as that version has written it."""
    tensor = {"__tensor__": ".a.b", "shape": [2, 2], "stride": [1, 2], "on": "cuda"}
    tree = {"a": {"b": tensor}, "by number": {"__items__": [[3, "three"]]}, "t": {"__tuple__": [1]}}
    state = unpack(tree, {".a.b": torch.arange(4)}, "cpu")
    assert state["a"]["b"].tolist() == [[0, 2], [1, 3]]
    assert state["by number"] == {3: "three"} and state["t"] == (1,)
    tensor["shape"] = [3]
    with pytest.raises(ValueError, match=r"a\.b has another number of elements than its tensor"):
        unpack(tree, {".a.b": torch.arange(4)}, "cpu")


def test_views_are_saved_without_what_surrounds_them() -> None:
    buffer = torch.arange(40.0).view(4, 10)
    _, tensors = pack({"a": buffer[:, :3], "b": buffer[:, 3:6], "c": torch.ones(1).expand(5)})
    assert [len(tensor) for tensor in tensors.values()] == [12, 12, 5]
    back = there_and_back({"a": buffer[:, :3], "grad": torch.zeros(2, requires_grad=True)})
    assert torch.equal(back["a"], buffer[:, :3])
    assert not back["grad"].requires_grad


def test_what_json_cannot_hold_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"cannot save a\.b\.1, a set"):
        pack({"a": {"b": [1, {2}]}})


def test_a_copy_shares_no_memory_and_no_graph() -> None:
    """Also of a parameter that a user's own strategy keeps."""
    given = {"kept": [torch.nn.Parameter(torch.ones(2)), 3], "name": "a"}
    found = copy_of(given)
    given["kept"][0].data.fill_(7)  # type: ignore[index]
    assert torch.equal(found["kept"][0], torch.ones(2)) and not found["kept"][0].requires_grad
    assert (found["kept"][1], found["name"]) == (3, "a")
