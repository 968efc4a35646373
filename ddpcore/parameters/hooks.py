"""Hooks of parameters: a program's, which may act on a gradient, and our own; of steps; methods without compilation."""

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

_hooks_of = attrgetter("_backward_hooks")
_own_handles = 0  # hooks that ddpcore registered


@contextmanager
def own_hooks() -> Iterator[None]:
    """Inside, ddpcore registers its own hooks."""
    global _own_handles
    before = RemovableHandle.next_id
    try:
        yield
    finally:
        _own_handles += RemovableHandle.next_id - before


def closure_of(args: Any, kwargs: Any) -> Callable[[], Any] | None:
    """The closure among the arguments that a hook of ``step()`` gets, of which the first is the optimizer."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def with_closure(args: Any, kwargs: Any, closure: Callable[[], Any]) -> tuple[Any, Any]:
    """These arguments with another closure."""
    return ((*args[:1], closure, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closure})


class HookWatch:
    """Knows whether a hook may act on a gradient of these parameters before it is in ``.grad``.

    Hooks of an accumulation node (``get_gradient_edge(parameter).node``) cannot be read. So it counts all hooks that
    are registered from now on, and assumes that a node has hooks if something already holds a reference to it.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._num = num_hooks()
        self._is_held = any(list(map(_has_node, parameters)))

    def may_act(self, parameters: Iterable[Tensor]) -> bool:
        """Whether a hook may act on the gradients of these."""
        return self._is_held or self._num != num_hooks() or any(map(_hooks_of, parameters))


def num_hooks() -> int:
    """How many hooks of any kind others than ddpcore have registered in this process."""
    return RemovableHandle.next_id - _own_handles


def _has_node(parameter: Tensor) -> bool:
    """Whether something holds the parameter's accumulation node. If not, torch makes one for each graph."""
    first: Any = get_gradient_edge(parameter).node.metadata
    first["ddpcore"] = True
    second: Any = get_gradient_edge(parameter).node.metadata
    return "ddpcore" in second


def node_hooks(parameter: Tensor, register: str) -> list[Callable[..., Any]]:
    """The hooks of a parameter's accumulation node; hooks of ``register_hook`` run after all others."""
    node: Any = get_gradient_edge(parameter).node
    with own_hooks():  # a handle gives all hooks of its kind
        handle = getattr(node, register)(lambda *_: None)
        hooks = dict(handle.hooks_dict_ref())
        handle.remove()
    return [hook for number, hook in hooks.items() if number != handle.id]


def is_traced() -> bool:
    """Whether torch.jit.trace, torch.export or fake tensors run the model to read it, so no step begins."""
    modes = torch._C._TorchDispatchModeKey
    is_read = any(torch._C._get_dispatch_mode(mode) is not None for mode in (modes.FAKE, modes.PROXY))
    return is_read or torch.jit.is_tracing() or torch.compiler.is_exporting()


def is_compiled_autograd() -> bool:
    """Whether compiled autograd runs the backward pass, or will run it."""
    compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled is not None and bool(compiled.compiled_autograd_enabled or compiled.in_compiled_autograd_region)


def refuse_compiled_autograd() -> None:
    """Raise RuntimeError if the backward pass is compiled. It runs hooks at other times than autograd does."""
    if is_compiled_autograd():
        advice = "set torch._dynamo.config.compiled_autograd = False; torch.compile of the model works"
        raise RuntimeError(f"compiled autograd runs the backward pass, and ddpcore's hooks need autograd: {advice}")


def weakly(method: Any) -> Callable[[Tensor], None]:
    """The method with a weak reference to its object. Python cannot collect a cycle through a parameter's hooks."""
    reference, function = weakref.ref(method.__self__), method.__func__

    def hook(parameter: Tensor) -> None:
        if (owner := reference()) is not None:
            function(owner, parameter)

    return cast(Callable[[Tensor], None], torch._dynamo.decorators.skip(hook))


@functools.cache
def exclude_from_compilation(
    kind: type[Any] | ModuleType, *names: str, recursive: bool = True, reason: str | None = None
) -> None:
    """Exclude methods of a class or functions of a module from compilation, when it is first used.

    A decorator would import torch's compiler with the class, which takes as long as importing torch. If not
    ``recursive``, functions that they call may be compiled, and a call costs no time.
    """
    exclude = functools.partial(torch.compiler.disable, reason=reason) if recursive else torch._dynamo.decorators.skip
    for name in names:
        setattr(kind, name, exclude(getattr(kind, name)))
