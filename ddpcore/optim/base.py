"""What all fused optimizers share: from parameter groups to as few kernel calls as there are dtypes and devices.

A step makes *batches*: parameters whose tensors can go into one call. A call may hold many parameter groups, as long as
they differ in learning rate, weight decay and adaptation alone. Batches are kept from step to step.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import is_, itemgetter
from typing import Any, ClassVar

import torch
import torch.optim.optimizer as optimizer_module
from torch import Tensor
from torch.autograd import profiler

from ddpcore import ops
from ddpcore.flat import FlatParameters
from ddpcore.ops import reference

Group = dict[str, Any]
State = dict[str, Any]

_NO_STATE: State = {}
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Batch:
    """Parameters of one kernel call, and what the call needs beside them."""

    members: list[int]  # positions among the parameters of the step
    groups: list[int]  # of the optimizer, one for each group of the call
    sizes: list[int]  # parameters in each
    steps: list[Tensor]  # steps taken, one for each
    device: torch.device
    dtype: torch.dtype
    masters: bool
    whole: bool = False  # the batch holds all parameters of the step
    scratch: Tensor | None = None
    trust: Tensor | None = None
    norm: Tensor | None = None  # scratch of the norm of all gradients

    @property
    def kernels(self) -> Any:
        """Where the operators are: compiled, or their twins for dtypes that no kernel takes."""
        return ops if self.dtype in KERNEL_DTYPES else reference


@dataclass
class _Plan:
    params: list[Tensor]
    sizes: list[int]  # parameters with gradients in each group
    shared: list[Any]
    state: dict[Any, State]
    num_states: int = -1
    batches: list[Batch] = field(default_factory=list)


class FusedOptimizer(torch.optim.Optimizer):
    """Base of the fused optimizers: everything but the rule.

    - float32, bfloat16, float16 parameters on CPU and CUDA run in the kernels; other dtypes and devices in plain torch.
    - ``torch.amp.GradScaler`` works without a host synchronisation: gradients are unscaled, and steps skipped, in the
      kernels.
    - The learning rate may be a tensor, which schedulers and captured CUDA graphs then read and write on the device.
    - State: ``step``, one tensor for all parameters of a group that began together, on their device.
    """

    _step_supports_amp_scaling = True

    shared_options: ClassVar[tuple[str, ...]] = ()  # what all groups of one call must agree on
    float_states: ClassVar[tuple[str, ...]] = ("master",)  # fp32 whatever the parameter is

    def __init__(self, params: Iterable[Any], defaults: Group) -> None:
        self._plan: _Plan | None = None
        self._flat: FlatParameters | None = None
        params = list(params)
        if not params:
            raise ValueError("params is empty: pass the model's parameters")
        self._shared = itemgetter(*self.shared_options)
        super().__init__(params, defaults)

    # ---- what a rule says ----

    @abstractmethod
    def check_group(self, group: Group) -> None:
        """Raise ValueError, naming the option and its value, where an option of the group is wrong."""

    @abstractmethod
    def state_names(self, group: Group) -> tuple[str, ...]:
        """Names of the buffers that each parameter of the group has."""

    @abstractmethod
    def run(
        self,
        batch: Batch,
        groups: list[Group],
        params: list[Tensor],
        grads: list[Tensor],
        states: list[State],
        common: dict[str, Any],
    ) -> None:
        """One kernel call, for these groups. ``common`` holds the arguments that all kernels take."""

    # ---- torch.optim.Optimizer ----

    def add_param_group(self, param_group: Group) -> None:
        """As in torch; options are checked."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self.check_group(group)
            if group["max_grad_norm"] != self.param_groups[0]["max_grad_norm"]:
                raise ValueError(
                    f"max_grad_norm is {group['max_grad_norm']} in one group and "
                    f"{self.param_groups[0]['max_grad_norm']} in another: the norm is that of all gradients together"
                )
        except ValueError:
            self.param_groups.pop()
            raise
        self._plan = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plan = None
        if not hasattr(self, "_shared"):  # a copy, with parameters of its own
            self._shared = itemgetter(*self.shared_options)
            self._flat = None
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch. States of ``torch.optim.SGD`` and ``Adam`` with the same buffers load too.

        Raises:
            ValueError: groups or shapes do not fit, or an option is wrong; nothing is changed then.
        """
        params = [p for group in self.param_groups for p in group["params"]]
        ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        saved = dict(zip(ids, params, strict=True)) if len(ids) == len(params) else {}
        for index, param in saved.items():
            for name, value in state_dict["state"].get(index, {}).items():
                if name != "step" and isinstance(value, Tensor) and value.shape != param.shape:
                    raise ValueError(
                        f"state_dict: {name} of parameter {index} has shape {tuple(value.shape)}, "
                        f"the parameter has {tuple(param.shape)}"
                    )
        for group in state_dict["param_groups"]:
            self.check_group({**self.defaults, **group})
        super().load_state_dict(state_dict)
        steps: dict[Any, Tensor] = {}  # parameters that are equally far share one tensor again
        owner = {id(p): index for index, group in enumerate(self.param_groups) for p in group["params"]}
        for index, param in saved.items():
            given, state = state_dict["state"].get(index, {}), self.state.get(param, {})
            for name in self.float_states:
                if isinstance(given.get(name), Tensor):  # torch has cast it to the dtype of the parameter
                    state[name] = given[name].to(device=param.device, dtype=torch.float32, copy=True)
            if "step" in given:
                key = (owner[id(param)], param.device, float(given["step"]))
                if key not in steps:
                    steps[key] = torch.tensor([key[2]], dtype=torch.float32, device=param.device)
                state["step"] = steps[key]

    def bind(self, flat: FlatParameters) -> None:
        """Say that the parameters are views of flat buffers; with a stack of learners, each row is stepped apart."""
        self._flat, self._plan = flat, None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what ``closure`` returns, if one is given."""
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or optimizer_module._global_optimizer_pre_hooks
            or optimizer_module._global_optimizer_post_hooks
            or profiler._is_profiler_enabled
        ):
            return self._hooked_step(closure)
        return self._step(closure)

    # torch wraps every step in a call of all hooks and a profiler region; where there are none, this costs a small
    # model more than its arithmetic. `hooked` says that this step looks after them itself.
    step.hooked = True  # type: ignore[attr-defined]

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_mode = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # as torch.no_grad() does, in a tenth of its time
        try:
            self.step_groups()
        finally:
            torch._C._set_grad_enabled(grad_mode)
        return loss

    _hooked_step = torch.optim.Optimizer.profile_hook_step(_step)

    def named_parameters(self) -> Iterator[tuple[tuple[str | int, Tensor], Group]]:
        """Every parameter with its group, and its name where the optimizer got named ones, else its index."""
        index = 0
        for group in self.param_groups:
            names = group.get("param_names")
            for position, param in enumerate(group["params"]):
                yield (index if names is None else names[position], param), group
                index += 1

    # ---- a step ----

    def step_groups(self) -> None:
        """Step all groups."""
        self.step_lists(self.param_groups)

    def step_lists(self, groups: Sequence[Group]) -> None:
        """Step every parameter of the groups that has a gradient."""
        params: list[Tensor] = []
        grads: list[Tensor] = []
        sizes: list[int] = []
        for group in groups:
            before = len(params)
            for param in group["params"]:
                grad = param.grad
                if grad is not None:
                    params.append(param)
                    grads.append(grad)
            sizes.append(len(params) - before)
        if not params:
            return
        plan = self._plan_of(groups, params, sizes, grads)
        state = self.state
        states = [state.get(param, _NO_STATE) for param in params] if state else [_NO_STATE] * len(params)
        scaling = self._scaling(plan, grads)
        for batch in plan.batches:
            options = [groups[index] for index in batch.groups]
            common = _common(options, batch, scaling)
            if batch.whole:
                self.run(batch, options, params, grads, states, common)
                continue
            members = batch.members
            mine = [params[i] for i in members], [grads[i] for i in members], [states[i] for i in members]
            self.run(batch, options, *mine, common)
        if not torch.compiler.is_compiling():  # autograd must know, to refuse a graph that needs the old weights
            torch.autograd.graph.increment_version(params)

    def _plan_of(self, groups: Sequence[Group], params: list[Tensor], sizes: list[int], grads: list[Tensor]) -> _Plan:
        shared = [(self._shared(group), isinstance(group["lr"], Tensor)) for group in groups]
        plan = self._plan
        if (
            plan is None
            or plan.sizes != sizes
            or plan.shared != shared
            or plan.state is not self.state
            or plan.num_states != len(self.state)
            or not all(map(is_, plan.params, params))
        ):
            if any(grad.layout != torch.strided for grad in grads):
                raise RuntimeError(
                    f"{type(self).__name__} takes dense gradients only: use nn.Embedding(sparse=False), "
                    "or another optimizer for this parameter"
                )
            plan = _Plan(params, sizes, shared, self.state)
            plan.batches = self._batches(groups, params, sizes, shared)
            plan.num_states = len(self.state)
            self._plan = plan
        return plan

    def _batches(
        self, groups: Sequence[Group], params: list[Tensor], sizes: list[int], shared: list[Any]
    ) -> list[Batch]:
        keyed: dict[Any, list[tuple[int, int, Tensor]]] = {}
        position = 0
        for index, size in enumerate(sizes):
            fresh: dict[torch.device, Tensor] = {}
            for param in params[position : position + size]:
                self._begin(groups[index], param, fresh)
                state = self.state.get(param, _NO_STATE)
                key = (param.dtype, param.device, "master" in state, shared[index])
                keyed.setdefault(key, []).append((position, index, state.get("step")))
                position += 1
        batches = []
        for (dtype, device, masters, _), entries in keyed.items():
            batch = Batch([], [], [], [], device, dtype, masters)
            for member, index, step in sorted(entries, key=lambda entry: (entry[1], id(entry[2]), entry[0])):
                if not batch.groups or batch.groups[-1] != index or (step is not None and batch.steps[-1] is not step):
                    batch.groups.append(index)
                    batch.sizes.append(0)
                    if step is not None:
                        batch.steps.append(step)
                batch.members.append(member)
                batch.sizes[-1] += 1
            batch.whole = batch.members == list(range(len(params)))
            segments = self.rows([params[i] for i in batch.members])
            batch.sizes = [size * len(segments) // len(batch.members) for size in batch.sizes]
            batch.scratch, batch.trust = ops.new_scratch(segments), ops.new_trust(segments)
            if groups[batch.groups[0]]["max_grad_norm"] is not None:
                batch.norm = torch.zeros(1 + ops.num_blocks(segments), dtype=torch.float64, device=device)
            batches.append(batch)
        return batches

    def rows(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors that the kernels see: of stacks of learners, each learner's."""
        if self._flat is None or self._flat.stack is None:
            return tensors
        return [row for stack in tensors for row in stack.unbind(0)]

    def _begin(self, group: Group, param: Tensor, fresh: dict[torch.device, Tensor]) -> None:
        """Make the state of a parameter that has none; those that begin together share a step."""
        names = self.state_names(group)
        if not names and not group["master_weights"]:
            return
        state = self.state[param]
        if group["master_weights"] and param.dtype in (torch.bfloat16, torch.float16) and "master" not in state:
            state["master"] = param.detach().to(torch.float32, copy=True)
        if not names:
            return
        missing = [name for name in names if state.get(name) is None]
        for name in missing:
            wide = name in self.float_states or "master" in state
            state[name] = torch.zeros_like(param, dtype=torch.float32 if wide and param.dtype.itemsize == 2 else None)
        if missing:
            if param.device not in fresh:
                fresh[param.device] = torch.zeros(1, dtype=torch.float32, device=param.device)
            state["step"] = fresh[param.device]
        elif "step" not in state:  # of torch.optim.SGD, which does not count
            state["step"] = torch.ones(1, dtype=torch.float32, device=param.device)

    # ---- gradients: their scale and their norm ----

    def _scaling(self, plan: _Plan, grads: list[Tensor]) -> tuple[Tensor | None, Tensor | None, Tensor | None, float]:
        """grad_scale, found_inf, squared norm and largest norm, as the operators take them."""
        max_norm = self.param_groups[0]["max_grad_norm"]
        return (
            getattr(self, "grad_scale", None),
            getattr(self, "found_inf", None),
            None if max_norm is None else self._norm_squared(plan, grads),
            0.0 if max_norm is None else max_norm,
        )

    def _norm_squared(self, plan: _Plan, grads: list[Tensor]) -> Tensor:
        total = None
        for batch in plan.batches:
            assert batch.norm is not None
            batch.kernels.total_norm_(self.rows([grads[i] for i in batch.members]), batch.norm)
            part = batch.norm[:1]
            total = part if total is None else total + part.to(total.device)
        assert total is not None
        return total


def _common(options: Sequence[Group], batch: Batch, scaling: tuple[Any, Any, Any, float]) -> dict[str, Any]:
    """The arguments that the steps of all optimizers take."""
    device = batch.device
    lr = [group["lr"] for group in options]
    device_lr: list[Tensor] = []
    if isinstance(lr[0], Tensor):
        if all(tensor.device == device for tensor in lr):
            device_lr, lr = [tensor.to(torch.float32) for tensor in lr], [0.0] * len(lr)
        else:
            lr = [float(tensor) for tensor in lr]
    grad_scale, found_inf, norm_squared, max_norm = scaling
    return {
        "lr": lr,
        "device_lr": device_lr,
        "weight_decay": [group["weight_decay"] for group in options],
        "group_sizes": batch.sizes,
        "maximize": options[0]["maximize"],
        "grad_scale": _on(grad_scale, device),
        "found_inf": _on(found_inf, device),
        "norm_squared": _on(norm_squared, device),
        "max_norm": max_norm,
    }


def _on(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return tensor if tensor is None or tensor.device == device else tensor.to(device, non_blocking=True)


# ---- checks of options ----


def check_number(name: str, value: Any, low: float = 0.0, below: float = math.inf) -> None:
    """Raise ValueError unless ``low <= value < below``."""
    if not low <= value < below:
        range_ = f"of at least {low:g}" if below == math.inf else f"in [{low:g}, {below:g})"
        raise ValueError(f"{name} is {value}: it must be a number {range_}")


def check_lr(lr: float | Tensor) -> None:
    """A learning rate may be a tensor, which is not read here: that would wait for the device."""
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr is a tensor of {lr.numel()} elements: it must have one")
        if lr.device.type != "cpu":
            return
    check_number("lr", float(lr))


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: it must be one of {', '.join(choices)}")


def check_common(group: Group) -> None:
    """The options that all fused optimizers have."""
    check_lr(group["lr"])
    check_number("weight_decay", group["weight_decay"])
    if group["max_grad_norm"] is not None and not (0 < group["max_grad_norm"] < math.inf):
        raise ValueError(f"max_grad_norm is {group['max_grad_norm']}: it must be a number above 0, or None")


def check_momentum(group: Group) -> None:
    """The options of momentum SGD."""
    check_number("momentum", group["momentum"])
    if not math.isfinite(group["dampening"]):
        raise ValueError(f"dampening is {group['dampening']}: it must be a number")
    if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
        raise ValueError(
            f"nesterov is True with momentum {group['momentum']} and dampening {group['dampening']}: "
            "it needs momentum > 0 and dampening 0"
        )


def check_accepted(differentiable: bool) -> None:
    """``foreach``, ``fused`` and ``capturable`` are taken as torch takes them and change nothing: this is one path."""
    if differentiable:
        raise ValueError("differentiable is True: the fused step has no gradient; use torch.optim for that")
