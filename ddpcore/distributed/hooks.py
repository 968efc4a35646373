"""The hooks that call a strategy around forward, backward and step, and the handle that holds them.

One call of the user's ``optimizer.step()`` runs in this order:

1. The pre-hook calls ``strategy.before_step``. It returns the average of this step as a value, or None.
2. The pre-hook passes it to ``WeightStep.average``. A ``WeightStep`` alone averages, steps and moves the flat buffer.
3. The step of a fused optimizer calls ``WeightStep.run``: one kernel that averages and steps, such as
   ``ops.adamw_step_`` with a mixture, or two kernels. Other optimizers step by themselves, after the average of 2.
4. The post-hook calls ``strategy.after_step``, which may average the stepped weights, and applies the policies.
"""

import hashlib
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from ddpcore.comm.agreement import describe
from ddpcore.comm.membership import Change
from ddpcore.distributed.alike import check_divided
from ddpcore.distributed.averaging import AveragedShards, averaged_model
from ddpcore.distributed.guards import (
    Hook,
    StateHook,
    check_state_caller,
    check_state_sizes,
    creates_states_only,
    outside_modes,
)
from ddpcore.distributed.handle import CopiedHandle, Distributed, Observer
from ddpcore.distributed.phases import PhaseClock
from ddpcore.distributed.resets import refuse_lacking
from ddpcore.distributed.samples import SampleWatch, has_gradients
from ddpcore.distributed.state_sync import StateSync, give_state
from ddpcore.distributed.watch import LoopWatch
from ddpcore.optim import FusedOptimizer
from ddpcore.optim.weight_step import WeightStep
from ddpcore.parameters.buckets import GradientBuckets, Pieces
from ddpcore.parameters.hooks import closure_of, exclude_from_compilation, is_traced, own_hooks, with_closure
from ddpcore.parameters.learner_models import LearnerModels
from ddpcore.parameters.shards import local
from ddpcore.storage.serialization import copy_of, versioned, versions_of
from ddpcore.strategies.base import Strategy
from ddpcore.strategies.learner import Learner, row_sums
from ddpcore.strategies.ssgd import own_samples

STATE_FORMAT = 3  # of the result of ``state_dict``; version 0.2 had none
_HANDLES: "weakref.WeakSet[HookedDistributed]" = weakref.WeakSet()  # of real ranks


def _leave_fork() -> None:
    """In a forked process: its copies of models take part in no step of the ranks."""
    for handle in _HANDLES:
        handle.learner.hooks_paused = True
        if handle._buckets is not None:
            handle._buckets.paused = True


os.register_at_fork(after_in_child=_leave_fork)


