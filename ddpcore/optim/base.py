"""What all fused optimizers share: from parameter groups to as few kernel calls as there are dtypes and devices.

A step makes *batches*: parameters whose tensors can go into one call. A call may hold many parameter groups, as long as
they differ in learning rate, weight decay and adaptation alone. Batches are kept from step to step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import is_
from typing import Any, ClassVar

import torch
import torch.optim.optimizer as optimizer_module
from torch import Tensor
from torch.autograd import profiler

from ddpcore import ops
from ddpcore.flat import FlatParameters
from ddpcore.optim.batch import Batch, Group, Plan, State, common_arguments, wide_dtype
from ddpcore.optim.checks import check_one_norm, check_state

_NO_STATE: State = {}


class FusedOptimizer(torch.optim.Optimizer):
    """Base of the fused optimizers: everything but the rule.

    - float32, bfloat16, float16 parameters on CPU and CUDA run in the kernels; other dtypes and devices in plain torch.
    - ``torch.amp.GradScaler`` works without a host synchronisation: gradients are unscaled, and steps skipped, in the
      kernels.
    - The learning rate may be a tensor, which schedulers and captured CUDA graphs then read and write on the device.
    - State: ``step``, one tensor for all parameters of a group that began together, on their device.
    """

    _step_supports_amp_scaling = True
    _learner: int | None = None  # of a stack, where they are stepped one by one

    shared_options: ClassVar[tuple[str, ...]] = ()  # what all groups of one call must agree on
    float_states: ClassVar[tuple[str, ...]] = ("master",)  # fp32 whatever the parameter is

    def __init__(self, params: Iterable[Any], defaults: Group) -> None:
        self._plan: Plan | None = None
        self._flat: FlatParameters | None = None
        params = params if isinstance(params, Tensor) else list(params)  # a tensor is torch's to refuse
        if not isinstance(params, Tensor) and not params:
            raise ValueError("params is empty: pass the model's parameters")
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
            check_one_norm([self.param_groups[0], group])
            for param in group["params"]:
                if param.is_complex():
                    raise ValueError(f"a parameter is {param.dtype}: pass torch.view_as_real of it, or real parameters")
        except ValueError:
            self.param_groups.pop()
            raise
        self._plan = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plan = None
        if not hasattr(self, "_flat"):  # a copy, with parameters of its own
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
            check_state(index, param, state_dict["state"].get(index, {}))
        groups = [{**self.defaults, **group} for group in state_dict["param_groups"]]
        for group in groups:
            self.check_group(group)
        check_one_norm(groups)
        super().load_state_dict(state_dict)
        steps: dict[Any, Tensor] = {}  # parameters that are equally far share one tensor again
        owner = {id(p): index for index, group in enumerate(self.param_groups) for p in group["params"]}
        for index, param in saved.items():
            given, state = state_dict["state"].get(index, {}), self.state.get(param, {})
            all_wide = "master" in given or self._has_master(groups[owner[id(param)]], param)
            for name, value in given.items():
                if name != "step" and isinstance(value, Tensor) and (all_wide or name in self.float_states):
                    # torch has cast it to the dtype of the parameter
                    state[name] = value.to(device=param.device, dtype=wide_dtype(param), copy=True)
            if param.dtype not in (torch.bfloat16, torch.float16):
                state.pop("master", None)  # of a model that was of 16 bits: it is its own master now
            if "step" in given:
                key = (owner[id(param)], param.device, float(given["step"]))
                if key not in steps:
                    steps[key] = torch.tensor([key[2]], dtype=torch.float32, device=param.device)
                state["step"] = steps[key]

    def state_dict(self) -> dict[str, Any]:
        """As in torch. Every parameter has a ``step`` of its own, as ``torch.optim.Adam`` expects to find it."""
        result = super().state_dict()
        states = {
            index: {**state, "step": state["step"].clone()} if "step" in state else state
            for index, state in result["state"].items()
        }
        return {**result, "state": states}

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
        stack = None if self._flat is None else self._flat.stack
        if stack is None or groups[0]["max_grad_norm"] is None:
            self._step_batches(plan.batches, groups, params, grads, states)
        else:  # each learner has a norm of its own
            for learner in range(stack):
                self._step_learner(learner, stack, plan.batches, groups, params, grads, states)
        if not torch.compiler.is_compiling():  # autograd must know, to refuse a graph that needs the old weights
            torch.autograd.graph.increment_version(params)

    def _step_batches(
        self,
        batches: list[Batch],
        groups: Sequence[Group],
        params: list[Tensor],
        grads: list[Tensor],
        states: list[State],
    ) -> None:
        scaling = self._scaling(batches, groups, grads)
        for batch in batches:
            options = [groups[index] for index in batch.groups]
            common = common_arguments(options, batch, scaling)
            if batch.whole:
                self.run(batch, options, params, grads, states, common)
                continue
            members = batch.members
            mine = [params[i] for i in members], [grads[i] for i in members], [states[i] for i in members]
            self.run(batch, options, *mine, common)

    def _step_learner(
        self,
        learner: int,
        num_learners: int,
        batches: list[Batch],
        groups: Sequence[Group],
        params: list[Tensor],
        grads: list[Tensor],
        states: list[State],
    ) -> None:
        """Step one learner's rows of all stacks."""
        mine = [batch.of_learner(learner, num_learners) for batch in batches]
        self._learner = learner
        try:
            self._step_batches(mine, groups, params, grads, states)
        finally:
            self._learner = None
        for batch, part in zip(batches, mine, strict=True):
            assert batch.trust is not None
            assert part.trust is not None
            batch.trust[learner::num_learners].copy_(part.trust)

    def _plan_of(self, groups: Sequence[Group], params: list[Tensor], sizes: list[int], grads: list[Tensor]) -> Plan:
        shared = [([group[name] for name in self.shared_options], isinstance(group["lr"], Tensor)) for group in groups]
        plan = self._plan
        state = self.state
        if (
            plan is None
            or plan.sizes != sizes
            or plan.shared != shared
            or not all(map(is_, plan.params, params))
            or plan.num_entries != (sum([len(state.get(param, _NO_STATE)) for param in params]) if state else 0)
            or any(params[batch.members[0]].dtype != batch.dtype for batch in plan.batches)
        ):
            if any(grad.layout != torch.strided for grad in grads):
                raise RuntimeError(
                    f"{type(self).__name__} takes dense gradients only: use nn.Embedding(sparse=False), "
                    "or another optimizer for this parameter"
                )
            plan = Plan(params, sizes, shared)
            plan.batches = self._batches(groups, params, sizes, shared)
            plan.num_entries = sum(len(state.get(param, _NO_STATE)) for param in params)
            self._plan = plan
        return plan

    def _batches(
        self, groups: Sequence[Group], params: list[Tensor], sizes: list[int], shared: list[Any]
    ) -> list[Batch]:
        keyed: dict[Any, list[tuple[int, int, Tensor]]] = {}
        rules = [shared.index(rule) for rule in shared]  # which groups have one rule
        ages: dict[int, int] = {}  # steps in the order in which they are met, the same in every run
        homes: dict[int, Any] = {}  # who counts a step: only one batch and group may
        apart: dict[Any, Tensor] = {}
        position = 0
        for index, size in enumerate(sizes):
            fresh: dict[tuple[torch.device, float], Tensor] = {}
            members = params[position : position + size]
            self._part(groups[index], members)
            for param in members:
                self._begin(groups[index], param, fresh)
                state = self.state.get(param, _NO_STATE)
                key = (param.dtype, param.device, "master" in state, rules[index])
                step = state.get("step")
                if step is not None and homes.setdefault(id(step), (key, index)) != (key, index):
                    state["step"] = apart.setdefault((id(step), key, index), step.clone())
                ages.setdefault(id(state.get("step")), len(ages))
                keyed.setdefault(key, []).append((position, index, state.get("step")))
                position += 1
        batches = []
        for (dtype, device, masters, _), entries in keyed.items():
            batch = Batch([], [], [], [], device, dtype, masters)
            for member, index, step in sorted(entries, key=lambda entry: (entry[1], ages[id(entry[2])], entry[0])):
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
            batch.norm = torch.zeros(1 + ops.num_blocks(segments), dtype=torch.float64, device=device)
            batches.append(batch)
        return batches

    def rows(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors that the kernels see: of stacks of learners, each learner's."""
        if self._flat is None or self._flat.stack is None:
            return tensors
        if self._learner is not None:
            return [stack[self._learner] for stack in tensors]
        return [row for stack in tensors for row in stack.unbind(0)]

    def _part(self, group: Group, members: list[Tensor]) -> None:
        """Steps that parameters share with some that now take no step: from here on they count apart."""
        taking = set(map(id, members))
        state = self.state
        left = {id(state[p].get("step")) for p in group["params"] if id(p) not in taking and p in state}
        own: dict[int, Tensor] = {}
        for param in members:
            step = state[param].get("step") if param in state else None
            if step is not None and id(step) in left:
                state[param]["step"] = own.setdefault(id(step), step.clone())

    @staticmethod
    def _has_master(group: Group, param: Tensor) -> bool:
        return bool(group["master_weights"]) and param.dtype in (torch.bfloat16, torch.float16)

    def _begin(self, group: Group, param: Tensor, fresh: dict[tuple[torch.device, float], Tensor]) -> None:
        """Make the state of a parameter that has none; those that begin together share a step."""
        names = self.state_names(group)
        if not names and not group["master_weights"]:
            return
        state = self.state[param]
        if self._has_master(group, param) and "master" not in state:
            state["master"] = param.detach().to(torch.float32, copy=True)
        if not names:
            return
        missing = [name for name in names if state.get(name) is None]
        for name in missing:
            wide = name in self.float_states or "master" in state
            state[name] = torch.zeros_like(param, dtype=wide_dtype(param) if wide else None)
        if missing or "step" not in state:
            begun = (param.device, 0.0 if missing else 1.0)  # 1: of torch.optim.SGD, which does not count
            if begun not in fresh:
                fresh[begun] = torch.full((1,), begun[1], dtype=torch.float32, device=param.device)
            state["step"] = fresh[begun]

    # ---- gradients: their scale and their norm ----

    def _scaling(
        self, batches: list[Batch], groups: Sequence[Group], grads: list[Tensor]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, float]:
        """grad_scale, found_inf, squared norm and largest norm, as the operators take them."""
        max_norm = groups[0]["max_grad_norm"]
        return (
            getattr(self, "grad_scale", None),
            getattr(self, "found_inf", None),
            None if max_norm is None else self._norm_squared(batches, grads),
            0.0 if max_norm is None else max_norm,
        )

    def _norm_squared(self, batches: list[Batch], grads: list[Tensor]) -> Tensor:
        total = None
        for batch in batches:
            assert batch.norm is not None
            batch.kernels.total_norm_(self.rows([grads[i] for i in batch.members]), batch.norm)
            part = batch.norm[:1]
            total = part if total is None else total + part.to(total.device)
        assert total is not None
        return total
