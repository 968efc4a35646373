"""Checks while a model trains: steps, weights and memory that a strategy would not see are refused by name."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import stateless
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ddpcore.distributed.guards import wrapper_of
from ddpcore.parameters.compilation import exclude_from_compilation
from ddpcore.parameters.flat import FlatParameters

_SAMPLE = 256  # weights of each learner that are compared between forward passes


class StepCalls:
    """The calls of one optimizer's ``step()``. Only the outermost call is a step of training.

    A subclass whose ``step`` calls ``super().step()`` runs the hooks twice, and an optimizer that wraps another steps
    the same parameters by it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._frame: FrameType | None = None  # the outermost call; it may have ended by an exception

    def begin(self, frame: FrameType) -> bool:
        """``frame`` is that of a call of ``step()``. Returns whether it is the outermost call."""
        if self.are_running(frame):
            return False
        self._frame = frame
        return True

    def end(self, frame: FrameType) -> bool:
        """Returns whether ``frame`` is the outermost call, which ends now."""
        if self._frame is not frame:
            return False
        self._frame = None
        return True

    def cancel(self) -> None:
        """The outermost call is no step of training, or it raised an error."""
        self._frame = None

    def are_running(self, frame: FrameType | None) -> bool:
        """Whether the outermost call has called ``frame``."""
        return self._frame is not None and _is_below(self._frame, frame)

    def check_other(self, other: torch.optim.Optimizer, frame: FrameType) -> None:
        """Refuse a step of another optimizer on the same parameters, unless one of the two calls the other.

        Raises:
            RuntimeError: nothing has changed yet.
        """
        own = self._optimizer()
        if self.are_running(frame) or (own is not None and any(value is own for value in vars(other).values())):
            return
        name = "optimizer" if own is None else type(own).__name__
        raise RuntimeError(
            f"a {type(other).__name__} that distribute() did not get steps its parameters, so learners would not "
            f"average: step the {name} that it got, and change its options"
        )


_CALLS = WeakTensorKeyDictionary()  # the StepCalls of each parameter that distribute() has moved to a flat buffer
_OWN: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # the optimizers that distribute() got
_OTHERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()  # number of parameters
_hooks: list[Any] = []


def is_distributed(parameters: Iterable[Tensor]) -> bool:
    """Whether a ``distribute`` call has moved one of the parameters to a flat buffer."""
    return any(parameter in _CALLS for parameter in parameters)


def watch_steps(parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> StepCalls:
    """Refuse steps of other optimizers on these parameters from now on. Returns the calls of ``optimizer``."""
    calls = StepCalls(optimizer)
    _CALLS.update(dict.fromkeys(parameters, calls))
    _OWN.add(optimizer)
    _OTHERS.clear()
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check_step))
    return calls


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """torch calls this before every step of any optimizer, so parameters are looked up once for each optimizer."""
    if torch.compiler.is_compiling() or optimizer in _OWN:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if _OTHERS.get(optimizer) == len(parameters):
        return
    for parameter in parameters:
        if (calls := _CALLS.get(parameter)) is not None:
            calls.check_other(optimizer, sys._getframe(1))
            return
    _OTHERS[optimizer] = len(parameters)


