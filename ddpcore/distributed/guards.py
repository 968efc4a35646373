"""Checks before ``distribute`` changes anything: models and optimizers that it cannot train are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from ddpcore.parameters.shards import Shards, is_dtensor, local
from ddpcore.strategies.base import Strategy

_WRAPPERS = {
    "DDP",  # the class that torch's replicate() adds to a module
    "DeepSpeedEngine",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "ShardedDataParallel",
}


def check_model(model: nn.Module) -> None:
    """Refuse a model whose weights or buffers cannot be moved, or that something else averages or shards.

    Raises:
        ValueError: the model is a wrapper or a torch.jit model, or a tensor of it cannot be used. Nothing was changed.
    """
    for name, module in model.named_modules():
        if wrapper := wrapper_of(module):
            raise ValueError(
                f"{f'module {name}' if name else 'the model'} is wrapped by {wrapper}, which averages or shards too: "
                "pass the model without it to distribute(), or one of fully_shard() with mesh=; a trainer that wraps "
                "models has a way in ddpcore.integrations"
            )
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError("a torch.jit model cannot call a strategy: pass the eager model, or one of torch.compile")
    for name, parameter in model.named_parameters():
        _check_tensor("parameter", name, parameter)
    for name, buffer in model.named_buffers():
        _check_tensor("buffer", name, buffer)
        if buffer.layout != torch.strided or buffer.is_quantized or buffer.is_nested:
            raise ValueError(f"buffer {name} is {_kind(buffer)} and cannot be sent: make it a dense tensor")
    _check_aliases(model)


def wrapper_of(module: nn.Module) -> str | None:
    """The name of the class that averages or shards the module; None if there is none."""
    return next((cls.__name__ for cls in type(module).__mro__ if cls.__name__ in _WRAPPERS), None)


def check_optimizer(optimizer: object, learners: int | None) -> None:
    """Refuse an optimizer whose ``step()`` calls no hooks, or that sends weights itself.

    Raises:
        ValueError: it is such an optimizer. Nothing was changed.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer is a {name}: pass a torch.optim.Optimizer")
    if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
        raise ValueError(f"{name} shards the optimizer and sends weights itself: pass its optimizer class instead")
    if isinstance(optimizer, torch.optim.LBFGS) and (learners or 1) > 1:
        raise ValueError(f"{name} combines the parameters of all virtual learners: run real ranks")
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):  # its __init__ did not call that of Optimizer
        raise ValueError(f"{name} wraps another optimizer and has no step hooks: pass the optimizer that it wraps")


def _check_tensor(what: str, name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise ValueError(f"{what} {name} has no shape yet (lazy module): run one forward pass before distribute()")
    if tensor.is_meta:
        raise ValueError(f"{what} {name} is on the meta device: materialise the model first (model.to_empty)")


def _kind(tensor: Tensor) -> str:
    if tensor.is_quantized:
        return "quantized"
    return "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.").replace("_", " ")


def _check_aliases(model: nn.Module) -> None:
    """Refuse tensors of the model that share memory with a trained parameter: they would keep the old weights."""
    parameters = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    storages = {p.untyped_storage().data_ptr() for p in model.parameters() if p.requires_grad and _is_dense(p)} - {0}
    for prefix, module in model.named_modules():
        for name, value in {**vars(module), **module._parameters, **module._buffers}.items():
            if name in ("_parameters", "_buffers", "_modules") or f"{name}_orig" in module._parameters:
                continue  # <name>_orig: torch's old spectral_norm computes the attribute in each forward pass
            for leaf in tree_leaves(value):
                if not isinstance(leaf, Tensor) or id(leaf) in parameters or not _is_dense(leaf):
                    continue
                if leaf.untyped_storage().data_ptr() in storages:
                    raise ValueError(
                        f"{f'{prefix}.{name}' if prefix else name} shares memory with a trained parameter, and "
                        "distribute() moves parameters: make the view in forward(), or after distribute()"
                    )


def _is_dense(tensor: Tensor) -> bool:
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return tensor.layout == torch.strided and type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and not tensor.is_nested


@contextmanager
def undone_on_error(model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy) -> Iterator[None]:
    """If the block raises, give the trained parameters memory of their own again, and free optimizer and strategy.

    Weights keep their values. If a connection is lost in the middle, they may have learner 0's values.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    shards = Shards(model) if any(map(is_dtensor, trained)) else None
    before = [(local(parameter).data_ptr(), parameter.grad) for parameter in trained]
    groups = [
        {key: [*value] for key, value in group.items() if key in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    try:
        yield
    except BaseException:
        strategy._in_use = False
        for parameter, (pointer, gradient) in zip(trained, before, strict=True):
            if local(parameter).data_ptr() != pointer:
                parameter.grad = None
                if shards is None:
                    parameter.data = parameter.data.clone()
                else:
                    shards.leave(parameter)
                parameter.grad = gradient
        for group, members in zip(optimizer.param_groups, groups, strict=True):
            group.update(members)
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for added in [key for key in optimizer.state if id(key) not in own]:
            del optimizer.state[added]
        raise
