"""What all fused optimizers share: from parameter groups to as few kernel calls as there are dtypes and devices.

A step makes *batches*: parameters whose tensors can go into one call. A call may hold many parameter groups, as long as
they differ in learning rate, weight decay and adaptation alone. Batches are kept from step to step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import is_
from typing import Any, ClassVar

import torch
import torch.optim.optimizer as optimizer_module
from torch import Tensor
from torch.autograd import profiler

from ddpcore import ops
from ddpcore.optim.batch import Batch, BatchPlan, Group, State, common_arguments, is_capturing
from ddpcore.optim.checks import check_one_norm, check_state, overlaps_itself
from ddpcore.optim.states import begin, part, restore_bits
from ddpcore.optim.weight_step import ColumnRule, WeightStep
from ddpcore.parameters.flat import FlatParameters

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
    _given: tuple[dict[Any, Tensor], dict[Any, State]] | None = None  # while a state_dict is loaded

    shared_options: ClassVar[tuple[str, ...]] = ()  # what all groups of one call must agree on
    buffers: ClassVar[tuple[str, ...]] = ("momentum_buffer",)  # that a parameter can have, beside step and master
    float_states: ClassVar[tuple[str, ...]] = ("master",)  # fp32 whatever the parameter is

    def __init__(self, params: Iterable[Any], defaults: Group) -> None:
        self._kept: dict[str, BatchPlan] = {}
        self._captured: list[BatchPlan] = []
        self._flat: FlatParameters | None = None
        self._weight_step: WeightStep | None = None
        params = params if isinstance(params, Tensor) else list(params)  # a tensor is torch's to refuse
        if not isinstance(params, Tensor) and not params:
            raise ValueError("params is empty: pass the model's parameters")
        super().__init__(params, defaults)

    @property
    def _plan(self) -> BatchPlan | None:
        return self._kept.get("plan")

    # ---- what a rule says ----

    @abstractmethod
    def check_group(self, group: Group) -> None:
        """Raise ValueError, naming the option and its value, where an option of the group is wrong."""

    def check_saved(self, state_dict: dict[str, Any]) -> None:
        """Raise ValueError where a state_dict of as many groups is of another rule."""

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

    def column_rule(self, group: Group) -> ColumnRule | None:
        """How columns of a flat buffer are stepped for this group; None where they cannot be."""
        return None

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
                if hasattr(param, "device_mesh"):
                    raise ValueError("a parameter is a DTensor: fused optimizers take whole tensors, on every rank")
        except ValueError:
            self.param_groups.pop()
            raise
        self._kept.clear()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._kept = {}
        if not hasattr(self, "_flat"):  # a copy, with parameters of its own
            self._flat, self._weight_step, self._captured = None, None, []
        if self._weight_step is not None:
            self._weight_step.forget_states()
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        if self._given is not None:
            restore_bits(self, *self._given)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but that options which the file does not have stay what they are in each group.

        States of ``torch.optim.SGD`` and ``Adam`` with the same buffers load too.

        Raises:
            ValueError: groups, shapes or buffers do not fit, or an option is wrong; nothing is changed then.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict := state_dict.copy())
            state_dict = state_dict if changed is None else changed
        params = [p for group in self.param_groups for p in group["params"]]
        ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        saved = dict(zip(ids, params, strict=True)) if len(ids) == len(params) else {}
        for index, param in saved.items():
            check_state(index, param, state_dict["state"].get(index, {}), self.buffers)
        groups = list(state_dict["param_groups"])
        if len(groups) == len(self.param_groups):  # else torch says what is wrong
            groups = [{**own, **group} for own, group in zip(self.param_groups, groups, strict=True)]
            self.check_saved(state_dict)
            for group in groups:
                self.check_group(group)
            check_one_norm(groups)
        state_dict = {**state_dict, "param_groups": groups}
        hooks, self._optimizer_load_state_dict_pre_hooks = self._optimizer_load_state_dict_pre_hooks, OrderedDict()
        self._given = saved, state_dict["state"]
        try:
            super().load_state_dict(state_dict)
        finally:
            self._optimizer_load_state_dict_pre_hooks, self._given = hooks, None

    def state_dict(self) -> dict[str, Any]:
        """As in torch. Every parameter has a ``step`` of its own, as ``torch.optim.Adam`` expects to find it."""
        result = super().state_dict()
        states = {
            index: {**state, "step": state["step"].clone()} if isinstance(state.get("step"), Tensor) else state
            for index, state in result["state"].items()
        }
        return {**result, "state": states}

    def bind(self, flat: FlatParameters) -> WeightStep:
        """Step on flat buffers from now on, of which the parameters are views; each learner's row is stepped apart.

        Returns:
            The owner of the step, to which an average that belongs to the next step is given.
        """
        self._flat, self._weight_step = flat, WeightStep(flat, self)
        self._kept.clear()
        for param, state in self.state.items() if flat.stack is not None else ():
            for name, value in state.items():
                if name != "step" and isinstance(value, Tensor) and value.shape == param.shape[1:]:
                    state[name] = value.expand_as(param).clone()  # every learner goes on from the same state
        return self._weight_step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what ``closure`` returns, if one is given."""
        if type(self).step is FusedOptimizer.step and (  # else torch has wrapped the step of the subclass
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or optimizer_module._global_optimizer_pre_hooks
            or optimizer_module._global_optimizer_post_hooks
            or profiler._is_profiler_enabled
            or torch.compiler.is_compiling()
        ):
            return self._hooked_step() if closure is None else self._hooked_step(closure)
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
        if self._weight_step is None:
            self.step_lists(self.param_groups)
        else:
            self._weight_step.run()

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
        plan = self._plan_of(groups, params, grads, sizes)
        get = self.state.get
        states = [get(param, _NO_STATE) for param in params]
        stack = None if self._flat is None else self._flat.stack
        if stack is None or groups[0]["max_grad_norm"] is None:
            self._step_batches(plan.batches, groups, params, grads, states)
        else:  # each learner has a norm of its own
            for learner in range(stack):
                self._step_learner(learner, stack, plan.batches, groups, params, grads, states)
        if not torch.compiler.is_compiling():  # autograd must know, to refuse a graph that needs the old weights
            torch.autograd.graph.increment_version(params)
            if is_capturing(params[0]):
                self._captured.append(plan)  # the graph writes into its buffers, whatever later steps make

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
        for batch, own in zip(batches, mine, strict=True):
            assert batch.trust is not None
            assert own.trust is not None
            batch.trust[learner::num_learners].copy_(own.trust)

    def _plan_of(
        self, groups: Sequence[Group], params: list[Tensor], grads: list[Tensor], sizes: list[int]
    ) -> BatchPlan:
        known = self._known(groups, params, grads, sizes)
        plan = self._plan
        if plan is None or plan.known != known or not all(map(is_, plan.params, params)):
            self._check(params, grads)
            batches = self._batches(groups, params, sizes, known[0])
            plan = self._kept["plan"] = BatchPlan(params, self._known(groups, params, grads, sizes), batches)
        return plan

    def _check(self, params: list[Tensor], grads: list[Tensor]) -> None:
        """Before anything is written: a step is whole or has not begun."""
        check_one_norm(self.param_groups)
        if True in [grad.is_sparse for grad in grads]:
            raise RuntimeError(
                f"{type(self).__name__} takes dense gradients only: use nn.Embedding(sparse=False), "
                "or another optimizer for this parameter"
            )
        if [(grad.dtype, grad.device) for grad in grads] != [(param.dtype, param.device) for param in params]:
            raise RuntimeError(f"{type(self).__name__}: a gradient must have the dtype and device of its parameter")
        if True in [overlaps_itself(param) for param in params]:
            raise RuntimeError(f"{type(self).__name__}: a parameter overlaps itself in memory: pass a clone of it")

    def _known(
        self, groups: Sequence[Group], params: list[Tensor], grads: list[Tensor], sizes: list[int]
    ) -> tuple[list[Any], ...]:
        """What a plan takes for granted: first, for each group, the first one that has the same rule.

        Not the options themselves, which schedules change. Somebody may have moved a parameter, cleared a state or
        replaced its step.

        Gradients speak for their parameters, whose dtype and device torch makes them have.
        """
        get, names = self.state.get, self.shared_options
        states = [get(param, _NO_STATE) for param in params]
        rules = [(isinstance(group["lr"], Tensor), [group[name] for name in names]) for group in groups]
        return (
            [rules.index(rule) for rule in rules],
            [(self.state_names(group), group["master_weights"], group["max_grad_norm"]) for group in groups],
            sizes,
            [(len(state), id(state.get("step"))) for state in states],
            [(grad.dtype, grad.device, grad.is_sparse) for grad in grads],
        )

    def _batches(
        self, groups: Sequence[Group], params: list[Tensor], sizes: list[int], rules: list[int]
    ) -> list[Batch]:
        keyed: dict[Any, list[tuple[int, int, Tensor | None]]] = {}
        ages: dict[int, int] = {}  # steps in the order in which they are met, the same in every run
        homes: dict[int, Any] = {}  # who counts a step: only one batch and group may
        apart: dict[Any, Tensor] = {}
        position = 0
        for index, size in enumerate(sizes):
            fresh: dict[tuple[torch.device, float], Tensor] = {}
            members = params[position : position + size]
            part(self, groups[index], members)
            for param in members:
                begin(self, groups[index], param, fresh)
                state = self.state.get(param, _NO_STATE)
                key = (param.dtype, param.device, "master" in state, rules[index])
                step = state.get("step") if self.state_names(groups[index]) else None
                if step is not None and homes.setdefault(id(step), (key, index)) != (key, index):
                    step = state["step"] = apart.setdefault((id(step), key, index), step.clone())
                ages.setdefault(id(step), len(ages))
                keyed.setdefault(key, []).append((position, index, step))
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