def creates_states_only(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all learning rates and all gradients are zero.

    ``torch.distributed.checkpoint`` takes such a step, without a forward pass, to make the optimizer create its states.
    """
    groups = optimizer.param_groups
    if not all("lr" in group and float(group["lr"]) == 0 for group in groups):
        return False
    gradients = [parameter.grad for group in groups for parameter in group["params"] if parameter.grad is not None]
    return bool(gradients) and not any(bool(gradient.any()) for gradient in gradients)


class _Registrations:
    """Counts the parameters and modules that any model of this process registers, to see when one has changed."""

    def __init__(self) -> None:
        self.count = 0
        self._handles: list[Any] = []

    def watch(self) -> None:
        """Start to count, at the first call."""
        if not self._handles:
            exclude_from_compilation(_Registrations, "_add")  # compiled code of other models runs it, too
            self._handles = [
                nn.modules.module.register_module_parameter_registration_hook(self._add),
                nn.modules.module.register_module_module_registration_hook(self._add),
            ]

    def _add(self, module: nn.Module, name: str, value: object) -> None:
        self.count += 1


_registrations = _Registrations()


class WeightGuard:
    """Checks that the models' weights are those of the flat buffer, and that its optimizer steps them."""

    def __init__(self, models: Sequence[nn.Module], flat: FlatParameters) -> None:
        self._models, self._flat = models, flat
        self._known = {id(parameter): parameter for model in models for parameter in model.parameters()}
        _registrations.watch()
        self._read_structure()
        self._segments: object = None
        self._gradients: list[int] = []
        self._sizes: list[int] = []
        self._buffer = 0
        self._first = (0, 0)  # the first segment that is not empty, and its offset in bytes
        self.num_passes = 0  # forward passes of this step that record gradients
        self._sample: Tensor | None = None

    # ---- before a forward pass ----

    def is_own_pass(self) -> bool:
        """Whether the forward pass that begins uses the weights of this learner, in a plain autograd graph.

        Raises:
            RuntimeError: parameters were added or replaced, or DistributedDataParallel wraps the model.
        """
        if torch._C._functorch.maybe_current_level() is not None:
            return False  # torch.func.grad or vmap
        if DistributedDataParallel._active_ddp_module is not None:
            self._check_ddp(DistributedDataParallel._active_ddp_module)
        present = list(map(id, map(dict.get, self._owners, self._names)))
        if self._registered != _registrations.count or self._ids != present:
            if _calls(stateless._functional_call.__code__):
                return False  # torch.func.functional_call has replaced the parameters for this pass
            self._check_structure()
            self._read_structure()
        return True

    def _check_ddp(self, active: nn.Module) -> None:
        if not set(self._models).isdisjoint(active.modules()):
            raise RuntimeError(
                "DistributedDataParallel wraps a model that distribute() trains, so gradients are averaged twice: call "
                "the model without it"
            )

    def _read_structure(self) -> None:
        modules = [module for module in self._modules() if not isinstance(module, torch.jit.ScriptModule)]
        self._places = [(module, name, value) for module in modules for name, value in module._parameters.items()]
        self._owners = [module._parameters for module, _, _ in self._places]
        self._names = [name for _, name, _ in self._places]
        self._ids = [id(value) for _, _, value in self._places]
        self._registered = _registrations.count

    def _modules(self) -> Iterator[nn.Module]:
        return (module for model in self._models for module in model.modules())

    def _check_structure(self) -> None:
        """Check parameters. Pruning and parametrizations may rename them, and layers may be removed."""
        advice = "do it before distribute(), or change weights in place, with copy_"
        modules = set(self._modules())
        present = set()
        for model in self._models:
            for name, module in model.named_modules():
                if wrapper := wrapper_of(module):
                    raise RuntimeError(f"module {name} was wrapped by {wrapper} after distribute(): {advice}")
            for name, parameter in model.named_parameters():
                present.add(id(parameter))
                if parameter.requires_grad and id(parameter) not in self._known:
                    raise RuntimeError(f"parameter {name} was added or replaced after distribute(): {advice}")
        trained = dict(zip(map(id, self._flat.parameters), self._flat.names * self._flat.num_rows, strict=True))
        for module, key, value in self._places:
            if id(value) in trained and id(value) not in present and module in modules and hasattr(module, key):
                raise RuntimeError(f"parameter {trained[id(value)]} was replaced after distribute(): {advice}")

    def count_pass(self, *, by_weights: bool) -> None:
        """Count a forward pass.

        Args:
            by_weights: whether the strategy averages weights in this step. Then a program that never calls ``step()``
                is refused, because its learners would not average.

        Raises:
            RuntimeError: the weights were changed between forward passes of a step, more than once.
        """
        self.num_passes += 1
        num = self.num_passes
        if not by_weights or num < 2:
            return
        if num == 2:
            self._sample = self._sampled()
        elif num > 3 and num & (num - 1):
            return  # compare seldom, because the host waits for the device
        elif self._sample is not None and not torch.equal(self._sample, self._sampled()):
            raise RuntimeError(
                "weights were changed between several forward passes without optimizer.step(), so learners would not "
                "average: change them by the optimizer that distribute() got, or run such passes under no_grad"
            )

    def _sampled(self) -> Tensor:
        """The bits of some weights of each learner."""
        weights_LP = self._flat.param_LP.detach()
        stride = weights_LP.shape[1] // _SAMPLE | 1  # odd, because each parameter begins at a multiple of 16
        return weights_LP[:, ::stride].contiguous().view(torch.uint8).clone()

    def begin_step(self) -> None:
        """Start to count the forward passes of the next step."""
        self.num_passes = 0
        self._sample = None

    # ---- before forward passes and steps ----

    def check_buffers(self) -> None:
        """Check that both flat buffers are where they were allocated."""
        flat = self._flat
        if self._segments is not flat.segments:  # allocated anew
            self._segments, self._buffer = flat.segments, flat.grad_LP.data_ptr()
            self._gradients = _pointers(flat.grad_views)
            self._sizes = [view.numel() for view in flat.param_views]
            index = next((index for index, size in enumerate(self._sizes) if size), 0)
            self._first = index, flat.segments[index].offset * flat.param_LP.element_size()
        index, offset = self._first
        if flat.param_LP.data_ptr() + offset != flat.param_pointers[index]:
            raise RuntimeError(_MOVED.format("parameters"))
        if flat.grad_LP.data_ptr() != self._buffer:
            raise RuntimeError(_MOVED.format("gradients"))

    def check_parameters(self) -> None:
        """Check that each parameter is still its view of the flat buffer."""
        flat = self._flat
        self.check_buffers()
        if _pointers(flat.grad_views) != self._gradients:  # the program has set parameter.grad.data
            flat.renew_grad_views()
        sizes = list(map(Tensor.numel, flat.parameters))
        if _pointers(flat.parameters) == [*flat.param_pointers] and sizes == self._sizes:
            return
        places = zip(flat.names * flat.num_rows, flat.parameters, flat.param_pointers, self._sizes, strict=True)
        for name, parameter, pointer, size in places:
            if parameter.data_ptr() == pointer and parameter.numel() == size:
                continue
            raise RuntimeError(
                f"parameter {name} has left the flat buffer (.to(), .data = or vector_to_parameters): "
                "change weights in place, with copy_"
            )


def _pointers(tensors: Iterable[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


_MOVED = (
    "the memory of the {} has moved (share_memory(), or a parameter or gradient was sent to another process), so other "
    "learners do not see it: send a clone, parameter.detach().clone()"
)


def _is_below(outer: FrameType, frame: FrameType | None) -> bool:
    while frame is not None and frame is not outer:
        frame = frame.f_back
    return frame is not None


def _calls(code: Any) -> bool:
    """Whether the function with this code object is among the callers of the present one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
