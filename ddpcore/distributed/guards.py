"""What ``distribute`` cannot train is refused by name, and so are later steps of other optimizers. Hooks of states."""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from ddpcore.comm.connect import Connection
from ddpcore.comm.groups import Fact
from ddpcore.parameters.hooks import exclude_from_compilation
from ddpcore.parameters.shards import Shards, fsdp_parameters, is_dtensor, local, mesh_of, placements_of
from ddpcore.strategies.base import Strategy
from ddpcore.strategies.compression import Codec

_WRAPPERS = {"DDP", "DeepSpeedEngine", "DistributedDataParallel", "FullyShardedDataParallel", "ShardedDataParallel"}
_WATCHES = WeakTensorKeyDictionary()  # a reference to the watch of each parameter that distribute() has moved
_OWN: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # the optimizers that distribute() got
_OTHERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()  # number of parameters
_hooks: list[Any] = []  # on all optimizers and modules of the process, from the first watch on
_registered = [0]  # parameters and modules that any model has registered since then


def check_model(model: nn.Module) -> None:
    """Raise ValueError if weights or buffers of a model cannot be moved, or something else averages or shards it."""
    for name, module in model.named_modules():
        if wrapper := wrapper_of(module):
            what = f"{f'module {name}' if name else 'the model'} is wrapped by {wrapper}, which averages or shards too"
            advice = "pass the model without it to distribute(), or one of fully_shard()"
            raise ValueError(f"{what}: {advice}; a trainer that wraps models has a way in ddpcore.integrations")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError("a torch.jit model cannot call a strategy: pass the eager model, or one of torch.compile")
    for name, parameter in model.named_parameters():
        _check_tensor("parameter", name, parameter)
    for name, buffer in model.named_buffers():
        _check_tensor("buffer", name, buffer)
        kind = "quantized" if buffer.is_quantized else "nested" if buffer.is_nested else str(buffer.layout)[6:]
        if kind != "strided":
            raise ValueError(f"buffer {name} is {kind.replace('_', ' ')} and cannot be sent: make it a dense tensor")
    _check_aliases(model)


def outside_modes(function: Callable[..., Any]) -> Any:
    """Run a function without gradients, and outside of ``torch.inference_mode()``: later steps change its tensors."""
    return torch.inference_mode(False)(torch.no_grad()(function))


def wrapper_of(module: nn.Module) -> str | None:
    """The name of the class that averages or shards a module (``replicate()`` adds DDP); None if there is none."""
    return next((cls.__name__ for cls in type(module).__mro__ if cls.__name__ in _WRAPPERS), None)


def check_optimizer(optimizer: object, learners: int | None) -> None:
    """Raise ValueError for an optimizer whose ``step()`` calls no hooks, or that sends weights itself."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer is a {name}: pass a torch.optim.Optimizer")
    if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
        raise ValueError(f"{name} shards the optimizer and sends weights itself: pass its optimizer class instead")
    if isinstance(optimizer, torch.optim.LBFGS) and (learners or 1) > 1:
        raise ValueError(f"{name} combines the parameters of all virtual learners: run real ranks")
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):  # its __init__ did not call Optimizer.__init__
        raise ValueError(f"{name} wraps another optimizer and has no step hooks: pass the optimizer that it wraps")


def creates_states_only(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step without a forward pass has only learning rates and gradients of zero.

    ``torch.distributed.checkpoint`` takes such a step to make the optimizer create its states.
    """
    groups = optimizer.param_groups
    if not all("lr" in group and float(group["lr"]) == 0 for group in groups):
        return False
    gradients = [parameter.grad for group in groups for parameter in group["params"] if parameter.grad is not None]
    return bool(gradients) and not any(bool(gradient.any()) for gradient in gradients)


