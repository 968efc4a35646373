"""Defines the operators of ``torch.ops.ddpcore`` and their dtypes, and loads their compiled kernels.

Every operator has a pure-torch reference implementation (``reference.py``). It runs on devices without a compiled
kernel, and on all devices if the compiled library cannot be loaded.
"""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LIBRARY_FILE = Path(__file__).resolve().parent.parent / "_ops.abi3.so"
"""The compiled library. It has this name under every version of Python."""

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights and gradients. The kernels compute in float32 for all of them."""

_LIBRARY = torch.library.Library("ddpcore", "DEF")


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether the dtype has 16 bits, too few for long sums and for small changes of a weight."""
    return dtype in (torch.bfloat16, torch.float16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums and copies of such values: float32 for dtypes of 16 bits, else the dtype itself."""
    return torch.float32 if is_narrow(dtype) else dtype


def define(schema: str, reference: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define an operator by its schema in torch's notation, without the namespace, and return it.

    ``reference`` runs where there is no compiled kernel. ``fake`` returns empty tensors with the shapes of the results,
    for ``torch.compile``. The arguments have the order of csrc/bindings/operators.h.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    operator = getattr(torch.ops.ddpcore, name).default
    names = [argument.name for argument in operator._schema.arguments]

    @torch.no_grad()  # the kernels record no gradient either
    def run_reference(*args: Any, **keywords: Any) -> Any:
        return reference(**dict(zip(names, args, strict=False)), **keywords)

    _LIBRARY.impl(name, run_reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ddpcore::{name}", fake, lib=_LIBRARY)
    return operator


def no_result(*args: Any, **kwargs: Any) -> None:
    """The ``fake`` of an operator that returns nothing."""


def refuse_saved_copies(what: str) -> None:
    """Raise RuntimeError inside a mode of torch that copies saved tensors before a write: it does not see ours."""
    if torch.autograd.graph._allow_mutation_on_saved_tensors_enabled:
        where = "inside torch's allow_mutation_on_saved_tensors(), which misses writes of ddpcore"
        raise RuntimeError(f"{what} {where}: leave it out, and call backward() on each graph before the next step()")


def note_writes(operator: str, tensors: Sequence[Tensor]) -> None:
    """Before a call that writes into tensors, in grad mode: autograd notices it, as of operations of torch.

    RuntimeError: a tensor is the result of a graph, in which the operator would have no derivative.
    """
    refuse_saved_copies(operator)
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        if any(one.requires_grad and not one.is_leaf for one in tensors):
            raise RuntimeError(f"{operator} overwrites a result of a graph and has no derivative: use torch.no_grad()")
        torch.autograd.graph.increment_version(tensors)


def without_derivative(operator: str, result: Tensor) -> Tensor:
    """The result of a call. If its inputs need a gradient, a backward pass through it is a RuntimeError."""
    if result.requires_grad and not torch.compiler.is_compiling():
        message = f"{operator} has no derivative: pass detached tensors, or compute it with operations of torch"
        result = torch._C._functions.DelayedError(message.encode(), 1)(result.detach().requires_grad_())
    return result


def load() -> str | None:
    """Register the compiled kernels of this package. Returns the reason if that fails, else None."""
    if not LIBRARY_FILE.exists():
        folder = LIBRARY_FILE.parent
        return f"ddpcore's operator library is not built in {folder}: run 'pip install -e .' or 'make build'"
    try:
        torch.ops.load_library(str(LIBRARY_FILE))
    except OSError as error:
        return f"torch {torch.__version__} cannot load {LIBRARY_FILE}: {error}; rebuild it or take another wheel"
    return None


WHY_NOT_COMPILED = load()
"""None if the compiled kernels are loaded, else one line with the reason."""
if WHY_NOT_COMPILED is not None:
    _UNTIL = "Until then operators and optimizers run on plain torch operations, several times slower"
    warnings.warn(f"{WHY_NOT_COMPILED}. {_UNTIL}", RuntimeWarning, stacklevel=2)
