"""The base of the fused optimizers: it turns parameter groups into the fewest possible kernel calls.

A step forms *batches*: parameters of one dtype and device that one call can step. A call may have many parameter
groups, if they differ only in learning rate, weight decay and adaptation. Later steps reuse the batches.
"""

import inspect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from operator import is_
from typing import Any, ClassVar, NamedTuple

import torch
import torch.optim.optimizer as optimizer_module
from torch import Tensor
from torch.autograd import profiler
from typing_extensions import override

from ddpcore import ops
from ddpcore.ops import Mixture, Rule
from ddpcore.ops.library import is_narrow, wide
from ddpcore.optim import checks
from ddpcore.optim.batch import Batch, BatchPlan, Shards, common_arguments, norm_squared_of
from ddpcore.optim.checks import Group, State
from ddpcore.optim.shards import check_shards, local_gradients
from ddpcore.optim.states import SavedOptimizer, check_roundable, check_rule, check_state, check_tensors, firsts_of
from ddpcore.optim.weight_step import WeightStep
from ddpcore.parameters.flat import FlatParameters
from ddpcore.parameters.shards import is_dtensor, local

PER_GROUP = ("lr", "weight_decay", "always_adapt", "max_grad_norm")  # one call may have groups that differ in these
_NO_STATE: State = {}
_NO_OPTIONS = ("self", "params", "__class__")  # in the locals of a constructor


