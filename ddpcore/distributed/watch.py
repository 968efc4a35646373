"""The checks while a model trains: what the loop does that a strategy would not see, and numbers that are not finite.

Errors name the cause, and come before a step changes any weight. docs/architecture.md says what each check costs.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter, is_
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import stateless
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ddpcore.distributed.guards import wrapper_of
from ddpcore.ops.dtypes import wide
from ddpcore.optim.base import FusedOptimizer
from ddpcore.optim.weight_step import LARGE
from ddpcore.strategies.base import Strategy
from ddpcore.strategies.learner import (
    Learner,
    NonFinite,
    NonFiniteError,
    first_nonfinite,
    is_capturing,
    row_sums,
    sampled,
    suspects,
)

NUM_PARTS = 32  # of large weights: one of them is read before each send
HUGE = 1e12  # a sum of gradients beyond which a step may overflow, so that all its weights are read
_gradient_of, _version_of = attrgetter("grad"), attrgetter("_version")

_WATCHES = WeakTensorKeyDictionary()  # a reference to the LoopWatch of each parameter that distribute() has moved
_OWN: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # the optimizers that distribute() got
_OTHERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()  # number of parameters
_hooks: list[Any] = []  # on all optimizers and modules of the process, from the first LoopWatch on
_num_registered = 0  # parameters and modules that any model has registered since then


def is_distributed(parameters: Iterable[Tensor]) -> bool:
    """Whether a ``distribute`` call has moved one of the parameters to a flat buffer."""
    return any(parameter in _WATCHES for parameter in parameters)


class LoopWatch:
    """Checks forward passes, gradients, weights and calls of ``step()`` of one handle.

    Args:
        learner: weights, gradients and optimizer. It gets this object as its ``watch``.
        strategy: the strategy, which quarantines.
        on_nonfinite: one of ``ON_NONFINITE``, checked.
        by_buckets: whether backward passes may average gradients.

    Attributes:
        num_passes: forward passes of this step that record gradients.
        found: gradients that were not finite, by step. Averaged gradients are alike on all ranks, and so is this list
            then; else it has only learners of this process. In a group whose average is not finite, a rank names its
            own learners, or the average (None) if their gradients were finite.
    """

    def __init__(self, learner: Learner, strategy: Strategy, on_nonfinite: str, *, by_buckets: bool) -> None:
        flat, models = learner.flat, learner.models
        self._learner, self._flat, self._strategy, self._mode = learner, flat, strategy, on_nonfinite
        self._members = set(map(id, flat.parameters))
        self._known = {id(parameter) for model in models for parameter in model.parameters()}
        self._frame: FrameType | None = None  # the outermost call of step(); it may have ended by an exception
        self._watch_process()
        self._read_structure()
        self._segments: object = None
        self.num_passes = 0
        self._sample: Tensor | None = None
        self._stepped: list[int] = []  # versions of the gradients' views at the end of the last step
        self._noted: dict[int, int] = {}  # those of virtual learners after their last pass, by the parameter's id
        self._written: list[int] = []  # versions of the weights after the last step
        self._sent: list[int] = []  # when they were sent
        self._must_read = True  # whether weights may have become infinite
        self._read_at = -1  # the step in which they were last checked
        self._sums: dict[int, Tensor] = {}  # [L] for each message by its first column, before its average
        self.found: list[NonFinite] = []
        self._has_buffers = any(self._buffers(row) for row in range(len(models)))
        self._kept: list[list[Tensor]] = []  # copies of each model's buffers
        if on_nonfinite == "quarantine":
            strategy.quarantine(set())
        if flat.num_rows > 1 and not by_buckets:
            flat.on_gradients.append(self._note_all)
            note = partial(_note, self._noted)
            for parameter in flat.parameters:
                parameter.register_post_accumulate_grad_hook(note)
        learner.watch = self

    def _watch_process(self) -> None:
        optimizer = self._learner.optimizer
        _WATCHES.update(dict.fromkeys(self._flat.parameters, weakref.ref(self)))
        _OWN.add(optimizer)
        _OTHERS.clear()
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_check_step))
            _hooks.append(nn.modules.module.register_module_parameter_registration_hook(_count))
            _hooks.append(nn.modules.module.register_module_module_registration_hook(_count))

    # ---- calls of step(): only the outermost is a step of training ----
    # A subclass whose step() calls super().step() runs the hooks twice, and an optimizer that wraps another steps the
    # same parameters by it.

    def begin_call(self, frame: FrameType) -> bool:
        """``frame`` is that of a call of ``step()``. Returns whether it is the outermost call."""
        if self._is_inside(frame):
            return False
        self._frame = frame
        return True

    def end_call(self, frame: FrameType) -> bool:
        """Returns whether ``frame`` is the outermost call, which ends now."""
        if self._frame is not frame:
            return False
        self._frame = None
        return True

    def cancel_call(self) -> None:
        """The outermost call is no step of training, or it raised an error."""
        self._frame = None

    def _is_inside(self, frame: FrameType | None) -> bool:
        if self._frame is None:
            return False
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None

    def creates_states_only(self) -> bool:
        """Whether there was no forward pass, and all learning rates and all gradients are zero.

        ``torch.distributed.checkpoint`` takes such a step to make the optimizer create its states.
        """
        groups = self._learner.optimizer.param_groups
        if self.num_passes or not all("lr" in group and float(group["lr"]) == 0 for group in groups):
            return False
        gradients = [parameter.grad for group in groups for parameter in group["params"] if parameter.grad is not None]
        return bool(gradients) and not any(bool(gradient.any()) for gradient in gradients)

    # ---- before a forward pass ----

    def is_own_pass(self) -> bool:
        """Whether the forward pass that begins uses the weights of this learner, in a plain autograd graph.

        Raises:
            RuntimeError: parameters were added or replaced, or DistributedDataParallel wraps the model.
        """
        if torch._C._functorch.maybe_current_level() is not None:
            return False  # torch.func.grad or vmap
        ddp = DistributedDataParallel._active_ddp_module
        if ddp is not None and not set(self._learner.models).isdisjoint(ddp.modules()):
            raise RuntimeError(
                "DistributedDataParallel wraps a model that distribute() trains, so gradients are averaged twice: call "
                "the model without it"
            )
        if self._registered != _num_registered or self._ids != list(map(id, map(dict.get, self._owners, self._names))):
            if _calls(stateless._functional_call.__code__):
                return False  # torch.func.functional_call has replaced the parameters for this pass
            self._check_structure()
            self._read_structure()
        return True

    def _read_structure(self) -> None:
        modules = [module for module in self._modules() if not isinstance(module, torch.jit.ScriptModule)]
        self._places = [(module, name, value) for module in modules for name, value in module._parameters.items()]
        self._owners = [module._parameters for module, _, _ in self._places]
        self._names = [name for _, name, _ in self._places]
        self._ids = [id(value) for _, _, value in self._places]
        self._registered = _num_registered

    def _modules(self) -> Iterator[nn.Module]:
        return (module for model in self._learner.models for module in model.modules())

    def _check_structure(self) -> None:
        """Check parameters. Pruning and parametrizations may rename them, and layers may be removed."""
        advice = "do it before distribute(), or change weights in place, with copy_"
        modules, present = set(self._modules()), set()
        for model in self._learner.models:
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
        """Before the strategy is called: check the buffers, and copy those of batch norm, which a pass changes."""
        self._check_buffers()
        if self._mode == "raise" or not self._has_buffers or self.num_passes:
            return
        rows = range(len(self._learner.models))
        if not self._kept:
            self._kept = [[buffer.clone() for buffer in self._buffers(row)] for row in rows]
        for row in rows:
            torch._foreach_copy_(self._kept[row], self._buffers(row))

    def count_pass(self, *, by_weights: bool) -> None:
        """Count a forward pass.

        Args:
            by_weights: whether the strategy averages weights in this step. Then a program that never calls ``step()``
                is refused, because its learners would not average.

        Raises:
            RuntimeError: the weights were changed between forward passes of a step, more than once.
        """
        self.num_passes += 1
        num = self.num_passes
        if not by_weights or num < 2:
            return
        if num == 2:
            self._sample = self._weight_bits()
        elif num > 3 and num & (num - 1):
            return  # compare seldom, because the host waits for the device
        elif self._sample is not None and not torch.equal(self._sample, self._weight_bits()):
            raise RuntimeError(
                "weights were changed between several forward passes without optimizer.step(), so learners would not "
                "average: change them by the optimizer that distribute() got, or run such passes under no_grad"
            )

    def _weight_bits(self) -> Tensor:
        return sampled(self._flat.param_LP.detach()).contiguous().view(torch.uint8).clone()

    def restart(self) -> None:
        """Count the forward passes of a new step. After other weights were loaded, they are read before a send."""
        self.num_passes, self._sample = 0, None

    # ---- gradients ----

    def note_message(self, columns: Tensor) -> None:
        """Before columns ``[L, n]`` of the gradients are averaged. A later pass before the step replaces them."""
        self._sums[int(columns.storage_offset())] = row_sums(sampled(columns))

    def note_average(self, used: Sequence[bool], seen: set[int]) -> None:
        """After a backward pass that averaged gradients.

        Args:
            used: whether each segment had a gradient on any rank in the first step.
            seen: the indices of the parameters that had one here, now.

        Raises:
            RuntimeError: a parameter is frozen for some learners only, or got its first gradient after the first step.
        """
        flat = self._flat
        if len(seen) < len(flat.parameters) or not all(used):
            for index, parameter in enumerate(flat.parameters):
                name, is_used = flat.names[index % len(used)], used[index % len(used)]
                if index in seen and not is_used:
                    raise RuntimeError(
                        f"parameter {name} got a gradient after a first backward pass in which it had none on any "
                        "rank: let it take part in the first step, or freeze it with requires_grad_(False)"
                    )
                if not is_used or index in seen or parameter.grad is not None:
                    continue
                if bool(flat.grad_views[index].any()):
                    raise RuntimeError(
                        f"parameter {name} is frozen here and has a gradient on another learner: freeze it on all of "
                        "them in the same step"
                    )
        if flat.num_rows > 1:
            self._note_all()

    def _note_all(self) -> None:
        grads = map(_gradient_of, self._flat.parameters)
        self._noted |= {
            key: grad._version for key, grad in zip(self._flat.index, grads, strict=True) if grad is not None
        }

    def _check_averaged(self) -> None:
        """Check, if no backward pass averaged gradients, that a step only repeats those of the last step."""
        unchanged = list(map(_version_of, self._flat.grad_views)) == self._stepped
        for parameter, view in zip(self._flat.parameters, self._flat.grad_views, strict=True):
            if parameter.grad is not None and not (unchanged and parameter.grad is view):
                raise RuntimeError(
                    f"{self._strategy.name}: gradients were set or changed without a backward pass and so not "
                    "averaged: call backward() before step()"
                )

    def _check_alike(self) -> bool:
        """Check that what was done to gradients after the backward pass was done for every virtual learner.

        Returns:
            Whether nothing was done.
        """
        flat, noted = self._flat, dict(self._noted)
        self._noted.clear()  # the hooks hold this object
        grads = map(_gradient_of, flat.parameters) if noted else ()
        pairs = zip(flat.index, grads, strict=False)
        versions = {key: grad._version for key, grad in pairs if grad is not None and key in noted}
        changed = [flat.index[key] for key, version in versions.items() if version != noted[key]]
        if not changed:
            return True
        num = len(flat.segments)
        known = [flat.index[key] for key in noted]
        for segment in sorted({index % num for index in changed}):
            rows = {index // num for index in changed if index % num == segment}
            if rows != {index // num for index in known if index % num == segment}:
                raise RuntimeError(
                    f"parameter {flat.names[segment]}: the gradients of learner {', '.join(map(str, sorted(rows)))} "
                    "alone were changed after the backward pass: do what the loop does to a model, such as clipping, "
                    "for each of handle.models"
                )
        return False

    # ---- a step ----

    def before_step(self, closure: Callable[[], Any] | None, *, averaged: bool) -> None:
        """Check everything that a step uses. Collective if averages of all learners are not finite.

        Args:
            closure: of the call of ``step()``. Its gradients do not exist yet.
            averaged: whether a backward pass of this step has averaged gradients, or may leave it out.

        Raises:
            RuntimeError: the loop was misused.
            NonFiniteError: with ``raise``, a gradient is not finite. Nothing has changed.
        """
        strategy, plan = self._strategy, self._strategy.plan(self._learner.step)
        if closure is not None and not strategy.traits.takes_closure:
            raise RuntimeError(f"{strategy.name} takes no closure: call backward() and then step()")
        if closure is None and not averaged and plan.averages_gradients:
            self._check_averaged()
        self._check_parameters()
        self._check_optimized()
        is_unchanged = self._check_alike()
        self._must_read |= closure is not None or self._versions() != self._written
        if closure is None:
            self._check_finite(one_row=is_unchanged and plan.covers_all_learners and bool(self._sums))

    def after_optimizer(self) -> None:
        """After the optimizer's step: weights that change from here on were changed by the program."""
        self._written = self._versions()

    def end_step(self, *, averages_gradients: bool) -> None:
        """At the end of a step, whose averaged gradients a later step may use again."""
        self.restart()
        self._written = self._versions()
        if averages_gradients:
            self._stepped = list(map(_version_of, self._flat.grad_views))

    def _versions(self) -> list[int]:
        return list(map(_version_of, self._flat.parameters))

    def _check_buffers(self) -> None:
        """Check that both flat buffers are where they were allocated."""
        flat = self._flat
        if self._segments is not flat.segments:  # allocated anew
            self._segments, self._grad_start = flat.segments, flat.grad_LP.data_ptr()
            self._sizes = [view.numel() for view in flat.param_views]
            index = next((index for index, size in enumerate(self._sizes) if size), 0)
            self._first = index, flat.segments[index].offset * flat.param_LP.element_size()
        index, offset = self._first  # of the first segment that is not empty
        if flat.param_LP.data_ptr() + offset != flat.param_pointers[index]:
            raise RuntimeError(_MOVED.format("parameters"))
        if flat.grad_LP.data_ptr() != self._grad_start:
            raise RuntimeError(_MOVED.format("gradients"))

    def _check_parameters(self) -> None:
        """Check that each parameter is still its view of the flat buffer."""
        flat = self._flat
        self._check_buffers()
        if tuple(map(Tensor.data_ptr, flat.grad_views)) != flat.grad_pointers:  # the program has set grad.data
            flat.renew_grad_views()
        found = list(map(Tensor.data_ptr, flat.parameters)), list(map(Tensor.numel, flat.parameters))
        if found == ([*flat.param_pointers], self._sizes):
            return
        places = zip(flat.names * flat.num_rows, *found, flat.param_pointers, self._sizes, strict=True)
        name = next(name for name, *own, pointer, size in places if own != [pointer, size])
        raise RuntimeError(
            f"parameter {name} has left the flat buffer (.to(), .data = or vector_to_parameters): change weights in "
            "place, with copy_"
        )

    def _check_optimized(self) -> None:
        """Check that the optimizer steps no parameter that was added."""
        for group in self._learner.optimizer.param_groups:
            if self._members.issuperset(map(id, group["params"])):
                continue
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) not in self._members:
                    raise RuntimeError(
                        f"a parameter of shape {list(parameter.shape)} was unfrozen or added after distribute(): "
                        "do that before distribute(), and freeze a parameter by a zero learning rate"
                    )

    # ---- numbers that are not finite ----

    def _check_finite(self, *, one_row: bool) -> None:
        """Check the gradients that a step uses. Steps of a ``GradScaler`` are the scaler's; a CUDA graph is not read.

        Args:
            one_row: whether the gradients of all learners are alike.
        """
        learner, optimizer = self._learner, self._learner.optimizer
        sums, self._sums = list(self._sums.values()), {}
        if getattr(optimizer, "found_inf", None) is not None or is_capturing(learner.flat.grad_LP):
            self._must_read = True
            return
        rows = learner.living(self._suspects(one_row))
        named = {row: name for row in rows if (name := first_nonfinite(learner.models[row], gradients=True))}
        if not named:
            return
        first, held = named[min(named)], learner.comm.learners
        covers_all_learners = self._strategy.plan(learner.step).covers_all_learners
        if not sums:
            found = [self._event(held[row], name) for row, name in named.items()]
        elif covers_all_learners:
            all_sums = learner.comm.gather(torch.stack(sums).sum(dim=0).double())
            found = [self._event(one, first) for one in suspects(all_sums)]
        else:  # other groups know nothing of it, so nothing is gathered
            own = set(suspects(torch.stack(sums).sum(dim=0)))
            found = [self._event(held[row], name) for row, name in named.items() if row in own]
        found = found or [self._event(None, first)]
        if self._mode == "raise":
            raise NonFiniteError(found)
        self.found += found
        self._leave_out(found, range(learner.flat.num_rows) if sums and covers_all_learners else list(named))

    def _event(self, learner: int | None, name: str, what: str = "gradient") -> NonFinite:
        step, action = (self._learner.step + 1, self._mode) if what == "gradient" else (self._learner.step, "raise")
        return NonFinite(step=step, learner=learner, parameter=name, what=what, action=action)

    def _suspects(self, one_row: bool) -> list[int]:
        """Rows whose gradients may not be finite, from one sum over the gradients."""
        flat = self._flat
        if isinstance(self._learner.optimizer, FusedOptimizer):
            flat.gather_grads(left=flat.own_grads(LARGE))  # as the step itself begins
        gradients = list(map(_gradient_of, flat.parameters))
        if all(map(is_, gradients, flat.grad_views)):
            sums = row_sums(flat.grad_LP[:1] if one_row else flat.grad_LP)
        else:
            num = len(flat.segments)
            sums = torch.stack([_sum_of(gradients[row * num : (row + 1) * num]) for row in range(flat.num_rows)])
        self._must_read |= not bool((sums.abs() < HUGE).all())
        found = suspects(sums)
        return list(range(flat.num_rows)) if one_row and found else found

    def _leave_out(self, found: list[NonFinite], rows: range | list[int]) -> None:
        """Remove the gradients of some rows, so that any optimizer leaves these parameters and their states alone."""
        learner = self._learner
        for row in rows:
            for parameter in learner.models[row].parameters():
                parameter.grad = None
        held = {one: row for row, one in enumerate(learner.comm.learners)}
        for row in [held[event.learner] for event in found if event.learner in held]:
            if self._kept:
                torch._foreach_copy_(self._buffers(row), self._kept[row])
        if self._mode == "quarantine":
            self._strategy.quarantine({event.learner for event in found if event.learner is not None})

    def _buffers(self, row: int) -> list[Tensor]:
        return list(self._learner.models[row].buffers())

    def check_sent(self, columns_LX: Tensor | None) -> None:
        """See :meth:`ddpcore.strategies.learner.Learner.check_sent`."""
        learner, weights_LP = self._learner, self._flat.param_LP
        self._sent = versions = self._versions()
        weights_LX = weights_LP if columns_LX is None else columns_LX
        if learner.comm.num_learners == 1 or is_capturing(weights_LX):
            return
        covers_all = weights_LX.shape == weights_LP.shape
        must_read = self._must_read or versions != self._written or learner.step - self._read_at > 1
        if must_read or not covers_all:
            sums = row_sums(weights_LX)
        else:
            num = -(-self._flat.numel // NUM_PARTS)
            begin = learner.step % NUM_PARTS * num
            sums = row_sums(sampled(weights_LX)) + row_sums(weights_LX[:, begin : begin + num])
        rows = learner.living(suspects(sums))
        named = {row: name for row in rows if (name := first_nonfinite(learner.models[row], gradients=False))}
        if named:
            raise NonFiniteError(
                [self._event(learner.comm.learners[row], name, "weights") for row, name in named.items()]
            )
        if covers_all:
            self._must_read, self._written, self._read_at = False, versions, learner.step

    def check_unchanged(self) -> None:
        """See :meth:`ddpcore.strategies.learner.Learner.check_unchanged`."""
        if self._sent != self._versions():
            raise RuntimeError(
                "weights were changed between a forward pass and the next step, while neighbours read them: change "
                "them after a step, or evaluate under torch.no_grad()"
            )


_MOVED = (
    "the memory of the {} has moved (share_memory(), or a parameter or gradient was sent to another process), so other "
    "learners do not see it: send a clone, parameter.detach().clone()"
)


def _sum_of(gradients: Sequence[Tensor | None]) -> Tensor:
    given = [one._values() if one.is_sparse else one for one in gradients if one is not None]
    sums = [one.sum(dtype=wide(one.dtype)) for one in given]
    return torch.stack(sums).sum() if sums else torch.zeros(())


def _note(noted: dict[int, int], parameter: Tensor) -> None:
    """After autograd has written a gradient."""
    if parameter.grad is not None:
        noted[id(parameter)] = parameter.grad._version


def _count(module: nn.Module, name: str, value: object) -> None:
    global _num_registered
    _num_registered += 1


def _calls(code: Any) -> bool:
    """Whether the function with this code object is among the callers of the present one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse a step of another optimizer on parameters of a handle, unless one of the two calls the other.

    torch calls this before every step of any optimizer, so parameters are looked up once for each optimizer.
    """
    if torch.compiler.is_compiling() or optimizer in _OWN:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if _OTHERS.get(optimizer) == len(parameters):
        return
    reference = next((_WATCHES[parameter] for parameter in parameters if parameter in _WATCHES), None)
    if reference is None:
        _OTHERS[optimizer] = len(parameters)
        return
    own, watch = None, reference()
    if watch is not None:
        own = watch._learner.optimizer
        if watch._is_inside(sys._getframe(1)) or any(value is own for value in vars(optimizer).values()):
            return
    raise RuntimeError(
        f"a {type(optimizer).__name__} that distribute() did not get steps its parameters, so learners would not "
        f"average: step the {'optimizer' if own is None else type(own).__name__} that it got, and change its options"
    )
