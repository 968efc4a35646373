"""Parameters that FlatParameters refuses, with nothing moved, and unusual ones that it accepts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import ddpcore
from ddpcore.optim import FusedSGD
from ddpcore.parameters.flat import ALIGNMENT, FlatParameters


def refused(*parameters: nn.Parameter, match: str) -> None:
    pairs = [(f"p{index}", parameter) for index, parameter in enumerate(parameters)]
    pointers = [p.data_ptr() for p in parameters if p.layout == torch.strided and p.device.type == "cpu"]
    with pytest.raises(ValueError, match=match) as caught:
        FlatParameters([pairs])
    assert "\n" not in str(caught.value)
    after = [p.data_ptr() for p in parameters if p.layout == torch.strided and p.device.type == "cpu"]
    assert after == pointers, "a refused parameter was moved"


def good() -> nn.Parameter:
    return nn.Parameter(torch.randn(4, 4))


def test_nothing_trainable() -> None:
    refused(match="nothing to train")
    refused(nn.Parameter(torch.zeros(3), requires_grad=False), match="nothing to train")


def test_sparse() -> None:
    refused(good(), nn.Parameter(torch.eye(4).to_sparse()), match="p1 is sparse")


def test_meta() -> None:
    refused(good(), nn.Parameter(torch.empty(4, device="meta")), match=r"p1 is on the meta device.*to_empty")
    refused(nn.Parameter(torch.empty(4, device="meta")), match="p0 is on the meta device")


def test_two_devices() -> None:
    """A fake tensor reports a GPU as its device; a real one is used if there is a GPU."""
    if torch.cuda.is_available():
        other = nn.Parameter(torch.zeros(4, device="cuda"))
    else:
        with FakeTensorMode(allow_non_fake_inputs=True):
            other = nn.Parameter(torch.empty(4, device="cuda"))
    with pytest.raises(ValueError, match=r"two devices \(a on cpu, b on cuda:0\)"):
        FlatParameters([[("a", good()), ("b", other)]])


def test_two_dtypes() -> None:
    refused(good(), nn.Parameter(torch.zeros(4, dtype=torch.float64)), match="two dtypes.*p0.*float32.*p1.*float64")


class Wrapper(Tensor):
    """Keeps its values in another tensor, as quantized weights do."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        result: Wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        result.inner = inner
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Wrapper, lambda one: one.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, Wrapper, func(*args, **kwargs))


def test_wrappers_of_tensors() -> None:
    """Their forward pass reads the inner tensor, which a step of the flat buffer does not change."""
    wrapped = nn.Parameter(Wrapper(torch.randn(4, 4)))
    refused(good(), wrapped, match=r"p1 wraps other tensors \(Wrapper\)")
    if hasattr(other := good(), "grad_dtype"):
        other.grad_dtype = torch.float64
        refused(good(), other, match=r"p1 is torch\.float32 and has grad_dtype torch\.float64: leave grad_dtype out")
        other.grad_dtype = None
        FlatParameters([[("p0", good()), ("p1", other)]])
    model = nn.Linear(4, 4)
    model.weight = wrapped
    optimizer = FusedSGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="weight wraps other tensors"):
        ddpcore.distribute(model, optimizer, ddpcore.SSGD(), learners=2)
    assert model.weight is wrapped and len(optimizer.param_groups[0]["params"]) == 2


class Tagged(nn.Parameter):
    """A subclass whose values are its own."""


def test_subclasses_with_values_of_their_own() -> None:
    tagged = Tagged(torch.randn(4, 4))
    flat = FlatParameters([[("tagged", tagged)]])
    assert tagged.data_ptr() == flat.param_pointers[0] and type(tagged) is Tagged


def test_complex() -> None:
    refused(nn.Parameter(torch.zeros(4, dtype=torch.complex64)), match="p0 is torch.complex64")


def test_eight_bits() -> None:
    parameter = nn.Parameter(torch.zeros(4).to(torch.float8_e4m3fn))
    refused(parameter, match=r"p0 is torch\.float8_e4m3fn.* convert it, or freeze it")


def test_not_dense() -> None:
    refused(good(), nn.Parameter(torch.zeros(4, 8)[:, ::2]), match="p1 is not dense")
    refused(nn.Parameter(torch.zeros(8, 4)[:, :3]), match="p0 is not dense")
    refused(nn.Parameter(torch.zeros(1, 4).expand(3, 4)), match="p0 is not dense")


def test_overlapping_memory() -> None:
    base = torch.zeros(8)
    refused(nn.Parameter(base[:5]), nn.Parameter(base[4:]), match="p0 and p1 share memory")
    refused(nn.Parameter(base), nn.Parameter(base), match="share memory")
    touching = [("a", nn.Parameter(base[:4])), ("b", nn.Parameter(base[4:]))]
    assert FlatParameters([touching]).numel == 2 * ALIGNMENT


def test_dense_in_any_order_of_dimensions() -> None:
    tensor = torch.randn(2, 3, 4, 5).permute(3, 1, 0, 2)
    parameter = nn.Parameter(tensor.clone(memory_format=torch.preserve_format))
    single = nn.Parameter(torch.randn(6, 1, 2).transpose(1, 2))
    values = [parameter.detach().clone(), single.detach().clone()]
    FlatParameters([[("a", parameter), ("b", single)]])
    assert parameter.stride() == tensor.stride()
    assert torch.equal(parameter, values[0])
    assert torch.equal(single, values[1])


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3)])
def test_an_empty_parameter(shape: tuple[int, ...]) -> None:
    pairs = [("a", good()), ("empty", nn.Parameter(torch.empty(shape))), ("b", good())]
    flat = FlatParameters([pairs])
    assert pairs[1][1].shape == shape
    assert flat.numel == 2 * ALIGNMENT
