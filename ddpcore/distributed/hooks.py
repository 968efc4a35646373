"""A model in training: what the user holds, and the hooks that tell a strategy of forward, backward and step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ddpcore.comm.agreement import describe
from ddpcore.comm.base import Communicator
from ddpcore.distributed.averaging import BATCH_NORM, average_buffers, averaged_model, recalibrate
from ddpcore.distributed.observer import Observer
from ddpcore.distributed.state_sync import StateSync
from ddpcore.optim import FusedOptimizer
from ddpcore.optim.weight_step import WeightStep
from ddpcore.parameters.buckets import GradientBuckets
from ddpcore.parameters.learner_models import copy_of
from ddpcore.strategies.base import Strategy
from ddpcore.strategies.learner import Learner


class Distributed:
    """A model in training. This class alone serves the baselines; a strategy's own is made by :func:`distribute`.

    Attributes:
        model: the module to call in the loop.
        comm: the connection of its learners.
        learner: weights, gradients and optimizer; None for the baselines.
    """

    learner: Learner | None = None

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self.model = model
        self.comm = comm

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate gradients without averaging them."""
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            with self.model.no_sync():
                yield
        else:
            yield

    def evaluation_model(self, batch_norm: str = "average", batches: Iterable[Any] | None = None) -> nn.Module:
        """A copy of the model with the average of all learners' weights.

        The model in training is not touched, whatever happens. Every rank must call this, and every rank gets the copy.
        Learners of push_sum count by their push weights p: ``sum_j p_j z_j / sum_j p_j``, which mixing preserves.

        Args:
            batch_norm: what becomes of floating-point buffers: ``average`` them, keep the ``local`` ones, or
                ``recalibrate`` batch normalisation with the averaged weights.
            batches: training inputs of this rank, for ``recalibrate``; see ``averaging.recalibrate``.

        Raises:
            ValueError: no such choice, or one without the other.
        """
        if batch_norm not in BATCH_NORM:
            raise ValueError(f"unknown batch_norm {batch_norm!r}: choose from {', '.join(BATCH_NORM)}")
        if (batch_norm == "recalibrate") != (batches is not None):
            raise ValueError("batch_norm='recalibrate' and batches= go together: pass both or none")
        model = self._copy(batch_norm)
        if batches is not None:
            recalibrate(model, batches, self.comm)
        return model

    @torch.no_grad()
    def _copy(self, batch_norm: str) -> nn.Module:
        inner: nn.Module = self.model
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            inner = self.model.module
        model = copy_of(inner)
        if batch_norm != "local":
            average_buffers(model, self.comm)
        return model

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside the states of model, optimizer and random numbers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave, after model and optimizer have been loaded. Every rank must call it.

        Raises:
            ValueError: it is the state of another model.
        """

    @torch.no_grad()
    def consensus_distance(self) -> float:
        """Root mean square, over learners, of the distance between a learner's weights and the average weights.

        ``sqrt(1/n sum_j |w_j - w_a|^2)``, Kong et al. 2021; w_a as in :meth:`evaluation_model`. Every rank must call
        this.
        """
        return float(self.comm.gather(self._squared_distances()).mean().sqrt())

    def _squared_distances(self) -> Tensor:
        weights = torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])
        apart_LP = weights.clone()[None]
        self.comm.average_(apart_LP).wait()
        return torch.linalg.vector_norm(apart_LP.sub_(weights), dim=1, dtype=torch.float64).square()


class HookedDistributed(Distributed):
    """Sets the hooks and passes their events on to the strategy."""

    learner: Learner

    def __init__(self, model: nn.Module, learner: Learner, strategy: Strategy, state_sync: StateSync) -> None:
        super().__init__(model, learner.comm)
        self.learner = learner
        self.strategy = strategy
        self._state_sync = state_sync
        optimizer = learner.optimizer
        self._weight_step = WeightStep(learner.flat)
        if isinstance(optimizer, FusedOptimizer):
            self._weight_step = optimizer.bind(learner.flat)
        self.observers: list[Observer] = []
        self._used: list[bool] | None = None  # which parameters get a gradient on any rank, from the first backward
        self._new_order: list[int] | None = None
        self._laid_out = strategy.fixed_layout  # or by a checkpoint, whose state belongs to its layout
        self._averaged = False  # whether a backward pass of this step has averaged gradients
        self._buckets: GradientBuckets | None = None
        if strategy.averages_gradients:
            self._buckets = GradientBuckets(learner.flat, self._bucket_ready, self._after_backward)

        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
            if closure is not None and not strategy.takes_closure:
                raise RuntimeError(f"{strategy.name} takes no closure: call backward() and then step()")
            if closure is None:
                self._check_averaged()
            self._before_step()

        def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            learner.step += 1
            self._averaged = False
            with torch.no_grad():
                strategy.after_step(learner)
                if strategy.averages_weights_at(learner.step):
                    state_sync.sync()
            # The kernels write through the flat buffer: autograd must know, to refuse a graph of the old weights.
            torch.autograd.graph.increment_version(learner.flat.parameters)

        self._members = {id(parameter) for parameter in learner.flat.parameters}
        self._forward_hook = model.register_forward_pre_hook(_ForwardHook(model, learner, strategy, self.observers))
        learner.optimizer.register_step_pre_hook(before_step)
        learner.optimizer.register_step_post_hook(after_step)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See :class:`Distributed`."""
        if self._buckets is None:
            yield
            return
        paused, self._buckets.paused = self._buckets.paused, True
        self._averaged = True  # or not: as asked
        try:
            yield
        finally:
            self._buckets.paused = paused

    @torch.no_grad()
    def _copy(self, batch_norm: str) -> nn.Module:
        self.strategy.restore_weights(self.learner)
        model = averaged_model(self.model, self.learner, batch_norm)
        for module in model.modules():
            module._forward_pre_hooks.pop(self._forward_hook.id, None)
        return model

    def state_dict(self) -> dict[str, Any]:
        """See :class:`Distributed`: the step, the layout of the flat buffer, and what strategy and policies keep.

        Every rank saves its own; a rank loads the one that it has saved.
        """
        names = self.learner.flat.names
        used = None if self._used is None else [n for n, used in zip(names, self._used, strict=True) if used]
        return {
            "made_by": self._made_by(),
            "step": self.learner.step,
            "layout": list(names),
            "used": used,
            "strategy": self.strategy.state_dict(),
            "policies": self._state_sync.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :class:`Distributed`."""
        flat = self.learner.flat
        if sorted(state["layout"]) != sorted(flat.names):
            raise ValueError("the state is of a model with other parameters: load it into the model it came from")
        if state["made_by"] != self._made_by():
            raise ValueError(
                f"the state is of {state['made_by']} and this is {self._made_by()}: load it into one of its kind, or "
                "begin anew from the model's and the optimizer's states alone"
            )
        self._new_order = self._used = None
        self._averaged = False
        self._lay_out([flat.names.index(name) for name in state["layout"]])
        self._laid_out = True
        if state["used"] is not None:
            self._used = [name in state["used"] for name in flat.names]
        self.learner.step = state["step"]
        self.strategy.load_state_dict(self.learner, state["strategy"])
        if "policies" in state:  # older states have none
            self._state_sync.load_state_dict(state["policies"])

    def _made_by(self) -> str:
        settings = hashlib.sha256(describe(self.strategy).encode()).hexdigest()[:8]  # a matrix fills no message
        return f"{self.strategy!r} of {self.comm.num_learners} learners, settings {settings}"

    def _squared_distances(self) -> Tensor:
        self.strategy.restore_weights(self.learner)
        return self.learner.squared_distances()

    def _bucket_ready(self, columns: Tensor) -> None:
        if self.strategy.averages_gradients_at(self.learner.step):
            for observer in self.observers:
                observer.bucket_ready(self.learner, columns)
        self.strategy.bucket_ready(self.learner, columns)

    @torch.no_grad()
    def _after_backward(self, order: list[int]) -> None:
        self.strategy.after_backward(self.learner)
        if not self.strategy.averages_gradients_at(self.learner.step):
            return
        self._averaged = True
        for observer in self.observers:
            observer.gradients_averaged(self.learner)
        flat = self.learner.flat
        seen = {index for index, parameter in enumerate(flat.parameters) if parameter.grad is not None}
        if self._used is None:
            self._agree(order, seen)
        assert self._used is not None
        for index, (parameter, used) in enumerate(zip(flat.parameters, self._used, strict=True)):
            if used and index not in seen and parameter.requires_grad:
                parameter.grad = flat.grad_views[index]  # a gradient on another rank: step alike
            elif index in seen and not used:
                raise RuntimeError(
                    f"parameter {flat.names[index]} got a gradient after a first backward pass in which it had none on "
                    "any rank: let it take part in the first step, or freeze it with requires_grad_(False)"
                )

    def _agree(self, order: list[int], seen: set[int]) -> None:
        """Agree on which parameters are in use and, for the buckets, on rank 0's order of gradients."""
        flat, comm = self.learner.flat, self.learner.comm
        num = len(flat.segments)
        complete = order + sorted(set(range(num)).difference(order))
        rows = flat.param_LP.shape[0]
        mask = torch.zeros(num, dtype=torch.int64, device=flat.param_LP.device)
        mask[list(seen)] = 1
        self._used = comm.gather(mask.expand(rows, num)).any(dim=0).tolist()
        agreed = torch.tensor(complete, device=flat.param_LP.device).repeat(rows, 1)
        comm.broadcast_(agreed)
        self._new_order = None if self._laid_out else agreed[0].tolist()

    def _check_averaged(self) -> None:
        if self._averaged or not self.strategy.averages_gradients_at(self.learner.step):
            return
        if any(parameter.grad is not None for parameter in self.learner.flat.parameters):
            raise RuntimeError(
                f"{self.strategy.name}: gradients were set without a backward pass, so nothing has averaged them: call "
                "backward() before step()"
            )

    def _check_parameters(self) -> None:
        """What the user may have changed since distribute() and would otherwise go wrong in silence."""
        flat = self.learner.flat
        for name, parameter, pointer in zip(flat.names, flat.parameters, flat.param_pointers, strict=True):
            if parameter.data_ptr() != pointer:
                raise RuntimeError(
                    f"parameter {name} has left the flat buffer (.to(), .data = or vector_to_parameters): "
                    "change weights in place, with copy_"
                )
        for group in self.learner.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) not in self._members:
                    raise RuntimeError(
                        f"a parameter of shape {list(parameter.shape)} was unfrozen or added after distribute(): "
                        "do so before it, and freeze by a zero learning rate"
                    )

    @torch.no_grad()
    def _before_step(self) -> None:
        self._check_parameters()
        self.strategy.restore_weights(self.learner)
        if self._new_order is not None:
            self._lay_out(self._new_order)  # between backward and step nothing is in flight, no graph needs old places
            self._new_order = None
        for observer in self.observers:
            observer.before_step(self.learner)
        self._weight_step.average(self.strategy.before_step(self.learner))

    def _lay_out(self, order: list[int]) -> None:
        self.learner.flat.reorder(order)
        if self._used is not None:
            self._used = [self._used[index] for index in order]
        if self._buckets is not None:
            self._buckets.rebuild()


class _ForwardHook:
    """Tells strategy and observers of a forward pass that trains. A copy or a saved model tells nobody."""

    def __init__(self, model: nn.Module, learner: Learner, strategy: Strategy, observers: list[Observer]) -> None:
        self._model, self._learner, self._strategy, self._observers = model, learner, strategy, observers

    @torch.compiler.disable(reason="ddpcore tells a strategy of the forward pass: compile first, then distribute()")
    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled() and not self._learner.hooks_paused:  # also in eval mode: batch norm may be frozen
            for observer in self._observers:
                observer.before_forward(self._learner)
            self._strategy.before_forward(self._learner)

    def __reduce__(self) -> tuple[type[_NoHook], tuple[()]]:
        return _NoHook, ()


class _NoHook:
    def __call__(self, module: nn.Module, inputs: Any) -> None:
        return