class FusedOptimizer(SavedOptimizer):
    """Base of the fused optimizers. A subclass adds its rule, its options and their checks.

    - float32, bfloat16 and float16 parameters on CPU and CUDA run in kernels, other dtypes and devices in plain torch.
    - ``torch.amp.GradScaler`` works without a host synchronisation: the kernels unscale gradients and skip steps.
    - The learning rate may be a tensor, which schedulers and captured CUDA graphs then read and write on the device.
    - State: ``step``, one tensor on the parameters' device for all parameters of a group that started together.
    """

    _step_supports_amp_scaling = True
    _flat: FlatParameters | None = None
    _weight_step: WeightStep | None = None

    rule: ClassVar[Rule]  # the table of its operator

    def __init__(self, params: Iterable[Any], given: Group) -> None:
        """``given``: the options, or ``locals()`` of the subclass, whose parameters have the names of the options."""
        defaults = {name: value for name, value in checks.options_of(given).items() if name not in _NO_OPTIONS}
        defaults["state_dtype"] = checks.name_of(defaults.get("state_dtype", "float32"))
        self._kept: dict[str, BatchPlan] = {}
        self._captured: list[BatchPlan] = []
        params = params if isinstance(params, Tensor) else list(params)  # torch has an error message for a tensor
        if not isinstance(params, Tensor) and not params:
            raise ValueError("params is empty: pass the model's parameters")
        super().__init__(params, defaults)
        self._shared_options = tuple(name for name in self.defaults if name not in PER_GROUP)

    def check_group(self, group: Group) -> None:
        """Raise ValueError, with name and value, if an option of the group is invalid."""
        checks.check_common(group)
        (checks.check_momentum if "momentum_buffer" in self.rule.buffers else checks.check_moments)(group)

    def state_names(self, group: Group) -> tuple[str, ...]:
        """The buffers that each parameter of the group has: none with ``momentum=0``."""
        return () if group.get("momentum") == 0 else self.rule.buffers

    def arguments(self, batch: Batch | None, groups: list[Group]) -> dict[str, Any]:
        """The operator's arguments besides tensors and :func:`common_arguments`, for one call with these groups.

        Here: the options of a group that stand in the rule's table. There is no batch in a step of columns.
        """
        return self.rule.options_of(groups[0])

    @override
    def add_param_group(self, param_group: Group) -> None:
        add, torchs = super().add_param_group.__func__, torch.optim.Optimizer.add_param_group  # type: ignore[attr-defined]
        (inspect.unwrap(add) if add is torchs else add)(self, param_group)  # its wrapper imports torch._dynamo
        self.give_own_rate()
        group = self.param_groups[-1]
        group["state_dtype"] = checks.name_of(group.get("state_dtype", "float32"))
        try:
            self.check_group(group)
            check_roundable(self.named_parameters())
            checks.check_one_norm([self.param_groups[0], group])
            checks.check_new(group)
            check_shards(key for key, _ in self.named_parameters())
        except ValueError:
            self.param_groups.pop()
            raise
        self._kept.clear()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._kept = {}
        self._shared_options = tuple(name for name in self.defaults if name not in PER_GROUP)
        self.__dict__.setdefault("_captured", [])  # a copy has none
        if self._weight_step is not None:
            self._weight_step.forget_states()
        for group in self.param_groups:
            group.update({**self.defaults, **group})

    @override
    def check_loading(self, groups: Sequence[Group], saved: Mapping[Any, Tensor], state_dict: dict[str, Any]) -> None:
        states = {id(param): state_dict["state"].get(number, {}) for number, param in saved.items()}
        for number, param in saved.items():
            check_state(number, param, states[id(param)], self.rule.buffers)
        for index, (own, group) in enumerate(zip(self.param_groups, groups, strict=True)):
            self.check_group(group)
            check_rule({"sgd": "scaled_lr", "lars": group.get("variant")}.get(self.rule.name), index, state_dict)
            names = own["param_names"] if "param_names" in own else group["params"]
            check_roundable(((pair, group) for pair in zip(names, own["params"], strict=True)), states)
        checks.check_one_norm(groups)

    @override
    def state_dtype_of(self, group: Group, param: Tensor, name: str, state: State) -> torch.dtype:
        if checks.is_rounded(group) and name in self.state_names(group):
            return torch.bfloat16
        keeps_more = self.rule.wide_states or "master" in state or _has_master(group, param)
        return wide(param.dtype) if keeps_more else param.dtype

    def create_states(self, group: Group, param: Tensor, fresh: dict[tuple[torch.device, float], Tensor]) -> None:
        """Create the missing states of a parameter. Those that start together share a step counter of ``fresh``."""
        names = self.state_names(group)
        if not names and not group["master_weights"]:
            return
        state = self.state[param]
        if _has_master(group, param) and "master" not in state:
            state["master"] = param.detach().to(torch.float32, copy=True)
        elif "master" in state and not is_narrow(param.dtype):
            del state["master"]  # the model had 16 bits before, and no longer needs a master
        if not names:
            return
        missing = [name for name in names if state.get(name) is None]
        for name in names:
            dtype = self.state_dtype_of(group, param, name, state)  # a new one if the parameter has, or a new master
            state[name] = torch.zeros_like(param, dtype=dtype) if name in missing else state[name].to(dtype)
        if not isinstance(state.get("step"), Tensor | None):
            state["step"] = torch.tensor([float(state["step"])], dtype=torch.float32, device=param.device)
        if missing or "step" not in state:
            begun = (param.device, 0.0 if missing else 1.0)  # 1: loaded from torch.optim.SGD, which does not count
            step = torch.full((1,), begun[1], dtype=torch.float32, device=param.device)
            state["step"] = fresh.setdefault(begun, step)

    def bind(self, flat: FlatParameters) -> WeightStep:
        """Step flat buffers, of which the parameters are views, from now on. Each learner's row is a set of its own.

        Returns the object that steps the weights. It also accepts the average for the next step.
        """
        self._flat, self._weight_step = flat, WeightStep(flat, self)
        self._kept.clear()
        return self._weight_step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. Returns the result of ``closure``, or None."""
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

    # torch's wrapper, which calls hooks and opens a profiler region, takes 11 of the 35 us of a small step.
    # So this step skips it if there is no hook. `hooked` stops torch from adding it.
    step.hooked = True  # type: ignore[attr-defined]

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.note_capture()
        grad_mode = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # as torch.no_grad() does, in a tenth of its time
        try:
            if self._weight_step is None:
                self.step_lists(self.param_groups)
            else:
                self._weight_step.run()
        finally:
            torch._C._set_grad_enabled(grad_mode)
        return loss

    _hooked_step = torch.optim.Optimizer.profile_hook_step(_step)

    def step_lists(self, groups: Sequence[Group], mixture: Mixture | None = None) -> None:
        """Step every parameter of the groups that has a gradient.

        ``mixture`` is an average of the row that the parameters are views of, computed in the same pass over it.
        """
        flat = self._flat
        if flat is None or flat.num_rows == 1 or groups[0]["max_grad_norm"] is None:
            self._step_lists("plan", groups, mixture=mixture)
        else:  # each learner has its own norm of all gradients
            num = len(flat.segments)
            for row in range(flat.num_rows):
                mine = set(map(id, flat.parameters[row * num : (row + 1) * num]))
                self._step_lists(f"plan of learner {row}", groups, mine)

    def _step_lists(
        self, name: str, groups: Sequence[Group], members: Container[int] | None = None, mixture: Mixture | None = None
    ) -> None:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        sizes: list[int] = []
        for group in groups:
            before = len(params)
            for param in group["params"]:
                grad = param.grad
                if grad is not None and (members is None or id(param) in members):
                    params.append(param)
                    grads.append(grad)
            sizes.append(len(params) - before)
        if not params:
            return
        kinds = dict(zip(map(type, params), params, strict=True)).values()  # one of each class
        shards = local_gradients(params, grads, self.named_parameters) if any(map(is_dtensor, kinds)) else grads
        plan, states = self._plan_of(name, groups, params, grads, sizes)
        max_norm, lists = groups[0]["max_grad_norm"], (params, shards, states)
        norm_squared = None if max_norm is None else norm_squared_of(plan, shards)
        scaling = getattr(self, "grad_scale", None), getattr(self, "found_inf", None), norm_squared, max_norm or 0.0
        if plan.shards is None or not self.rule.uses_norms or not plan.shards.reductions:
            self._run(plan, groups, lists, scaling, mixture)
        else:
            self._run(plan, groups, lists, scaling, None, passes="first")
            plan.shards.add_()
            self._run(plan, groups, lists, scaling, None, passes="second")
        if not torch.compiler.is_compiling():  # so that autograd refuses graphs that need the old weights
            torch.autograd.graph.increment_version(params)
            if checks.is_capturing(params[0]):
                self._captured.append(plan)  # its buffers must live as long as the graph

    def _run(
        self, plan: BatchPlan, groups: Sequence[Group], lists: Any, scaling: Any, mixture: Mixture | None, **passes: str
    ) -> None:
        params, grads, states = lists
        for batch in plan.batches:
            options = [groups[index] for index in batch.groups]
            names = self.state_names(options[0])
            members = batch.of(states)
            buffers = [[state[name] for state in members] if name in names else [] for name in self.rule.buffers]
            masters = [state["master"] for state in members] if batch.masters else []
            tensors = [batch.of(params), batch.of(grads), *buffers]
            if plan.shards is not None:
                tensors, masters = [list(map(local, column)) for column in tensors], list(map(local, masters))
            arguments = {**self.arguments(batch, options), **common_arguments(options, batch, scaling), **passes}
            if passes:
                assert plan.shards is not None
                arguments["squares"] = plan.shards.squares[id(batch)]
            if mixture is not None:
                assert self._flat is not None
                arguments |= {"mixture": mixture, "offsets": self._flat.offsets_of(batch.of(params))}
            getattr(batch.kernels, self.rule.operator)(*tensors, masters, batch.steps, batch.scratch, **arguments)

    def _plan_of(
        self, name: str, groups: Sequence[Group], params: list[Tensor], grads: list[Tensor], sizes: list[int]
    ) -> tuple[BatchPlan, list[State]]:
        """The plan, and the states of the parameters, which a new plan may create."""
        states = self._states_of(params)  # once, because Python computes the hash of a tensor slowly
        known = self._known(groups, states, grads, sizes)
        plan = self._kept.get(name)
        same = plan is not None and plan.known == known and all(map(is_, plan.params, params))
        if plan is None or not same or not all(map(is_, plan.steps, _steps_of(states))):
            for group in groups:
                self.check_group(group)  # a program may have changed its options
            checks.check_one_norm(self.param_groups)
            check_tensors(type(self).__name__, params, grads, self.state)  # before anything is written
            check_roundable(self.named_parameters())
            batches = self._batches(groups, params, sizes, known[0])
            states = self._states_of(params)
            known = self._known(groups, states, grads, sizes)
            shards = Shards(params, batches) if any(map(is_dtensor, params)) else None
            plan = self._kept[name] = BatchPlan(params, _steps_of(states), known, batches, shards)
        return plan, states

    def _states_of(self, params: list[Tensor]) -> list[State]:
        return [self.state.get(param, _NO_STATE) for param in params]

    def _known(
        self, groups: Sequence[Group], states: list[State], grads: list[Tensor], sizes: list[int]
    ) -> tuple[list[Any], ...]:
        """The facts that a plan depends on. A plan is made again when they change.

        The first one is, for each group, the index of the first group with the same rule. Options that schedules change
        are no facts. States are, because users may clear them or replace a step. Dtypes and devices are read
        from the gradients, because torch keeps gradients on the device and in the dtype of their parameters.
        """
        names = self._shared_options
        rules = [(isinstance(group["lr"], Tensor), [group[name] for name in names]) for group in groups]
        return (
            [rules.index(rule) for rule in rules],
            [(self.state_names(g), g["master_weights"], g["max_grad_norm"], checks.is_rounded(g)) for g in groups],
            sizes,
            [len(state) for state in states],
            [(grad.dtype, grad.device, grad.is_sparse, grad.numel()) for grad in grads],
        )

    def _batches(
        self, groups: Sequence[Group], params: list[Tensor], sizes: list[int], rules: list[int]
    ) -> list[Batch]:
        # Tensors are keys by identity. torch.compile of torch 2.11 cannot trace id() of a tensor that the step creates.
        keyed: dict[Any, list[tuple[int, int, Tensor | None]]] = {}
        ages: dict[Tensor | None, int] = {}  # numbers the steps in order of appearance, the same in every run
        # The batch and group that count a step; others get a copy, and all if a parameter that skips this step has it.
        stepped, everyone = set(map(id, params)), (param for group in self.param_groups for param in group["params"])
        skipped = [self.state[param] for param in everyone if id(param) not in stepped and param in self.state]
        owners: dict[Any, Any] = {state.get("step"): None for state in skipped}
        copies: dict[Any, Tensor] = {}
        position = 0
        for index, size in enumerate(sizes):
            fresh: dict[tuple[torch.device, float], Tensor] = {}
            for param in params[position : position + size]:
                self.create_states(groups[index], param, fresh)
                state = self.state.get(param, _NO_STATE)
                key = (param.dtype, param.device, "master" in state, rules[index])
                step = state.get("step") if self.state_names(groups[index]) else None
                if step is not None and owners.setdefault(step, (key, index)) != (key, index):
                    step = state["step"] = copies.setdefault((step, key, index), step.clone())
                ages.setdefault(step, len(ages))
                keyed.setdefault(key, []).append((position, index, step))
                position += 1
        batches = []
        for (dtype, device, masters, _), entries in keyed.items():
            runs: dict[tuple[int, int], list[tuple[int, int, Tensor | None]]] = {}  # of one group and one step count
            for entry in sorted(entries, key=lambda entry: (entry[1], ages[entry[2]], entry[0])):
                runs.setdefault((entry[1], ages[entry[2]]), []).append(entry)
            positions = [position for run in runs.values() for position, _, _ in run]
            firsts = [run[0] for run in runs.values()]
            segments = list(map(local, mine := [params[position] for position in positions]))
            group = groups[firsts[0][1]]
            rounds = checks.is_rounded(group) and bool(self.state_names(group))
            batches.append(
                Batch(
                    members=positions,
                    groups=[index for _, index, _ in firsts],
                    sizes=[len(run) for run in runs.values()],
                    steps=[step for _, _, step in firsts if step is not None],
                    dtype=dtype,
                    device=device,
                    masters=masters,
                    firsts=firsts_of(mine, self.named_parameters(), self._flat) if rounds else [],
                    whole=positions == list(range(len(params))),
                    scratch=ops.new_scratch(segments),
                    trust=ops.new_trust(segments),
                    norm=torch.zeros(1 + ops.num_blocks(segments), dtype=torch.float64, device=device),
                )
            )
        return batches


class TrustRatio(NamedTuple):
    """The factor ``ratio`` of one tensor's step, and the norms from which it was computed."""

    ratio: float
    weight_norm: float
    update_norm: float
    """LARS: the norm of the unscaled and clipped gradient. LAMB: the norm of the update."""


