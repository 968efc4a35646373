"""Additional forward and backward passes, which restore all state of the training.

Shapes: L learners held by this process, P elements of a learner's row.
"""

import random
import re
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from ddpcore import ops
from ddpcore.distributed.guards import learner_of
from ddpcore.distributed.handle import Distributed
from ddpcore.distributed.hooks import HookedDistributed
from ddpcore.ops import reference
from ddpcore.ops.library import KERNEL_DTYPES
from ddpcore.parameters.hooks import own_hooks
from ddpcore.parameters.shards import is_dtensor, laid_out, local
from ddpcore.strategies.learner import Learner

Loss = Callable[[], Tensor | Iterator[Tensor]]
"""Recomputes a loss with the model's current weights: the sum over this process's learners of their mean losses.

It may yield parts whose sum is the loss, if there are too many samples for one graph.
"""


def noise_sums(rows: Sequence[Tensor], bounds: Sequence[int], origin: Tensor | None = None) -> Tensor:
    """``ops.noise_sums``, or its reference implementation for dtypes without a kernel."""
    return (ops if rows[0].dtype in KERNEL_DTYPES else reference).noise_sums(rows, bounds, origin)


class RandomState:
    """The current state of the global generators: torch's for the CPU and one device, NumPy's and Python's."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = (device, torch.cuda.get_rng_state(device)) if device.type == "cuda" else None
        self._cpu, self._numpy, self._python = torch.get_rng_state(), np.random.get_state(), random.getstate()

    def restore(self) -> None:
        """Set the generators to this state."""
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda[1], self._cuda[0])
        torch.set_rng_state(self._cpu)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


def check_equal_weights(handle: HookedDistributed, *losses: Loss | None) -> None:
    """Raise ValueError if learners do not count alike: statistics compare batches of one size."""
    if any(getattr(loss, "group", None) is not None for loss in losses):
        raise ValueError("the losses of learners are averaged already: make DataLoss without group=")
    if handle.learner.shares is not None or handle.strategy.traits.weights is not None:
        raise ValueError("learners have weights, and statistics compare batches of one size: leave weights out")


def model_of(handle: Distributed | nn.Module) -> nn.Module:
    """The model of a loop. ValueError if it is none that diagnostics can follow."""
    model = handle.model if isinstance(handle, Distributed) else handle
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError("torch's DistributedDataParallel hides its averages: take ddpcore.SSGD()")
    if not isinstance(model, nn.Module):
        raise ValueError(f"a {type(handle).__name__} is no loop: pass what distribute() returned, or the model")
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that need a gradient now. ValueError: there is none, or one is complex."""
    if not (found := [parameter for parameter in model.parameters() if parameter.requires_grad]):
        raise ValueError("the model has no parameter that needs a gradient: there is nothing to measure")
    if any(parameter.is_complex() for parameter in found):
        raise ValueError("a parameter is complex: keep a real one and call torch.view_as_complex() in forward()")
    return found


@contextmanager
def as_it_was(model: nn.Module, device: torch.device, moved: Container[int] = ()) -> Iterator[None]:
    """Restore buffers and global generators on exit, also if a module has replaced a buffer by a new tensor.

    Inside, parameters are copies, because a forward pass may write into them (``max_norm`` of an embedding, the mean of
    a teacher); not those whose ids are in ``moved``, and no shards. A forward pass of a model in training does not call
    its strategy, which could change weights.
    """
    learner = learner_of(model.parameters())
    was_paused = learner is not None and learner.hooks_paused
    whole = (one for one in model.parameters() if not is_dtensor(one) and not is_lazy(one) and id(one) not in moved)
    weights = [(parameter, parameter.data) for parameter in whole]
    found = [(module._buffers, *one) for module in model.modules() for one in module._buffers.items()]
    buffers = [(owner, name, buffer, buffer.clone()) for owner, name, buffer in found if buffer is not None]
    before = RandomState(device)
    try:
        if learner is not None:
            learner.hooks_paused = True
        for parameter, data in weights:
            parameter.data = data.clone()
        yield
    finally:
        if learner is not None:
            learner.hooks_paused = was_paused
        before.restore()
        for parameter, data in weights:
            parameter.data = data
        torch.clear_autocast_cache()  # it holds the copies, cast
        for owner, name, buffer, value in buffers:
            buffer.data.copy_(value)
            owner[name] = buffer


