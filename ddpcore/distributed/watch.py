"""The checks while a model trains: what the loop does that a strategy would not see, and numbers that are not finite.

Errors name the cause, and come before a step changes any weight. docs/performance.md says what they cost.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import stateless
from torch.utils.weak import TensorWeakRef

from ddpcore.distributed.alike import EVERY, FIRST, bits_of, check_alike, sampled_columns
from ddpcore.distributed.guards import callers, num_registered, register, wrapper_of
from ddpcore.distributed.resets import ResetWatch, check_modes, check_norms
from ddpcore.optim.base import FusedOptimizer
from ddpcore.optim.checks import is_capturing
from ddpcore.parameters.flat import LARGE, gradient_of, version_of
from ddpcore.parameters.hooks import exclude_from_compilation, weakly
from ddpcore.parameters.shards import local
from ddpcore.strategies.base import Strategy
from ddpcore.strategies.learner import Learner, NonFinite, NonFiniteError, row_sums, suspects
from ddpcore.strategies.ssgd import own_samples

_kind_of = attrgetter("dtype", "shape")


class LoopWatch:
    """Checks forward passes, gradients, weights and calls of ``step()`` of one handle. It is the ``learner.watch``.

    ``found`` lists gradients that were not finite, by step. Averages are in the list of all ranks, and a gradient of
    one learner is in the list of its process. If the average of a group is not finite, a rank names its own learners
    whose gradients are not, or None for the average. ``has_average``: gradients of this step are an average.
    """

    sample: Tensor | None  # weights at a forward pass of a step, from the second one on

    def __init__(self, learner: Learner, strategy: Strategy, on_nonfinite: str) -> None:
        flat, models = learner.flat, learner.models
        self.learner, self._flat, self._strategy, self._mode = learner, flat, strategy, on_nonfinite
        self._members = set(map(id, flat.parameters))
        self._known = {id(parameter) for model in models for parameter in model.parameters()}
        self._frame: FrameType | None = None  # the outermost call of step(); it may have ended by an exception
        register(self)
        self._read_structure()
        self._segments: object = None
        self._check_buffers()
        self._called: set[bool] = set()  # False: learner 0's model was called; True: another learner's model was
        self._num_pauses = 0  # no_sync contexts that are open
        self._is_apart = False  # whether a step had no average, so that weights may differ
        self.resets = ResetWatch(flat) if flat.num_rows > 1 else None
        self.restart()
        self._outside: dict[int, TensorWeakRef] = {}  # gradients that were averaged elsewhere, by the parameter's id
        self._stepped: list[int] = []  # versions of the averaged gradients at the end of the last step
        self._sent: tuple[list[int], Tensor | None] = [], None  # versions, and some weights, when they were sent
        self._traits = strategy.traits  # read once, because each read makes them anew
        # [L] for each message of gradients by its first column, before its average: of the last pass before the step
        self.sums: dict[int, Tensor] = {}
        self._norms: list[Tensor] = []  # see check_norms
        self.found: list[NonFinite] = []
        self._has_buffers = any(True for model in models for _ in model.buffers())
        self._kept: list[list[Tensor]] = []  # copies of each model's buffers
        if on_nonfinite == "quarantine":
            strategy.quarantine(set())
        exclude_from_compilation(LoopWatch, "_note_backward", recursive=False)
        flat.on_gradients.append(self._note_backward)
        note = weakly(self._note_backward)
        self._first_hooks = [one.register_post_accumulate_grad_hook(note) for one in flat.parameters]
        if self.resets is not None:  # a compiled loop runs its notes, too
            exclude_from_compilation(ResetWatch, "note", "note_whole", "note_all", "_end_pass", recursive=False)
            flat.before_gradients = self.resets.note
        if self.resets is not None and not self._traits.averages_gradients:
            flat.on_gradients.append(self.resets.note_whole)
            note = self.resets.hook()
            for parameter in flat.parameters:
                parameter.register_post_accumulate_grad_hook(note)
        learner.watch = self

    # ---- calls of step(): only the outermost is a step of training ----
    # A subclass whose step() calls super().step() runs the hooks twice, and an optimizer that wraps another steps the
    # same parameters by it.

    def begin_call(self, frame: FrameType) -> bool:
        """``frame`` belongs to a call of ``step()``. Returns whether it is the outermost call."""
        is_outermost = not self.has_called(frame)
        if is_outermost:
            self._frame, self._thread = frame, threading.get_ident()
        return is_outermost

    def end_call(self, frame: FrameType) -> bool:
        """Returns whether ``frame`` is the outermost call, which ends now, or is no step of training."""
        is_outermost = self._frame is frame
        self._frame = None if is_outermost else self._frame
        return is_outermost

    def has_called(self, frame: FrameType) -> bool:
        """Whether the outermost call has called ``frame``."""
        return self._frame is not None and any(one is self._frame for one in callers(frame))

    def step_has_failed(self) -> bool:
        """Whether the last call of ``step()`` ended by an exception, which is then forgotten."""
        if self._frame is None or self._thread != threading.get_ident() or self.has_called(sys._getframe()):
            return False
        self._frame = None
        return True

    # ---- before a forward pass ----

    def is_own_pass(self, module: nn.Module) -> bool:
        """Whether the forward pass of a model that begins uses the learner's weights, in a plain autograd graph.

        RuntimeError: parameters were added or replaced, or DistributedDataParallel wraps the model.
        """
        if torch._C._functorch.maybe_current_level() is not None:
            return False  # torch.func.grad or vmap
        ddp = DistributedDataParallel._active_ddp_module
        if ddp is not None and not set(self.learner.models).isdisjoint(ddp.modules()):
            what = "DistributedDataParallel wraps a model that distribute() trains, so gradients are averaged twice"
            raise RuntimeError(f"{what}: call the model without it")
        if self._registered != num_registered() or self._ids != list(map(id, map(dict.get, self._owners, self._names))):
            if any(one.f_code is stateless._functional_call.__code__ for one in callers(sys._getframe())):
                return False  # torch.func.functional_call has replaced the parameters for this pass
            self._check_structure()
            self._read_structure()
        self._called.add(module is not self.learner.models[0])
        return True

    def _read_structure(self) -> None:
        modules = [module for model in self.learner.models for module in model.modules()]
        modules = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
        self._places = [(module, name, value) for module in modules for name, value in module._parameters.items()]
        self._owners = [module._parameters for module, _, _ in self._places]
        self._names = [name for _, name, _ in self._places]
        self._ids = [id(value) for _, _, value in self._places]
        self._registered = num_registered()
        renormalizing = [module for module in modules if getattr(module, "max_norm", None) is not None]
        self.renormalized = {id(one) for module in renormalizing for one in module._parameters.values()}

    def _check_structure(self) -> None:
        """Check parameters. Pruning and parametrizations may rename them, and layers may be removed."""
        advice = "do it before distribute(), or change weights in place, with copy_"
        modules, present = {module for model in self.learner.models for module in model.modules()}, set()
        for model in self.learner.models:
            for name, module in model.named_modules():
                if wrapper := wrapper_of(module):
                    raise RuntimeError(f"module {name} was wrapped by {wrapper} after distribute(): {advice}")
            for name, parameter in model.named_parameters():
                present.add(id(parameter))
                if parameter.requires_grad and id(parameter) not in self._known:
                    raise RuntimeError(f"parameter {name} was added or replaced after distribute(): {advice}")
        trained = dict(zip(map(id, self._flat.parameters), self._flat.names * self._flat.num_rows, strict=True))
        for module, key, value in self._places:
            if id(value) in trained and id(value) not in present and module in modules and hasattr(module, key):
                raise RuntimeError(f"parameter {trained[id(value)]} was replaced after distribute(): {advice}")

    def before_pass(self) -> None:
        """Before the strategy is called: check the buffers, and copy batch norm's buffers, which a pass changes."""
        self._check_buffers()
        if self._flat.parameters[0].dtype != self._flat.param_LP.dtype:  # else autograd refuses our gradients
            self.check_parameters()
        if self._mode == "raise" or not self._has_buffers or self.num_passes:
            return
        buffers = [list(map(local, model.buffers())) for model in self.learner.models]
        if [list(map(_kind_of, own)) for own in self._kept] != [list(map(_kind_of, own)) for own in buffers]:
            self._kept = [[buffer.clone() for buffer in own] for own in buffers]
        for kept, own in zip(self._kept, buffers, strict=True):
            torch._foreach_copy_(kept, own)

    def count_pass(self, *, by_weights: bool) -> None:
        """Count a forward pass of a step, which averages weights if ``by_weights``.

        RuntimeError: they were changed repeatedly between passes: a program without ``step()`` would not average. A
        closure may change them, sharpness-aware minimization does once, and embeddings with ``max_norm`` in each pass.
        """
        self.num_passes += 1
        num = self.num_passes
        if not by_weights or num < 2 or self.has_called(sys._getframe()):
            return
        if num > 3 and num & (num - 1):
            return  # compare seldom, because the host waits for the device
        before, self.sample = self.sample, self._weight_bits()
        self._num_changes += before is not None and not torch.equal(before, self.sample)
        if self._num_changes > 1:
            what = "weights were changed between several forward passes without optimizer.step()"
            advice = "change them by the optimizer that distribute() got, or run such passes under no_grad"
            raise RuntimeError(f"{what}, where the strategy acts: {advice}")

    def _weight_bits(self) -> Tensor:
        """Bits of some weights, without those of embeddings with ``max_norm``."""
        columns, flat = self._columns, self._flat
        for one, parameter in zip(flat.segments, flat.parameters, strict=False):  # those of the first learner
            if id(parameter) in self.renormalized:
                columns = columns[(columns < one.offset) | (columns >= one.offset + one.numel)]
        return bits_of(flat.param_LP, columns)

    def restart(self) -> None:
        """A new step begins, or other states were loaded."""
        if self.resets is not None:
            self.resets.restart()
        self.num_passes, self.sample = 0, None  # forward passes of this step that record gradients
        self._num_changes = 0  # how often the weights were others than in an earlier pass of this step
        self.asks_average = False  # whether it had a sync() inside no_sync(), where other ranks average
        self.has_average = self.had_pause = False  # the latter: gradients came inside a no_sync that has ended
        self._is_late = False  # whether a pass inside no_sync has added to that average

    # ---- gradients ----

    def begin_pause(self, *, averages: bool) -> None:
        """At the start of ``no_sync``, which asks for no average, or of ``sync`` inside it, which asks for one."""
        self.keeps_average()
        self.asks_average = averages or (self.asks_average and self._num_pauses > 0)
        self._num_pauses += 1

    def end_pause(self, num_gradients: int) -> None:
        """At the end of ``no_sync``, in which so many gradients came."""
        self._num_pauses -= 1
        self.had_pause |= num_gradients > 0 and self.num_passes > 0
        self._is_late |= self.has_average and num_gradients > 0

    def _note_backward(self, *_: Tensor) -> None:
        self.learner.had_backward = True

    def check_alike(self) -> None:
        """When gradients are averaged: see :func:`ddpcore.distributed.alike.check_alike`. Collective."""
        if self._traits.stays_identical:
            self._check_buffers()  # a rank without a forward pass has not yet
            check_alike(self.learner, self._columns, is_apart=self._is_apart)

    def note_average(self) -> None:
        """After a backward pass that averaged gradients."""
        self.has_average, self._is_late = True, False
        self._outside = {
            id(parameter): TensorWeakRef(parameter.grad)
            for parameter, view in zip(self._flat.parameters, self._flat.grad_views, strict=True)
            if parameter.grad is not None and parameter.grad is not view
        }
        if self.resets is not None:
            self.resets.note_all()

    def _averages(self) -> list[Tensor]:
        """The tensors that hold the last average, by parameter."""
        if not self._outside:
            return [*self._flat.grad_views]
        found = (None if ref is None else ref() for ref in map(self._outside.get, self._flat.index))
        return [view if one is None else one for view, one in zip(self._flat.grad_views, found, strict=True)]

    @property
    def averaged(self) -> bool:
        """Whether gradients of this step are an average, or need not be: in a context that asks for none."""
        is_free = self.had_pause and self.learner.comm.num_learners == 1
        return self.has_average or is_free or (self._num_pauses > 0 and not self.asks_average)

    def keeps_average(self) -> bool:
        """Whether gradients are an average: of a step that was left out they are not, because they are None now."""
        if self.has_average and all(parameter.grad is None for parameter in self._flat.parameters):
            self.has_average = self.asks_average = self._is_late = False
        return self.has_average

    def needs_none(self) -> bool:
        """Whether a step needs no average: without a pass it repeats the last one's gradients, or no rank has any."""
        comm, grads = self.learner.comm, map(gradient_of, self._flat.parameters)
        has_some = any(grad is not None for grad in grads) or len(comm.learners) == comm.num_learners
        return has_some and not self.num_passes and not self._has_others()

    def _has_others(self) -> bool:
        """Whether there are gradients that are not the last step's averages."""
        averages = self._averages()
        unchanged = list(map(version_of, averages)) == self._stepped
        pairs = zip(map(gradient_of, self._flat.parameters), averages, strict=True)
        return any(grad is not None and not (unchanged and grad is average) for grad, average in pairs)

    def check_passes(self) -> None:
        """Check the passes of a step. If it averages gradients, it did so or only repeats the last step's averages."""
        averages = self._strategy.plan(self.learner.step).averages_gradients
        if len(self.learner.models) > 1 and not self.has_average and self._is_first_alone(averages):
            advice = "call handle.model(x) with inputs [learners, batch, ...], or each of handle.models"
            raise RuntimeError(f"only the model of learner 0 was called, or parts of it: {advice}")
        is_averaged = self.averaged if self._traits.group == 1 else self.has_average  # a group's learners stay alike
        if averages and not is_averaged and (self.had_pause or self._has_others()):  # shards add up in the same version
            raise RuntimeError(f"{self._strategy.name}: {self._why_not()}")
        if self._is_late:
            what = "a backward pass inside no_sync() came after the pass that averages"
            advice = "put no_sync() around the first passes of a step, not around the last one"
            raise RuntimeError(f"{what}, so its gradients are this learner's alone: {advice}")
        if self._traits.acts_in_forward and not self.num_passes:
            what = f"{self._strategy.name} acts before a forward pass and saw none in this step"
            raise RuntimeError(f"{what}: call the model itself, not model.forward or a part of it")

    def _why_not(self) -> str:
        """Why gradients were not averaged."""
        why = "gradients were set or changed without a backward pass and so not averaged: call backward() before step()"
        if self.had_pause or self._num_pauses:
            return (
                "all backward passes of this step were inside no_sync(), so nothing was averaged: run the last one "
                f"outside, also of a shorter last window{', or call step() inside' if self._traits.group == 1 else ''}"
            )
        if self._flat.num_rows > 1:
            idle = [str(i) for i, row in enumerate(self._rows()) if all(parameter.grad is None for parameter in row)]
            of = f" (learner {', '.join(idle)} has no gradient)" if idle else ""
            why += f", once a learner{of}, inside no_sync() for all but its last (checkpoints: use_reentrant=False)"
        return why

    def _rows(self) -> list[Sequence[Tensor]]:
        num, parameters = len(self._flat.segments), self._flat.parameters
        return [parameters[begin : begin + num] for begin in range(0, len(parameters), num)]

    # ---- a step ----

    def before_step(self, closure: Callable[[], Any] | None) -> None:
        """Check everything that a step uses: RuntimeError after misuse, or NonFiniteError, before anything has changed.

        Collective if averages of all learners are not finite. Gradients of a ``closure`` do not exist yet.
        """
        strategy, plan = self._strategy, self._strategy.plan(self.learner.step)
        if closure is not None and not self._traits.takes_closure:
            what = f"{strategy.name} takes no closure: call backward() and then step()"
            advice = "take ddpcore.integrations.lightning.GossipStrategy, or set automatic_optimization = False"
            raise RuntimeError(f"{what}; in Lightning {advice}")
        self.check_parameters()
        self._check_optimized()
        if self.resets is not None and (self.learner.step < FIRST or not self.learner.step % EVERY):
            check_modes(self.learner.models, self._rows())
        if closure is None:
            is_unchanged = self.check_rows()
            self._check_finite(one_row=is_unchanged and plan.covers_all_learners and bool(self.sums))

    def check_rows(self) -> bool:
        """Whether nothing changed gradients after the passes. RuntimeError: they were reset or changed for a part."""
        if self.resets is None:
            return True
        self.resets.check()
        is_changed = self.resets.check_changed(self._flat)
        if is_changed and not is_capturing(self._flat.param_LP):
            check_norms(self._norms, self._rows())
        return not is_changed

    def _is_first_alone(self, averages: bool) -> bool:
        """Whether only the model of learner 0 was called, or no model, and only its parameters have gradients."""
        if self._called or averages:  # _check_averaged checks others
            is_alone = self._called == {False}
        else:
            has_grad = [gradient is not None for gradient in map(gradient_of, self._flat.parameters)]
            is_alone = any(has_grad) and not any(has_grad[len(self._flat.segments) :])
        return is_alone and not (self._traits.weights == "samples" and not own_samples(self.learner)[1:].any())

    def after_optimizer(self) -> None:
        """After the optimizer's step."""
        self._is_apart |= not self.has_average
        self.restart()

    def end_step(self) -> None:
        """At the end of a step, whose averaged gradients a later step may use again."""
        while self._first_hooks:
            self._first_hooks.pop().remove()
        if self.resets is not None:
            self.resets.begin_step()
        if self._traits.averages_gradients:
            self._outside = self._outside if self._segments is self._flat.segments else {}  # moved into the buffer
            self._stepped = list(map(version_of, self._averages()))

    def _check_buffers(self) -> None:
        """Check that both flat buffers are where they were allocated."""
        flat = self._flat
        if self._segments is not flat.segments:  # allocated anew
            self._segments, self._columns = flat.segments, sampled_columns(flat)
            self._layouts = list(map(Tensor.numel, flat.param_views)), list(map(Tensor.stride, flat.param_views))
            index = next((index for index, size in enumerate(self._layouts[0]) if size), 0)
            self._first = index, flat.segments[index].offset * flat.param_LP.element_size()
        index, offset = self._first  # of the first segment that is not empty
        if flat.param_LP.data_ptr() + offset != flat.param_pointers[index]:
            raise RuntimeError(_MOVED.format("parameters"))
        if flat.grad_start is not None and flat.grad_LP.data_ptr() != flat.grad_start:
            raise RuntimeError(_MOVED.format("gradients"))

    def check_parameters(self) -> None:
        """Check that each parameter is still its view of the flat buffer."""
        flat = self._flat
        self._check_buffers()
        if self.learner.lent:
            return
        if flat.grad_start is not None and not flat.has_grads_in_place():
            flat.renew_grad_views()
        parts, known = flat.locals(flat.parameters), ([*flat.param_pointers], *self._layouts)
        if (found := tuple(list(map(read, parts)) for read in (Tensor.data_ptr, Tensor.numel, Tensor.stride))) == known:
            return
        places = zip(flat.names * flat.num_rows, zip(*found, strict=True), zip(*known, strict=True), strict=True)
        name = next(name for name, own, place in places if own != place)
        causes = ".to(), .t_(), .data =, a parametrized one assigned, prune.remove or vector_to_parameters"
        raise RuntimeError(f"parameter {name} has left the flat buffer ({causes}): change weights in place, with copy_")

    def _check_optimized(self) -> None:
        """Check that the optimizer steps no parameter that was added."""
        for group in self.learner.optimizer.param_groups:
            if self._members.issuperset(map(id, group["params"])):
                continue
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) not in self._members:
                    what = f"a parameter of shape {list(parameter.shape)} was unfrozen or added after distribute()"
                    advice = "do that before distribute(), and freeze a parameter by a zero learning rate"
                    raise RuntimeError(f"{what}: {advice}")

    # ---- numbers that are not finite ----

    def _check_finite(self, *, one_row: bool) -> None:
        """Check the gradients that a step uses, of which one row says all if ``one_row``.

        Steps of a ``GradScaler`` are the scaler's, and a CUDA graph is not read.
        """
        learner, optimizer = self.learner, self.learner.optimizer
        sums, self.sums = list(self.sums.values()), {}
        if getattr(optimizer, "found_inf", None) is not None or is_capturing(learner.flat.param_LP):
            return
        if not (named := learner.named_nonfinite(self._suspects(one_row), gradients=True)):
            return
        first, comm = named[min(named)], learner.comm
        is_of_all = bool(sums) and self._strategy.plan(learner.step).covers_all_learners
        if is_of_all:
            total, shards = torch.stack(sums).sum(dim=0).double(), learner.flat.shards
            all_sums = comm.gather(total if shards is None else shards.add_(total), learner.step)
            found = [self._event(comm.members[place], first) for place in suspects(all_sums)]
        else:  # other groups know nothing of it, so nothing is gathered
            own = set(suspects(torch.stack(sums).sum(dim=0)) if sums else named)
            found = [self._event(comm.ids[row], name) for row, name in named.items() if row in own]
        found = found or [self._event(None, first)]
        if self._mode == "raise":
            raise NonFiniteError(found)
        self.found += found
        self._leave_out(found, range(learner.flat.num_rows) if is_of_all else list(named))

    def _event(self, learner: int | None, name: str, what: str = "gradient") -> NonFinite:
        step, action = (self.learner.step + 1, self._mode) if what == "gradient" else (self.learner.step, "raise")
        return NonFinite(step=step, learner=learner, parameter=name, what=what, action=action)

    def _suspects(self, one_row: bool) -> list[int]:
        """Rows whose gradients may not be finite, from one sum over the gradients."""
        flat = self._flat
        gradients = list(map(gradient_of, flat.parameters))
        one_row = one_row and all(map(is_, gradients, self._averages()))  # gather_grads counts references
        if isinstance(self.learner.optimizer, FusedOptimizer) and flat.shards is None:
            flat.gather_grads(left=flat.own_grads(LARGE))  # as the step itself begins
            gradients = list(map(gradient_of, flat.parameters))
        if flat.grad_start is not None and all(map(is_, gradients, flat.grad_views)):
            sums = row_sums(flat.grad_LP[:1] if one_row else flat.grad_LP)
        else:
            num, rows = len(flat.segments), 1 if one_row else flat.num_rows
            sums = torch.stack([_sum_of(gradients[row * num : (row + 1) * num]) for row in range(rows)])
        found = suspects(sums)
        return list(range(flat.num_rows)) if one_row and found else found

    def _leave_out(self, found: list[NonFinite], rows: range | list[int]) -> None:
        """Remove the gradients of some rows, so that any optimizer leaves these parameters and their states alone."""
        learner = self.learner
        for row in rows:
            for parameter in learner.models[row].parameters():
                parameter.grad = None
        held = {one: row for row, one in enumerate(learner.comm.ids)}
        for row in [held[event.learner] for event in found if event.learner in held]:
            if self._kept:
                torch._foreach_copy_(list(map(local, learner.models[row].buffers())), self._kept[row])
        if self._mode == "quarantine":
            self._strategy.quarantine({event.learner for event in found if event.learner is not None})

    def check_sent(self, columns_LX: Tensor | None) -> None:
        """See :meth:`ddpcore.strategies.learner.Learner.check_sent`."""
        learner, weights_LX = self.learner, self._flat.param_LP if columns_LX is None else columns_LX
        has_others = learner.comm.num_learners > 1 and not is_capturing(weights_LX)
        bits = self._weight_bits() if has_others and columns_LX is None else None
        self._sent = list(map(version_of, self._flat.parameters)), bits
        if has_others and (named := learner.named_nonfinite(suspects(row_sums(weights_LX)), gradients=False)):
            raise NonFiniteError([self._event(learner.comm.ids[row], name, "weights") for row, name in named.items()])

    def check_unchanged(self) -> None:
        """See :meth:`ddpcore.strategies.learner.Learner.check_unchanged`."""
        versions, bits = self._sent
        is_other = versions != list(map(version_of, self._flat.parameters))
        if is_other or (bits is not None and not torch.equal(bits, self._weight_bits())):
            what = "weights were changed between a forward pass and the next step, while neighbours read them"
            advice = "change them after a step, evaluate under torch.no_grad(), or take order='adapt_then_combine'"
            raise RuntimeError(f"{what}: {self.learner.advice(advice)}")


_MOVED = (
    "the memory of the {} has moved (share_memory(), or a parameter or gradient was sent to another process), so other "
    "learners do not see it: send a clone, parameter.detach().clone()"
)


def _sum_of(gradients: Sequence[Tensor | None]) -> Tensor:
    given = [one._values() if one.is_sparse else local(one) for one in gradients if one is not None]
    sums = [row_sums(one.reshape(1, -1)) for one in given]
    return torch.stack(sums).sum() if sums else torch.zeros(())