def check_state_caller(models: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """Raise RuntimeError in torch's ``get_state_dict`` for the model of one virtual learner, which names no others."""
    for frame in callers(sys._getframe()):
        if frame.f_code.co_name == "_get_optim_state_dict" and frame.f_locals.get("model") in models:
            advice = "pass handle.model to get_state_dict and set_state_dict, or save RunState(handle)"
            raise RuntimeError(f"the optimizer has the states of {len(models)} learners: {advice}")


def check_state_sizes(num_learners: int, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Refuse the state of one model's optimizer for that of virtual learners, before torch says that groups differ."""
    saved, own = ([len(group["params"]) for group in of] for of in (state["param_groups"], optimizer.param_groups))
    if any(few < all_ for few, all_ in zip(saved, own, strict=False)):
        what = f"the state has {sum(saved)} parameters, and the optimizer those of {num_learners} learners, {sum(own)}"
        raise ValueError(f"{what}: load the state of one model before distribute(), or go on with that of a RunState")


class Hook:
    """A hook of a model in training. Copies of a model have one that does nothing."""

    is_ours = True

    def __init__(self, handle: Any = None) -> None:
        self._handle: Callable[[], Any] = (lambda: None) if handle is None else weakref.ref(handle)

    @property
    def __name__(self) -> str:  # torch.jit.script asks for the name of a hook
        raise AttributeError("torch.jit.script cannot compile a model in training: take the handle's evaluation_model")

    def __reduce__(self) -> "tuple[type[Hook], tuple[()]]":
        return Hook, ()

    def __call__(self, module: nn.Module, *values: Any) -> None:
        """What the hook does."""


class StateHook(Hook):
    """Takes back temporary changes of weights before a state of a model, or of a part of it, is saved or loaded.

    After a load it counts the parameters that the state had, also of parts that came later (parametrizations).
    RuntimeError: a forward pass meets the change, or a load would replace parameters, so that no step reaches them.
    """

    _prefix = ""  # of the part in the state that it loads

    def register(self, module: nn.Module) -> None:
        """Set the hook of a module."""
        nn.Module.register_state_dict_pre_hook(module, self)  # torch.jit layers have no such methods of their own
        nn.Module.register_load_state_dict_post_hook(module, self)
        if not isinstance(module, torch.jit.ScriptModule):
            module.register_load_state_dict_pre_hook(self)

    @torch.no_grad()
    @override
    def __call__(self, module: nn.Module, *values: Any) -> None:
        if (handle := self._handle()) is None:
            return
        learner, weight = handle.learner, handle.learner.flat.parameters[0]
        before = weight._version
        handle.strategy.restore_weights(learner)
        for frame in callers(sys._getframe(1)) if weight._version != before else ():
            if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals["self"] in learner.models:
                why = f"{handle.strategy.name} has changed the weights: do so after the step"
                raise RuntimeError(f"the model saves or loads a state in its forward pass, where {why}")
        if len(values) == 1:  # after a load: the names that the state lacked
            own, lacking = module.named_parameters(remove_duplicate=False), values[0].missing_keys
            learner.loaded.update(id(one) for name, one in own if self._prefix + name not in lacking)
            handle._watch.sample = None  # which is no step by hand
        elif len(values) > 2:  # before it
            self._prefix = values[1]
            is_trained = any(one is not None and one.requires_grad for one in module._parameters.values())
            swaps = torch.__future__.get_swap_module_params_on_conversion()
            if is_trained and (swaps or values[2].get("assign_to_params_buffers")):
                what = "set_swap_module_params_on_conversion(True)" if swaps else "load_state_dict(assign=True)"
                raise RuntimeError(f"{what} would replace parameters in training: leave it out")


def _check_tensor(what: str, name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise ValueError(f"{what} {name} has no shape yet (lazy module): run one forward pass before distribute()")
    if tensor.is_meta:
        raise ValueError(f"{what} {name} is on the meta device: materialise the model first (model.to_empty)")


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
                    what = f"{f'{prefix}.{name}' if prefix else name} shares memory with a trained parameter"
                    advice = "make the view in forward(), or after distribute()"
                    raise ValueError(f"{what}, and distribute() moves parameters: {advice}")


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


# ---- learners larger than a rank: each is a group of ranks that hold shards of one model ----


def group_of(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """The group of a mesh. ValueError: the mesh has several dimensions."""
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        raise ValueError(f"the mesh has dimensions {group.mesh_dim_names}: pass that of the learners, mesh['learners']")
    return group.get_group()


def layouts_of(model: nn.Module) -> list[Fact]:
    """The layouts of the DTensors of a model, which must be alike on all ranks."""
    return [
        (f"layout of parameter {name}", f"{placements_of(one)} over {tuple(mesh_of(one).shape)} ranks")
        for name, one in model.named_parameters()
        if is_dtensor(one)
    ]


def shards_of(model: nn.Module, group: dist.ProcessGroup | None, learners: int | None) -> Shards | None:
    """This rank's part of a model whose parameters are DTensors; None for a model that is whole.

    ``group`` are the learners: ranks that hold the same shards of different learners. ValueError: a parameter cannot
    be averaged over these learners, or they are virtual.
    """
    named = list(model.named_parameters())
    if (sharded := next((name for name, parameter in named if is_dtensor(parameter)), None)) is None:
        return None
    if group is None or learners is not None:
        raise ValueError(f"parameter {sharded} is a DTensor, and virtual learners are whole: leave learners= out")
    for name, parameter in named:
        if not is_dtensor(parameter):
            is_fsdp = any(hasattr(module, "_get_fsdp_state") for module in model.modules())
            parallel = "lay it out, too, by SequenceParallel() or distribute_module(input_fn=, output_fn=)"
            advice = "call fully_shard on the whole model, without ignored_params" if is_fsdp else parallel
            raise ValueError(f"parameter {name} is whole and {sharded} a DTensor: {advice}")
        if any(placement.is_partial() for placement in placements_of(parameter)):
            raise ValueError(f"parameter {name} has partial sums: redistribute it to shards or replicas first")
    shards = Shards(model)
    ranks, own = set(shards.mesh.mesh.flatten().tolist()), dist.get_rank()
    for name, parameter in named:
        if not ranks.issuperset(mesh_of(parameter).mesh.flatten().tolist()):
            what = f"parameter {name} lies on other ranks than {named[0][0]}"
            raise ValueError(f"{what}: a learner is one mesh, whose ranks hold all parameters")
    if both := ranks.intersection(dist.get_process_group_ranks(group)) - {own}:
        what = f"parameter {named[0][0]} is sharded or replicated over rank {min(both)} of another learner"
        advice = "fully_shard(module, mesh=mesh['shard']), and pass group=mesh['learners'] here"
        raise ValueError(f"{what}: shard it over the other dimensions, {advice}")
    for name, module in model.named_modules():
        if hasattr(module, "_get_fsdp_state") and any(one.offload_to_cpu for one in fsdp_parameters(module)):
            what = f"{f'module {name}' if name else 'the model'} keeps its shards on the CPU (CPUOffloadPolicy)"
            raise ValueError(f"{what}, and learners average where they compute: leave offload_policy out")
    return shards


def check_shards(strategy: Strategy, connection: Connection, scaler: object, on_nonfinite: str) -> None:
    """Raise ValueError if an argument of ``distribute`` does not work with shards."""
    if strategy.traits.no_shards:
        raise ValueError(f"{strategy.name}: {strategy.traits.no_shards}")
    if connection.on_failure != "raise":
        why = "the learner of a dead rank cannot go on: leave on_failure out, and begin at the last checkpoint"
        raise ValueError(f"on_failure is {connection.on_failure!r}: a learner is several ranks, and {why}")
    if scaler is not None:
        raise ValueError("the scaler sees the shards of one rank alone: train shards in bfloat16, without scaler=")
    if on_nonfinite == "quarantine":
        raise ValueError("on_nonfinite is 'quarantine', which takes whole models: take 'skip'")


def check_codecs(strategy: Strategy, shards: Shards, parameters: Sequence[Tensor]) -> None:
    """ValueError: a codec, also of a strategy inside, would decode replicas of a parameter to different values."""
    for part in vars(strategy).values():
        if isinstance(part, Strategy):
            check_codecs(part, shards, parameters)
        elif isinstance(part, Codec) and not part.by_element and shards.has_unlike_rows(parameters):
            why = "encodes chunks of a rank's row, so the replicas of a parameter beside other shards would differ"
            raise ValueError(f"compression {part.name} {why}: take 'bf16', or none")


# ---- steps of other optimizers and changes of modules, in any code of the process ----


def is_distributed(parameters: Iterable[Tensor]) -> bool:
    """Whether a ``distribute`` call has moved one of the parameters to a flat buffer."""
    return any(parameter in _WATCHES for parameter in parameters)


def learner_of(parameters: Iterable[Tensor]) -> Any:
    """The learner that one of the parameters belongs to; None if a ``distribute`` call has moved none of them."""
    watch = next((_WATCHES[parameter]() for parameter in parameters if parameter in _WATCHES), None)
    return None if watch is None else watch.learner


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
    if torch.compiler.is_compiling() or (optimizer in _OWN and type(getattr(optimizer, "found_inf", None)) is not int):
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if optimizer in _OWN:
        learner = learner_of(parameters)
        if learner.watch._strategy.plan(learner.step).averages_gradients and learner.comm.transport != "virtual":
            for name in ("grad_scale", "found_inf"):  # torch leaves them after an error, and steps would take both
                vars(optimizer).pop(name, None)
            what = "the GradScaler found no gradient on this rank, so it misses the scale and overflows of the average"
            advice = "run a backward pass in each step, for an empty batch of scaler.scale(0 * model(x).sum())"
            raise RuntimeError(f"{what}: {advice}")
        return
    if _OTHERS.get(optimizer) == len(parameters):
        return
    reference = next((_WATCHES[parameter] for parameter in parameters if parameter in _WATCHES), None)
    if reference is None:
        _OTHERS[optimizer] = len(parameters)
        return
    watch = reference()
    own = None if watch is None else watch.learner.optimizer
    is_called = watch is not None and watch.has_called(sys._getframe(1))
    if is_called or (own is not None and any(one is own for one in vars(optimizer).values())):
        return
    what = f"a {type(optimizer).__name__} that distribute() did not get steps its parameters"
    given = "optimizer" if own is None else type(own).__name__
    raise RuntimeError(f"{what}, so learners would not average: step the {given} that it got, and change its options")