@contextmanager
def at_weights(
    model: nn.Module, learner: Learner, weights_LP: Tensor, random_state: RandomState | None = None
) -> Iterator[None]:
    """In the ``with`` block, the model's parameters point to a copy of other weights.

    The trained weights keep their memory, because neighbours may read them. Buffers and random state are restored.
    The passes use ``random_state``; None: the current one.
    """
    with ExitStack() as after:
        if (shards := learner.flat.shards) is not None:
            shards.reshard()
            after.callback(shards.reshard)
        kept = as_it_was(model, weights_LP.device, learner.flat.index)
        with kept, torch.enable_grad(), learner.flat.at(weights_LP.clone()):
            if random_state is not None:
                random_state.restore()
            yield


def gradient(learner: Learner, loss: Loss, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The gradient ``[L, P]`` of each learner's own loss, and its mean. ``.grad`` and its hooks are not used.

    In mixed precision small gradients underflow unless the loss is scaled. The result is divided by ``scale``.
    """
    rows_LP, shards = torch.zeros_like(learner.flat.param_LP), learner.flat.shards
    parameters, views = _trained(learner, rows_LP)
    total, reached = torch.zeros((), dtype=torch.float64, device=rows_LP.device), set[int]()
    for part in parts_of(loss):
        scaled = _scaled(part, scale)
        if shards is None:
            _functions_of(scaled)
            found = torch.autograd.grad(scaled, parameters, allow_unused=True)
            reached |= _rows_of(learner, parameters, found)
            add_(views, found)
        else:
            add_(views, _gradients_of_shards(scaled, parameters))
        total += local(part).detach()
    if shards is None:
        _check_reached(learner, reached)
    else:
        shards.add_(total).div_(int(shards.mesh.size()))
    return _unscaled(rows_LP, scale), total / max(1, len(reached))


def _rows_of(learner: Learner, parameters: Sequence[Tensor], found: Sequence[Tensor | None]) -> set[int]:
    """The learners held here of whose parameters something was found."""
    places = [learner.flat.index[id(one)] for one, value in zip(parameters, found, strict=True) if value is not None]
    return {place // len(learner.flat.segments) for place in places}


def _check_reached(learner: Learner, reached: set[int]) -> None:
    """Raise ValueError if a loss leaves out a learner held here: the mean of all would be too small."""
    if missing := sorted(set(learner.comm.rows_read) - reached):
        what = f"loss= or full_loss= uses no weight of learner {', '.join(map(str, missing))}"
        raise ValueError(f"{what}: call handle.model, or each of handle.models, and return the sum of all losses")


def _gradients_of_shards(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """What a backward pass leaves in ``.grad``, the only place where FSDP2 writes. Hooks do not see it."""
    before = [(one, one.grad, one._post_accumulate_grad_hooks) for one in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
            parameter._post_accumulate_grad_hooks = OrderedDict()  # None would leave the hooks of autograd
        loss.backward()
        return [laid_out(parameter, parameter.grad) for parameter in parameters]
    finally:
        for parameter, grad, hooks in before:
            parameter.grad, parameter._post_accumulate_grad_hooks = grad, hooks


def hessian_product(
    model: nn.Module, learner: Learner, loss: Loss, mean_LP: Tensor, vectors_LP: Tensor, scale: Tensor | None = None
) -> Tensor:
    """The Hessian of the mean of all learners' losses at the mean weights times a vector, ``[L, P]``. Collective."""
    rows_LP, reached = torch.zeros_like(vectors_LP), set[int]()
    parameters, views = _trained(learner, rows_LP)
    _, vectors = _trained(learner, vectors_LP)
    with at_weights(model, learner, mean_LP), twice_differentiable(model):
        for part in parts_of(loss):
            rows = part_products(_scaled(part, scale), parameters, [vector[None] for vector in vectors])
            reached |= _rows_of(learner, parameters, rows)
            add_(views, [None if row is None else row[0] for row in rows])
    if reached:  # else the loss is linear
        _check_reached(learner, reached)
    return learner.average_of(_unscaled(rows_LP, scale))


@contextmanager
def twice_differentiable(model: nn.Module) -> Iterator[None]:
    """In the ``with`` block, layers use operations that have second derivatives, and no hook changes a gradient.

    Attention uses matrix products and a softmax, because torch's fused kernels have none. A weight norm is a quotient:
    torch's own operation has wrong second derivatives, because its first one takes the norm as a constant. A hook of a
    parameter or module, such as one that clips, would act on a gradient and again on its derivative.

    ValueError: inside ``torch.inference_mode()``, where nothing has derivatives; a compiled model; an operation without
    a second derivative; a spectral norm in training mode, whose vectors follow the weights without autograd.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError("derivatives are asked for inside torch.inference_mode(), which records none: measure outside")
    quotient = _Replaced(torch._weight_norm, lambda v, g, dim=0: v * (g / torch.norm_except_dim(v, 2, dim)))
    vectors = [(name, vector, vector._version) for name, vector in _singular_vectors(model)]
    try:
        with sdpa_kernel(SDPBackend.MATH), quotient, without_hooks(model):
            yield
    except RuntimeError as error:
        if "donated buffer" in str(error) or "aot_autograd" in str(error):
            raise ValueError(
                "the model is compiled, and torch.compile differentiates once: let the loss call the model uncompiled"
            ) from error
        if (found := re.search(r"derivative for '?(?:aten::)?(\w+)'? is not implemented\.?$", str(error))) is None:
            raise
        advice = "which second derivatives need: compute this part by other operations of torch"
        raise ValueError(f"torch has no derivative of {found[1]}, {advice}") from error
    if changed := [name for name, vector, version in vectors if vector._version != version]:
        what = f"the spectral_norm of {changed[0]} follows the weights in training mode"
        raise ValueError(f"{what}, and its second derivatives leave that out: call model.eval() before, or in the loss")


def _singular_vectors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A vector of each trained spectral norm, which a pass in training mode changes, by the name of the module."""
    for name, module in model.named_modules():
        weight = module.original if isinstance(module, ParametrizationList) and hasattr(module, "original") else None
        for norm in module.children() if isinstance(weight, Tensor) and weight.requires_grad else ():
            if isinstance(norm, _SpectralNorm) and hasattr(norm, "_u"):
                yield name, norm._u
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm) and getattr(module, f"{hook.name}_orig").requires_grad:
                yield name, getattr(module, f"{hook.name}_u")


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """In the ``with`` block no hook of a parameter, module or activation changes a gradient."""
    owners, kinds = (*model.modules(), *model.parameters()), ("_backward_hooks", "_backward_pre_hooks")
    tables = (getattr(owner, kind, None) for owner in owners for kind in kinds)
    found = [(table, dict(table)) for table in tables if table]
    try:
        for table, _ in found:
            table.clear()
        with _Replaced(Tensor.register_hook, _no_hook):
            yield
    finally:
        for table, hooks in found:
            table.update(hooks)


