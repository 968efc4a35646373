"""What any code of the process does that concerns a handle: steps of other optimizers, and changes of modules."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ddpcore.parameters.hooks import exclude_from_compilation

_WATCHES = WeakTensorKeyDictionary()  # a reference to the watch of each parameter that distribute() has moved
_OWN: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # the optimizers that distribute() got
_OTHERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()  # number of parameters
_hooks: list[Any] = []  # on all optimizers and modules of the process, from the first watch on
_registered = [0]  # parameters and modules that any model has registered since then


def is_distributed(parameters: Iterable[Tensor]) -> bool:
    """Whether a ``distribute`` call has moved one of the parameters to a flat buffer."""
    return any(parameter in _WATCHES for parameter in parameters)


def num_registered() -> int:
    """How many parameters and modules any model has registered since the first watch."""
    return _registered[0]


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame and those that have called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def register(watch: Any) -> None:
    """From now on refuse steps of other optimizers on the parameters of the learner of a ``LoopWatch``."""
    _WATCHES.update(dict.fromkeys(watch.learner.flat.parameters, weakref.ref(watch)))
    _OWN.add(watch.learner.optimizer)
    _OTHERS.clear()
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check_step))
        exclude_from_compilation(sys.modules[__name__], "_count")  # compiled code of other models runs it, too
        _hooks.append(nn.modules.module.register_module_parameter_registration_hook(_count))
        _hooks.append(nn.modules.module.register_module_module_registration_hook(_count))


def _count(module: nn.Module, name: str, value: object) -> None:
    _registered[0] += 1


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse a step of another optimizer on parameters of a handle, unless one of the two calls the other.

    torch calls this before every step of any optimizer, so parameters are looked up once for each optimizer.
    """
    if torch.compiler.is_compiling() or optimizer in _OWN:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if _OTHERS.get(optimizer) == len(parameters):
        return
    reference = next((_WATCHES[parameter] for parameter in parameters if parameter in _WATCHES), None)
    if reference is None:
        _OTHERS[optimizer] = len(parameters)
        return
    watch = reference()
    own = None if watch is None else watch.learner.optimizer
    if watch is not None and watch.has_called(sys._getframe(1)):
        return
    if own is not None and any(value is own for value in vars(optimizer).values()):
        return
    raise RuntimeError(
        f"a {type(optimizer).__name__} that distribute() did not get steps its parameters, so learners would not "
        f"average: step the {'optimizer' if own is None else type(own).__name__} that it got, and change its options"
    )