class AdaptiveOptimizer(FusedOptimizer):
    """An optimizer that scales each tensor's step by a trust ratio."""

    def trust_ratios(self) -> dict[str | int, TrustRatio | list[TrustRatio]]:
        """The ratios of the last step, by name if each parameter of the optimizer has another name, else by index.

        With several virtual learners the values are lists with one entry per learner. Empty before the first step.
        Reading them waits for the device; steps do not.
        """
        found = {
            id(plan.params[member]): TrustRatio(*row)
            for plan in self._kept.values()
            for batch in plan.batches
            for member, row in zip(batch.members, batch.trust.tolist(), strict=True)
        }
        flat = self._flat
        if flat is None or flat.num_rows == 1:
            return {name: found[id(param)] for (name, param), _ in self.named_parameters() if id(param) in found}
        num = len(flat.segments)
        rows_of = {id(first): flat.parameters[index::num] for index, first in enumerate(flat.parameters[:num])}
        return {
            name: [found[id(row)] for row in rows_of[id(param)] if id(row) in found]
            for (name, param), _ in self.named_parameters()
            if id(param) in rows_of and id(param) in found
        }


def _has_master(group: Group, param: Tensor) -> bool:
    return bool(group["master_weights"]) and is_narrow(param.dtype)


def _steps_of(states: list[State]) -> list[Tensor | None]:
    return [state.get("step") for state in states]
