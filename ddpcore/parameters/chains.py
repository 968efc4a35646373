"""Chains of linear layers and activations: one product a layer for all virtual learners."""

import functools
from collections.abc import Iterator, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ddpcore.parameters.flat import FlatParameters, version_of
from ddpcore.parameters.hooks import own_hooks

ALIGNED = 64  # bytes, at which torch begins the memory of a tensor
_BY_ELEMENT = (nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.Identity, nn.ELU, nn.GELU, nn.SiLU, nn.Softplus, nn.Sigmoid)
_SAME_BITS = _BY_ELEMENT[:4]  # others compute the last elements of a tensor with other bits


_KINDS: dict[Any, type[nn.Module]] = {kind.forward: kind for kind in (*_BY_ELEMENT, nn.Linear, nn.Flatten)}


class Pass:
    """One forward pass of some learners. Its backward pass may write gradients of weights into ``grad_LP``.

    Args:
        rows: the numbers of the learners that run. ``parameters`` are theirs, in the order of ``flat.parameters``.
        token: the scalar that autograd reaches in ``backward()``, and not in ``autograd.grad()`` or with ``inputs=``.
    """

    def __init__(self, flat: FlatParameters, rows: range, parameters: Sequence[Tensor], token: Tensor | None) -> None:
        self.flat, self.rows, self.parameters, self.token = flat, rows, parameters, token
        self._task, self._accumulates, self._lent = -1, False, dict[int, Tensor]()
        self._all, self._num = flat.parameters, len(flat.segments)
        self._versions = list(map(version_of, self._all))

    def accumulates(self) -> bool:
        """Whether the backward pass that runs adds to ``.grad``, and needs no graph."""
        if (task := torch._C._current_graph_task_id()) != self._task:
            self._task, self._lent, token = task, {}, self.token
            reaches = token is not None and torch._C._will_engine_execute_node(get_gradient_edge(token).node)
            self._accumulates = reaches and not torch.is_grad_enabled()
            if self._accumulates and self.parameters is self.flat.parameters:
                self._lent = self.flat.lend_grads(self)
        return self._accumulates

    def check_weights(self, place: int | None = None) -> None:
        """Let autograd refuse a backward pass after the program has changed weights in place, of one segment or of all.

        The graph saves one tensor of all learners' weights, but an in-place change raises only a parameter's version.
        """
        own = slice(None) if place is None else slice(place, None, self._num)
        if self._versions[own] != list(map(version_of, self._all[own])):
            torch.autograd.graph.increment_version(self.flat.param_LP)

    def rooms(self, places: Sequence[int | None]) -> Sequence[Tensor | None]:
        """Where a layer may write its gradients of segments, ``[L, *S]``; None: one needs memory of its own."""
        self.accumulates()
        return [None if place is None else self._lent.pop(place, None) for place in places]


class Layer(NamedTuple):
    """A layer of all learners: its modules, and the segments of weight and bias (None: frozen, or there is none)."""

    modules: list[nn.Module]
    weight: int | None = None
    bias: int | None = None


def chain_of(models: Sequence[nn.Module], flat: FlatParameters) -> list[Layer] | None:
    """The layers of models that are alike. None: a module is no ``nn.Sequential`` of layers that are known here."""
    num, layers = len(flat.segments), list[Layer]()
    for modules in zip(*map(_leaves, models), strict=True):
        first = modules[0]
        kind = _KINDS.get(type(first).forward) if type(first).__call__ is nn.Module.__call__ else None
        if kind is nn.Linear:
            at = (flat.index.get(id(one)) for one in (first.weight, first.bias))
            layers.append(Layer(list(modules), *(None if place is None else place % num for place in at)))
        elif kind is None:
            return None
        else:
            layers.append(Layer(list(modules)))
    return layers


def _leaves(module: Any) -> Iterator[nn.Module]:
    parts = attrgetter("forward", "__iter__", "__call__")
    if isinstance(module, nn.Sequential) and parts(type(module)) == parts(nn.Sequential):
        for child in module._modules.values():
            yield from _leaves(child)
    else:
        yield module


def is_aligned(inputs_LB: Tensor) -> bool:
    """Whether each learner's part of a result is aligned as a tensor of its own: bits of products depend on it."""
    is_full = inputs_LB.shape[1] * inputs_LB.element_size() % ALIGNED == 0
    return inputs_LB.device.type != "cpu" or (is_full and inputs_LB.is_contiguous())