class HookedDistributed(Distributed):
    """The handle of a model that a strategy trains. It sets the hooks, which call the strategy."""

    learner: Learner
    _samples: SampleWatch

    @own_hooks()
    def __init__(
        self, model: nn.Module, learner: Learner, strategy: Strategy, state_sync: StateSync, on_nonfinite: str
    ) -> None:
        super().__init__(model, learner.comm)
        self.phases = self._span = PhaseClock(learner.comm)
        self.learner, self.strategy, self._state_sync = learner, strategy, state_sync
        optimizer, flat = learner.optimizer, learner.flat
        self._weight_step = optimizer.bind(flat) if isinstance(optimizer, FusedOptimizer) else WeightStep(flat)
        self.observers: list[Observer] = []
        self._watching: Sequence[Observer] = self.observers  # none in a step whose closure runs again
        self._new_order: list[int] | None = None
        self._laid_out = strategy.traits.fixed_layout  # whether the layout is final: also after a checkpoint was loaded
        self._samples = SampleWatch(flat, strategy.name, counts=isinstance(strategy.traits.weights, str))
        self._watch = LoopWatch(learner, strategy, on_nonfinite)
        self._buckets: GradientBuckets | None = None
        if strategy.traits.averages_gradients:
            self._buckets = GradientBuckets(
                flat,
                self._bucket_ready,
                self._after_backward,
                waits=learner.comm.transport == "virtual",
                in_place=self._averages_in_place,
            )
        self._is_inside = False  # whether a call of handle.model is running
        self._is_training, self.nonfinite = True, self._watch.found  # whether the step() that runs is one of training
        hook = _ForwardHook(self)
        first = flat.shards is not None  # before FSDP2 gathers the weights
        self._forward_hooks = [one.register_forward_pre_hook(hook, prepend=first) for one in self.models]
        for module in (part for one in self.models for part in one.modules()):
            StateHook(self).register(module)
        if isinstance(model, LearnerModels):
            model.register_forward_pre_hook(hook)
            model.register_forward_hook(_LeaveHook(self), always_call=True)
        elif self.comm.num_learners > 1:
            self._forward_hooks.append(model.register_forward_hook(_LeaveHook(self)))
        if learner.comm.transport != "virtual":
            _HANDLES.add(self)
        if (membership := learner.comm.membership) is not None:
            membership.on_change.append(self._members_changed)
        self._last_hook = optimizer.register_step_pre_hook(self._before_call).id
        optimizer.register_step_post_hook(self._after_call)
        if len(self.models) > 1:
            optimizer.register_state_dict_pre_hook(partial(check_state_caller, self.models))
            optimizer.register_load_state_dict_pre_hook(partial(check_state_sizes, len(self.models)))

    def __copy__(self) -> "HookedDistributed":
        return self

    def __reduce__(self) -> tuple[type[CopiedHandle], tuple[()]]:
        return CopiedHandle, ()

    @property
    @override
    def learners_run(self) -> str:
        return self.model.choice if isinstance(self.model, LearnerModels) else ""

    @property
    def models(self) -> Sequence[nn.Module]:
        """The learners' models: one on a rank, one per virtual learner."""
        return self.learner.models

    @override
    def split(self, *tensors: Tensor, at_once: int | None = None) -> Iterator[tuple[Tensor, ...]]:
        if isinstance(self.model, LearnerModels):
            return self.model.split(*tensors, at_once=at_once)
        return super().split(*tensors)

    @override
    @contextmanager
    def _passes(self, *, averages: bool) -> Iterator[None]:
        if self._buckets is None or (averages and not self._buckets.paused):
            yield
            return
        paused, self._buckets.paused = self._buckets.paused, not averages
        self._watch.begin_pause(averages=averages)
        try:
            yield
        finally:
            self._watch.end_pause(self._buckets.num_paused)
            self._buckets.paused = paused

    def _members_changed(self, change: Change, before: Sequence[int | None]) -> None:
        self.strategy.members_changed(self.learner, before)
        # The samples of the step in progress are dealt; a learner joins between two steps.
        begin = self.learner.step + (not change.joined)
        self.deals = (*(deal for deal in self.deals if deal[0] < begin), (begin, change.members))

    @outside_modes
    @override
    def _copy(self, batch_norm: str) -> nn.Module:
        self.strategy.restore_weights(self.learner)
        self._watch.check_parameters()
        if self.learner.flat.shards is not None:
            return AveragedShards(self.learner, batch_norm)
        model = averaged_model(self.learner, batch_norm)
        for handle in self._forward_hooks:
            model._forward_pre_hooks.pop(handle.id, None)
            model._forward_hooks.pop(handle.id, None)
        return model

    @override
    def state_dict(self) -> dict[str, Any]:
        self.strategy.restore_weights(self.learner)
        state = {
            "format": STATE_FORMAT,
            "made_by": self._made_by(),
            "step": self.learner.step,
            "layout": list(self.learner.flat.names),
            "learners": [model.state_dict() for model in self.models[1:]],
            "versions": versions_of(self.models[0].state_dict()),
            "strategy": self.strategy.state_dict(),
            "policies": self._state_sync.state_dict(),
            **({} if self.comm.membership is None else {"deals": [[step, list(ids)] for step, ids in self.deals]}),
        }
        return dict(copy_of(state))

    @outside_modes
    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        flat = self.learner.flat
        self.learner.check_own("load the state after the evaluation")
        self.check_state(state)
        self.strategy.restore_weights(self.learner)
        if flat.shards is not None:
            flat.shards.reshard()
        for model, own in zip(self.models[1:], state["learners"], strict=True):
            leaves_out = own.keys() == model.state_dict().keys()  # what it leaves out of its state is then no error
            model.load_state_dict(versioned(own, state.get("versions")), strict=not leaves_out)
        self._new_order, self._laid_out = None, True
        self._watch.restart()
        self._lay_out([flat.names.index(name) for name in state["layout"]])
        self.learner.step = state["step"]
        self.strategy.load_state_dict(self.learner, copy_of(state["strategy"]))
        self._state_sync.load_state_dict(copy_of(state["policies"]))
        self.deals = tuple((step, tuple(ids)) for step, ids in state.get("deals", ()))

    @override
    def check_state(self, state: dict[str, Any]) -> None:
        if "learners" not in state:
            raise ValueError("the state was saved by ddpcore 0.1: resume with ddpcore 0.1, or begin anew")
        if sorted(state["layout"]) != sorted(self.learner.flat.names):
            raise ValueError("the state is of a model with other parameters: load it into the model that saved it")
        self.comm.settle()
        left = [one for _, ids in state.get("deals", ())[-1:] for one in ids]
        if left and len(self.models) > 1 and left != [*self.comm.members]:
            what = f"the state is of learners {left} and here are {[*self.comm.members]}"
            raise ValueError(f"{what}: call handle.lose() for those that are gone, with on_failure='shrink'")
        made_by, here = state["made_by"], self._made_by()
        if "format" not in state:  # of version 0.2, whose digest covers attributes that no longer exist
            made_by, here = made_by.rpartition(", settings ")[0], here.rpartition(", settings ")[0]
        if made_by != here:
            what = f"the state is of {state['made_by']} and this is {self._made_by()}"
            raise ValueError(f"{what}: use the same strategy, or load only the states of the model and the optimizer")

    def _made_by(self) -> str:
        settings = hashlib.sha256(describe(self.strategy).encode()).hexdigest()[:8]  # short for any matrix
        return f"{self.strategy!r} of {self.comm.num_learners} learners, settings {settings}"

    @override
    def _squared_distances(self) -> Tensor:
        self.strategy.restore_weights(self.learner)
        self._watch.check_parameters()
        return self.learner.squared_distances()

    def before_forward(self) -> None:
        """Call observers and strategy before a forward pass of all learners."""
        self._watch.before_pass()
        if self._buckets is not None and not self._buckets.paused:
            self._buckets.restart()
        self._samples.forget_reset()
        for observer in self._watching:
            observer.before_forward(self.learner)
        self.phases.begin_forward()
        with self._span("before_forward"):
            self.strategy.before_forward(self.learner)
        rule = type(self.strategy)  # a step of plain SSGD does nothing else, so that one by hand is right
        is_whole = rule.before_step is Strategy.before_step and self.strategy.traits.stays_identical
        self._watch.count_pass(by_weights=not (is_whole and self.strategy.plan(self.learner.step).covers_all_learners))

    def _averages_in_place(self) -> bool:
        """Whether gradients of virtual learners are averaged where they lie: nothing but the average reads them."""
        strategy, comm = self.strategy, self.learner.comm
        only_averages = strategy.traits.weights is None and getattr(strategy.bucket_ready, "only_averages", False)
        only_averages = only_averages and strategy.plan(self.learner.step).averages_gradients
        return only_averages and not self.observers and comm.membership is None and comm.num_learners > 1

    def _bucket_ready(self, columns: Tensor, pieces: Pieces | None = None) -> None:
        self.learner.num_samples = self.num_samples
        plan = self.strategy.plan(self.learner.step)
        if plan.averages_gradients:
            self._samples.check()
        if pieces is not None:
            size = plan.gradients or self.learner.comm.num_learners
            with self._span("bucket_ready"):
                self._watch.sums.update(self.learner.comm.average_pieces_(columns, pieces, size))
            return
        if plan.averages_gradients:
            self._watch.sums[int(columns.storage_offset())] = row_sums(columns)
            for observer in self._watching:
                observer.bucket_ready(self.learner, columns)
        with self._span("bucket_ready"):
            self.strategy.bucket_ready(self.learner, columns)

    @torch.no_grad()
    def _after_backward(self, order: list[int]) -> None:
        with self._span("after_backward"):
            self.strategy.after_backward(self.learner)
        self._samples.renew()
        if not self.strategy.plan(self.learner.step).averages_gradients:
            return
        self._watch.check_alike()  # here, because all learners have just met
        flat, comm = self.learner.flat, self.learner.comm
        if not self._laid_out and self._new_order is None:  # rank 0's order of gradients, for the buckets
            num = len(flat.segments)
            complete = order + sorted(set(range(num)).difference(order)) if order else [-1] * num
            agreed = torch.tensor(complete, device=flat.param_LP.device).repeat(flat.num_rows, 1)
            if flat.shards is not None:  # all ranks of a learner take one order, too
                flat.shards.add_(agreed.mul_(flat.shards.place[0] == 0))
            comm.broadcast_(agreed)
            self._new_order = list(map(int, agreed[0].tolist())) if agreed[0, 0] >= 0 else None
        self._give_averages()
        if any(parameter.grad is not None for parameter in flat.parameters):  # else no learner had a pass
            for observer in self._watching:
                observer.gradients_averaged(self.learner)
        self._watch.note_average()
        self._samples.note_average(of_all=self.strategy.plan(self.learner.step).covers_all_learners)

    def _give_averages(self) -> None:
        """Give learners without a gradient the average that others have. If none has one, no optimizer steps it."""
        flat = self.learner.flat
        missing = [index for index, parameter in enumerate(flat.parameters) if parameter.grad is None]
        if not missing:
            return
        found = torch.stack([local(flat.grad_views[index]).any() for index in missing]).double()
        is_given = (found if flat.shards is None else flat.shards.add_(found)).tolist()  # one wait for the device
        for index, given in zip(missing, is_given, strict=True):
            parameter = flat.parameters[index]
            if given and not parameter.requires_grad:
                why = "has a gradient on another learner: freeze it on all of them in the same step"
                raise RuntimeError(f"parameter {flat.names[index % len(flat.segments)]} is frozen here and {why}")
            if given:
                parameter.grad = flat.grad_views[index]

    def _before_call(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        frame = sys._getframe(1)
        self.learner.check_own("step after the evaluation")
        if self.learner.hooks_paused or not self._watch.begin_call(frame):
            return None
        closure = closure_of(args, kwargs)
        self._is_training = closure is not None or self._watch.num_passes > 0 or not creates_states_only(optimizer)
        if not self._is_training:
            return None
        try:
            self._before_step(closure)
        except BaseException:
            self._watch.end_call(frame)
            raise
        return None if closure is None else with_closure(args, kwargs, partial(self._evaluate, closure))

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """The result of a closure, after whose passes gradients are an average. Observers see the first in a step."""
        result = closure()
        self._check_complete()
        self._watch.check_rows()
        self._observe()
        self._watching = ()
        return result

    @outside_modes
    def _observe(self) -> None:
        sent = self.learner.comm.bytes_sent  # without what observers send
        try:
            for observer in self._watching:
                observer.before_step(self.learner)
        finally:
            self.learner.comm.bytes_sent = sent

    def _after_call(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._watch.end_call(sys._getframe(1)) and self._is_training:
            self._after_step()

    @override
    def _join_average(self) -> None:
        """Average zeros for learners without a backward pass in this step, because the other learners wait for them."""
        learner, watch, buckets = self.learner, self._watch, self._buckets
        learner.num_samples = self.num_samples
        if buckets is None or not self.strategy.plan(learner.step).averages_gradients:
            return
        if buckets.paused and not watch.asks_average and not buckets.lacking_rows:
            return  # nobody averages
        if watch.keeps_average() and not buckets.lacking_rows and not self._samples.is_anew:
            return
        counts_L = own_samples(learner) if self.counts_samples else torch.ones(1, dtype=torch.float64, device="cpu")
        has_no_samples = self.counts_samples and not counts_L[buckets.lacking_rows or slice(None)].any()
        if has_no_samples or not (watch.averaged or watch.needs_none() or has_gradients(learner.flat, shared=True)):
            buckets.finish_without_pass()

    def _check_complete(self) -> None:
        """Take part in an average. Refuse passes of a step that do not fit: of other samples, or of some learners."""
        buckets, watch, plan = self._buckets, self._watch, self.strategy.plan(self.learner.step)
        self._join_average()
        self._samples.check()
        lacking = buckets.lacking_rows if buckets is not None and plan.averages_gradients else []
        if lacking and (watch.averaged or watch.had_pause):
            refuse_lacking(self.strategy.name, lacking, len(self.models), is_late=watch.has_average)
        watch.check_passes()

    @outside_modes
    def _before_step(self, closure: Callable[[], Any] | None) -> None:
        strategy, learner = self.strategy, self.learner
        self._weight_step.average(None)  # here, because it refuses a mode of torch before anything has changed
        learner.num_samples = self.num_samples
        if self.num_samples is not None and not self.counts_samples:
            text = "counts no samples, so num_samples has no effect: pass weights='samples', or to gossip Weighted(...)"
            warnings.warn(f"{strategy.name} {text}", stacklevel=5)
        if learner.flat.shards is not None:
            learner.flat.shards.reshard()
        if closure is None:
            self._check_complete()
            self._state_sync.check_buffers(learner.step)
        self._watch.before_step(closure)
        if closure is None and strategy.traits.stays_identical and getattr(learner.optimizer, "process_group", None):
            check_divided(learner)
        strategy.restore_weights(learner)
        if self._new_order is not None:
            self._lay_out(self._new_order)  # safe here: no transfer is in progress, and no graph uses the old layout
            self._new_order, self._laid_out = None, True
        self._watching = self.observers
        if closure is None:
            self._observe()
        last = next(reversed(learner.optimizer._optimizer_step_pre_hooks))
        # Code of the program that runs before the weights are stepped must find them averaged.
        at_once = last != self._last_hook or type(learner.optimizer).step is not FusedOptimizer.step
        with self._span("before_step"):
            self._weight_step.average(strategy.before_step(learner), at_once=at_once)

    @outside_modes
    def _after_step(self) -> None:
        self._watch.after_optimizer()
        self._watching = self.observers
        self.learner.step += 1
        self.learner.num_samples, self.num_samples = self.num_samples, None  # the next batch may have another size
        self.phases.num_steps += 1
        with self._span("after_step"):
            self.strategy.after_step(self.learner)
            if self.strategy.plan(self.learner.step - 1).weights:
                self._state_sync.sync()
            self._state_sync.sync_moments()
        if (new := self.learner.comm.admit(self.learner.step)) is not None:  # a learner has asked to join
            give_state(self.learner, new, self._state_sync, self.state_dict)
        # Kernels write through the flat buffer. The new version makes autograd refuse a graph of the old weights.
        torch.autograd.graph.increment_version([*self.learner.flat.parameters, self.learner.flat.param_LP])
        self._watch.end_step()

    def _lay_out(self, order: list[int]) -> None:
        self.learner.flat.reorder(order)
        if self._buckets is not None:
            self._buckets.rebuild()


class _ForwardHook(Hook):
    """Calls strategy and observers before a forward pass of all learners that records gradients.

    A call of ``handle.model`` is one. So is a loop that calls each of ``handle.models`` once: its first call counts.
    """

    def __init__(self, handle: HookedDistributed) -> None:
        reason = "ddpcore calls a strategy in the forward pass: call torch.compile(model), then distribute()"
        exclude_from_compilation(_ForwardHook, "__call__", reason=reason)
        exclude_from_compilation(_LeaveHook, "__call__", reason=reason)
        super().__init__(handle)
        # Learners' models that ran since the last call of the strategy: inside no_sync, and outside.
        self._ran: dict[bool, set[int]] = {True: set(), False: set()}

    @override
    def __call__(self, module: nn.Module, *values: Any) -> None:
        handle = self._handle()
        if handle is None or handle._is_inside or handle.learner.hooks_paused:
            return
        if handle._watch.step_has_failed():
            handle._watching = handle.observers
            handle.strategy.restore_weights(handle.learner)
        if not torch.is_grad_enabled():
            return  # no check of eval mode: a program may train with frozen batch norm
        if isinstance(module, LearnerModels) and module.rows.start:
            handle._is_inside = True  # in a loop over split(), which is one pass
            return
        if (shards := handle.learner.flat.shards) is not None and torch._C._current_graph_task_id() == -1:
            shards.reshard()  # an evaluation may have left gathered weights, which the strategy may change
        if torch._C._current_graph_task_id() != -1 or is_traced() or not handle._watch.is_own_pass(module):
            return  # a backward pass that computes activations again (checkpointing) begins no step
        handle._is_inside = isinstance(module, LearnerModels)
        buckets, models = handle._buckets, handle.models
        if not handle._watch.num_passes:  # of this step
            self._ran = {True: set(), False: set()}
        ran = self._ran[buckets is not None and buckets.paused]
        is_new = handle._is_inside or not ran or id(module) in ran
        if buckets is not None and not buckets.paused and (buckets.is_open or id(module) in ran):
            # A learner may call its model repeatedly: then its next backward pass begins anew. An open pass has failed.
            is_new = buckets.is_open or not buckets.lacking_rows
        if is_new:
            ran.clear()
        ran |= set(map(id, models)) if handle._is_inside else {id(module)}
        if is_new:
            handle.before_forward()
        elif handle.strategy.traits.acts_in_forward:  # a read of a state may have removed the noise
            handle.strategy.before_forward(handle.learner)


class _LeaveHook(Hook):
    """After a call of ``handle.model``, of virtual learners also after an error."""

    @override
    def __call__(self, module: nn.Module, *values: Any) -> None:
        if (handle := self._handle()) is not None:
            handle._is_inside = False
            handle.phases.end_forward(module, *values)