class _Replaced(TorchFunctionMode):
    """Calls of one function of torch call another one."""

    def __init__(self, function: Any, other: Any) -> None:
        super().__init__()
        self._function, self._other = function, other

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._other if func is self._function else func)(*args, **(kwargs or {}))


def _no_hook(*_: Any, **__: Any) -> RemovableHandle:
    with own_hooks():
        return RemovableHandle(OrderedDict())


def part_products(part: Tensor, parameters: Sequence[Tensor], vectors: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The products of K vectors with the Hessian of a part of a loss (Pearlmutter 1994), ``[K, *S]`` per parameter.

    The part must be computed inside :func:`twice_differentiable`. A product is None where autograd knows that it is
    zero, as for a parameter that the part does not use.
    """
    gradients = slopes_of(part, parameters, torch.ones_like(part, requires_grad=True))
    live = [(g, v) for g, v in zip(gradients, vectors, strict=True) if g is not None and g.requires_grad]
    if not live:  # parameters without elements
        return [None] * len(parameters)
    outputs, num = [g for g, _ in live], len(live[0][1])
    rows = []
    for index in range(num):
        along, is_last = [at_even(v[index]) for _, v in live], index + 1 == num
        rows.append(torch.autograd.grad(outputs, parameters, along, retain_graph=not is_last, allow_unused=True))
    return [None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)]


def at_even(part: Tensor) -> Tensor:
    """A part of a row, or a copy if its offset is odd, which ``torch.view_as_complex`` refuses."""
    return part.clone() if part.storage_offset() % 2 else part


def slopes_of(outputs: Tensor, parameters: Sequence[Tensor], factor: Tensor) -> Sequence[Tensor | None]:
    """The gradients of ``factor * outputs``, with a graph of ``factor`` and the parameters.

    ValueError: a function of the program has no second derivative, which would be taken for zero.
    """
    cut = list[str]()

    def note(function: Any, found: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> None:
        # What a backward() returns is linear in what it gets, so it has a graph, too.
        graphs, given_graphs = ({one.requires_grad for one in some if one is not None} for some in (found, given))
        if function.backward.__code__ is _ONCE or (True in given_graphs and False in graphs):
            cut.append(function.__name__)

    hooks = [node.register_hook(partial(note, type(node)._forward_cls)) for node in _functions_of(outputs)]
    gradients = torch.autograd.grad(outputs, parameters, factor, create_graph=True, allow_unused=True)
    for hook in hooks:
        hook.remove()
    if all(gradient is None for gradient in gradients):
        raise ValueError("the loss uses no weight of the model (it may call a copy): call the same model in the loss")
    if cut:
        advice = "let its backward() compute with torch alone, without once_differentiable, detach(), .data and numpy"
        raise ValueError(f"{cut[0]} of the model has no second derivative, which would be taken for zero: {advice}")
    return gradients


def _functions_of(outputs: Tensor) -> list[Any]:
    """The functions of a program in the graph of outputs. ValueError: one is a checkpoint that hides its weights."""
    found, waiting, seen = list[Any](), [outputs.grad_fn], set[Any]()
    while waiting:
        if (node := waiting.pop()) is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            if isinstance(node, BackwardCFunction):
                found.append(node)
    if any(type(node)._forward_cls.__name__ == "CheckpointFunction" for node in found):
        raise ValueError("a checkpoint hides its weights from torch.autograd.grad(): pass use_reentrant=False to it")
    return found


_ONCE = once_differentiable(lambda *_: None).__code__


def scale_of(scaler: torch.amp.GradScaler | None, device: torch.device) -> Tensor | None:
    """The factor of the loss before a backward pass; None if it is not scaled."""
    if scaler is None or not scaler.is_enabled():
        return None
    return scaler.scale(torch.ones((), dtype=torch.float32, device=device))


def scale_left(optimizer: torch.optim.Optimizer) -> Tensor | float:
    """The factor of the gradients that ``GradScaler.step`` leaves to an optimizer that unscales them itself, else 1."""
    return 1.0 if (scale := getattr(optimizer, "grad_scale", None)) is None else scale


def parts_of(loss: Loss) -> Iterator[Tensor]:
    """The parts of a loss, each a scalar with its own graph. ValueError if one is something else."""
    result = loss()
    for part in result if isinstance(result, Iterator) else (result,):
        if not isinstance(part, Tensor) or part.numel() != 1 or not part.requires_grad:
            what = "loss= and full_loss= must return one number with a graph, or yield its parts"
            raise ValueError(f"{what}: call the model inside")
        yield part.reshape(())


def local_gradients(learner: Learner) -> Tensor:
    """A copy of each learner's ``.grad``, ``[L, P]``; zero for a parameter without one.

    NaN for a learner whose trained parameters have none: ``on_nonfinite`` has left its step out.
    """
    rows_LP, num = torch.zeros_like(learner.flat.param_LP), len(learner.flat.segments)
    for view, parameter in zip(learner.flat.views_of(rows_LP), learner.flat.parameters, strict=True):
        if parameter.requires_grad and parameter.grad is not None:
            view.copy_(laid_out(parameter, parameter.grad))
    for row, row_P in enumerate(rows_LP):
        trained = [one for one in learner.flat.parameters[row * num : (row + 1) * num] if one.requires_grad]
        if trained and all(parameter.grad is None for parameter in trained):
            row_P.fill_(float("nan"))
    return rows_LP


def _trained(learner: Learner, rows_LP: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters that now need a gradient (some may have been frozen), and their views of these rows."""
    pairs = zip(learner.flat.parameters, learner.flat.views_of(rows_LP), strict=True)
    chosen = [(parameter, view) for parameter, view in pairs if parameter.requires_grad]
    return [parameter for parameter, _ in chosen], [view for _, view in chosen]


def add_(views: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> None:
    """Add tensors where there are some."""
    for view, tensor in zip(views, tensors, strict=True):
        if tensor is not None:
            view.add_(tensor.detach())


def _scaled(part: Tensor, scale: Tensor | None) -> Tensor:
    return part if scale is None else part * scale.to(part)


def _unscaled(rows_LP: Tensor, scale: Tensor | None) -> Tensor:
    return rows_LP if scale is None else rows_LP.mul_(scale.double().reciprocal().to(rows_LP))