def run_chain(
    layers: Sequence[Layer], inputs_LB: Tensor, stacks: Sequence[Tensor], one: Pass, *, exact: bool
) -> Tensor:
    """Run the learners of a pass, with weights ``[L, *S]``; if ``exact``, activations have each learner's own bits."""
    values, kind = torch._C._functorch.unwrap_if_dead(inputs_LB), inputs_LB.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    for modules, *places in layers:
        first = modules[0]
        if isinstance(first, nn.Linear):
            at, bias_at = places
            weight = _frozen(modules, "weight", one.rows) if at is None else stacks[at]
            bias = _frozen(modules, "bias", one.rows) if bias_at is None else stacks[bias_at]
            if dtype is not None:
                values, weight = _cast(values, dtype), _cast(weight, dtype)
                bias = None if bias is None else _cast(bias, dtype)
                places = [None, None]  # gradients are cast before they are added
            if values.dim() == 3:
                values = _apply_linear(values, weight, bias, one, places)
            else:
                is_saved = values.requires_grad and at is not None  # the weight, whose gradient goes to the inputs
                values = torch.stack(_products(values, weight, bias))
                if is_saved and values.requires_grad:
                    with own_hooks():
                        values.register_hook(lambda _, at=at: one.check_weights(at))
        elif isinstance(first, nn.Flatten):
            values = values.flatten(*(dim + (dim >= 0) for dim in (first.start_dim, first.end_dim)))
        elif exact and not isinstance(first, _SAME_BITS):
            values = torch.stack([first(values[row]) for row in range(len(values))])
        else:
            values = first(values)
    return values


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)  # as autocast does


def _frozen(modules: Sequence[nn.Module], name: str, rows: range) -> Any:
    own = [getattr(modules[row], name) for row in rows]
    return None if own[0] is None else torch.stack(own)


class _Linear(torch.autograd.Function):
    """``[L, B, I]`` times weights ``[L, O, I]`` plus biases ``[L, O]``, with the bits of ``F.linear`` on a CPU."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, one: Pass, places: Sequence[int | None]
    ) -> Tensor:
        needs_inputs, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(inputs if needs_weight else None, weight if needs_inputs else None)
        ctx.one, ctx.places, ctx.exact = one, places, (True,) * 4
        if inputs.device.type == "cpu" and inputs.shape[2] == weight.shape[2] and inputs.dtype == weight.dtype:
            host = torch.get_num_threads(), torch.get_float32_matmul_precision()
            ctx.exact = _exact(*inputs.shape, weight.shape[1], bias is not None, weight.dtype, host)
        if not ctx.exact[0]:
            return torch.stack(_products(inputs, weight, bias))
        return torch.bmm(inputs, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), inputs, weight.mT)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        needs_inputs, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        if needs_inputs and ctx.places[0] is not None:
            ctx.one.check_weights(ctx.places[0])
        inputs, weight = ctx.saved_tensors
        of_weight, of_bias = ctx.one.rooms(ctx.places)
        _, is_inputs, is_weight, is_bias = ctx.exact
        return (
            _multiplied(gradient, weight, None, is_inputs) if needs_inputs else None,
            _multiplied(gradient.mT, inputs, of_weight, is_weight) if needs_weight else None,
            _summed(gradient, of_bias, is_bias) if needs_bias else None,
            None,
            None,
        )


# Function.apply looks at each argument for transforms of torch.func. None is active here.
_apply_linear = super(torch.autograd.Function, _Linear).apply


def _products(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    biases = repeat(None) if bias is None else bias
    return [F.linear(*row) for row in zip(inputs, weight, biases, strict=False)]


def _multiplied(first: Tensor, second: Tensor, out: Tensor | None, is_exact: bool) -> Tensor:
    if is_exact:
        return torch.bmm(first, second, out=out)
    return torch.stack([one.mm(other) for one, other in zip(first, second, strict=True)], out=out)


def _summed(gradient: Tensor, out: Tensor | None, is_exact: bool) -> Tensor:
    if is_exact:
        return torch.sum(gradient, 1, out=out)
    return torch.stack([one.sum(0) for one in gradient], out=out)


@functools.cache
@torch.no_grad()
def _exact(num: int, batch: int, fan_in: int, fan_out: int, biased: bool, dtype: torch.dtype, host: Any) -> list[bool]:
    """Whether outputs, and gradients of inputs, weights and biases, have the bits of each learner's own products.

    Libraries may add in another order for such shapes, so random numbers are multiplied in both ways, once.
    """
    if min(fan_in, fan_out) == 1:  # strides of such tensors have no meaning, and choose another way of adding
        return [False] * 4
    generator = torch.Generator().manual_seed(0)
    sizes = (batch, fan_in), (fan_out, fan_in), (fan_out,), (batch, fan_out)
    draw = {"generator": generator, "dtype": dtype, "device": "cpu"}
    with torch.autocast("cpu", enabled=False):
        inputs, weight, bias, gradient = (torch.randn(num, *size, **draw) for size in sizes)  # type: ignore[call-overload]
        added = torch.baddbmm(bias.unsqueeze(1), inputs, weight.mT) if biased else torch.bmm(inputs, weight.mT)
        ways = [(added, torch.stack(_products(inputs, weight, bias if biased else None)))]
        pairs = (gradient, weight), (gradient.mT, inputs)
        ways += [(_multiplied(*pair, None, True), _multiplied(*pair, None, False)) for pair in pairs]
        ways += [(_summed(gradient, None, True), _summed(gradient, None, False))]
        return [torch.equal(together, apart) for together, apart in ways]
