"""What ``NoiseStatistics`` measures: the learners that ``distribute`` connects, or the backward passes of one device.

Shapes: L learners held by this process, n in all, P elements of a learner's row, S segments, T steps.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from ddpcore.diagnostics import dynamics, passes
from ddpcore.diagnostics.passes import Loss, RandomState, noise_sums, scale_of
from ddpcore.diagnostics.record import MEASURED, Measured, RecordBuffer
from ddpcore.distributed.handle import Observer
from ddpcore.distributed.hooks import HookedDistributed
from ddpcore.optim.checks import is_capturing
from ddpcore.parameters.flat import FlatParameters, Segment
from ddpcore.parameters.hooks import closure_of, own_hooks, with_closure
from ddpcore.parameters.shards import laid_out
from ddpcore.strategies.learner import Learner

_ADVICE = "use one pass a batch, and use_reentrant=False for checkpointing"
DISJOINT = f"backward passes of this step reached different parameters, so a pass is not a batch: {_ADVICE}"
LATE = "parameters are trained that were not when the statistics began: close() them and create NoiseStatistics again"


@dataclass(frozen=True, kw_only=True)
class MeasurementConfig:
    """The arguments of :class:`ddpcore.diagnostics.NoiseStatistics` that decide what is measured."""

    every: int
    loss: Loss | None
    full_loss: Loss | None
    hessian: bool
    directions: int
    full_batch: Callable[[], bool] | None
    max_grad_norm: float | None
    scaler: torch.amp.GradScaler | None
    loss_divisor: float


_Sums = tuple[Tensor, Tensor]
"""Squared norms of a step, float64: of each learner's gradient ``[L, S]`` and of their mean ``[S]``."""


class Source(Observer):
    """Puts the squared norms of steps into the buffer of records."""

    def __init__(self, config: MeasurementConfig, record_buffer: RecordBuffer) -> None:
        self._config, self._record_buffer = config, record_buffer

    def _is_measured(self, step: int) -> bool:
        """Whether a step, counted from 0, gets a record."""
        return (step + 1) % self._config.every == 0

    def _unscaled(self, own: Tensor, mean: Tensor, divisor: float = 1.0) -> _Sums:
        """Squared norms of a step, without the scale of the loss."""
        scale = scale_of(self._config.scaler, own.device)
        unscale = (1.0 if scale is None else scale.double().square().reciprocal()) * divisor**2
        return own * unscale, mean * unscale


class LearnerStatistics(Source):
    """Squared norms of every step that averages gradients, and the other quantities of measured steps."""

    def __init__(self, handle: HookedDistributed, config: MeasurementConfig, record_buffer: RecordBuffer) -> None:
        super().__init__(config, record_buffer)
        self._handle, self._learner, self._optimizer = handle, handle.learner, handle.learner.optimizer
        self._names = record_buffer.series.names
        self._own: Tensor | None = None  # [L, S], of this step
        self._mean: Tensor | None = None  # [S]
        self._num_passes = 0
        self._left_LP: Tensor | None = None  # gradients as the passes of a measured step leave them, before clipping
        self._copies = ExitStack()  # ends them
        self._random: RandomState | None = None  # before this step's first forward pass
        self._steps: list[_Sums] = []  # since the last record
        self._num_skipped = 0
        self._known = self._begun = self._living()  # ids of learners: of these steps, and of this step's passes
        self._segments: Sequence[Segment] = ()
        self._parts: dict[tuple[int, int], tuple[list[int], Tensor]] = {}  # of these segments
        handle.observers.append(self)

    def close(self) -> None:
        """Stop measuring."""
        self._copies.close()
        if self in self._handle.observers:
            self._handle.observers.remove(self)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"steps": self._steps, "num_skipped": self._num_skipped}

    def load_state_dict(self, state: dict[str, Any], order: Sequence[int]) -> None:
        """Restore :meth:`state_dict`; ``order`` holds the saved index of each segment."""
        columns = list(order)
        self._steps = [(own[:, columns], mean[columns]) for own, mean in state["steps"]]
        self._num_skipped = state["num_skipped"]

    @override
    def before_forward(self, learner: Learner) -> None:
        flat, left_LP = learner.flat, self._left_LP
        had_pass = self._num_passes > 0 or learner.watch.had_pause or (left_LP is not None and left_LP._version > 0)
        if had_pass and all(parameter.grad is None for parameter in flat.parameters):
            self._forget()  # the program has reset all gradients: a step was left out
        if not self._is_measured(learner.step):
            return
        if self._left_LP is None and not self._handle.strategy.plan(learner.step).averages_gradients:
            self._begin_copies(flat)
        if self._config.loss is not None and self._random is None and not is_capturing(flat.param_LP):
            self._random = RandomState(flat.param_LP.device)

    def _forget(self) -> None:
        self._num_passes, self._own, self._mean, self._random, self._left_LP = 0, None, None, None, None
        self._copies.close()

    def _begin_copies(self, flat: FlatParameters) -> None:
        """Copy each gradient when a pass has added to it. With a loss, which gives others, it has no memory."""
        rows_LP = torch.zeros_like(flat.param_LP, device=None if self._config.loss is None else "meta")
        views = zip(flat.parameters, flat.views_of(rows_LP), strict=True)
        copies = [(one, partial(_copy, view, one)) for one, view in views if one.requires_grad]
        with own_hooks():
            for parameter, copy in copies:
                self._copies.callback(parameter.register_post_accumulate_grad_hook(copy).remove)

        def copy_all() -> None:
            for _, copy in copies:
                copy()

        self._left_LP = rows_LP
        flat.on_gradients.append(copy_all)
        self._copies.callback(flat.on_gradients.remove, copy_all)

    @override
    def bucket_ready(self, learner: Learner, columns: Tensor) -> None:
        begin = int(columns.storage_offset()) - int(learner.flat.grad_LP.storage_offset())
        bounds, numbers = self._part(begin, begin + columns.shape[1])
        if begin == 0 or self._own is None:
            self._begun = self._living()
            self._own = torch.zeros(len(columns), len(self._names), dtype=torch.float64, device=columns.device)
        self._own.index_add_(1, numbers, noise_sums(list(columns.unbind()), bounds).diagonal(dim1=1, dim2=2).T)

    @override
    def gradients_averaged(self, learner: Learner) -> None:
        self._mean = self._squares(learner.flat.grad_LP[:1])[0]
        self._num_passes += 1

    @override
    def before_step(self, learner: Learner) -> None:
        num_passes, own, mean, random = self._num_passes, self._own, self._mean, self._random
        self._num_passes, self._own, self._mean, self._random = 0, None, None, None
        steps, num_skipped = self._steps, self._num_skipped
        is_full, living = self._config.full_batch is None or self._config.full_batch(), self._living()
        if living != self._known:  # steps of other learners do not compare, as in a series
            steps, num_skipped = [], num_skipped + len(steps)
        if num_passes == 1 and own is not None and mean is not None and is_full and self._begun == living:
            steps = [*steps, self._unscaled(own, mean)]
        else:
            num_skipped += num_passes > 0
        if self._is_measured(learner.step):
            self._measure(steps, num_skipped, is_full, random)
            steps, num_skipped, self._left_LP = [], 0, None
            self._copies.close()
        self._steps, self._num_skipped, self._known = steps, num_skipped, living  # as before if measuring raises

    def _living(self) -> list[int]:
        return list(filter(self._learner.comm.reads, self._learner.comm.members))

    def _measure(self, steps: list[_Sums], num_skipped: int, is_full: bool, random: RandomState | None) -> None:
        plan = self._handle.strategy.plan(self._learner.step)
        averages = plan.averages_gradients
        kept = self._config.every if averages else MEASURED
        measured = Measured(self._learner.step + 1, len(self._living()), kept, num_skipped=num_skipped)
        measured.at_mean = plan.gradients_at_mean or (not averages and self._config.loss is not None)
        with self._record_buffer.measuring(measured) as result:
            if not averages:
                squares = self._measure_different(result, random)
                steps, result.num_skipped = ([squares], num_skipped) if is_full else ([], num_skipped + 1)
            elif self._config.full_loss is not None:
                self._measure_identical(result, random)
            if steps:
                own_LTS = self._of_learners(torch.stack([own for own, _ in steps], dim=1))
                result.own_TS = self._learner.average_of(own_LTS.flatten(1))[0].view(own_LTS.shape[1:])
                result.mean_TS = self._of_learners(torch.stack([mean for _, mean in steps]))
            result.reason = "" if len(self._living()) == result.num_learners else "a learner died during this step"

    def _measure_identical(self, result: Measured, random: RandomState | None) -> None:
        """Measure learners that hold the same weights and the mean of their gradients."""
        config, weights_LP, first = self._config, self._learner.flat.param_LP, self._learner.comm.rows_read[0]
        assert config.full_loss is not None
        own_P = passes.local_gradients(self._learner)[first] / passes.scale_left(self._optimizer)
        mean_P = own_P
        if not result.at_mean and config.loss is not None:  # their gradients were computed at other weights
            average_LP = self._learner.average_of(self._gradient_at(weights_LP, config.loss, random)[0])
            mean_P = self._clipped(average_LP)[0]
        self._add_products(result, own_P, mean_P, self._full_gradient(weights_LP, config.full_loss, result))
        result.hessian = torch.zeros((), dtype=torch.float32, device="cpu") if config.hessian else None

    def _measure_different(self, result: Measured, random: RandomState | None) -> _Sums:
        """Measure learners with different weights; returns the squared norms of this step's gradients."""
        config, flat, comm = self._config, self._learner.flat, self._learner.comm
        mean_LP = self._learner.average_of(flat.param_LP)
        distance_L1 = self._of_learners(self._squares(flat.param_LP, mean_LP[0])).sum(1, keepdim=True)
        result.distance = self._learner.average_of(distance_L1)[0, 0]
        if config.directions:
            products = dynamics.covariance_products(flat.param_LP, mean_LP[0], comm)
            result.eigenvalues = torch.linalg.eigvalsh(products).flip(0)[: config.directions] / comm.num_learners**2
        scale_left = passes.scale_left(self._optimizer)
        grad_LP = own_LP = passes.local_gradients(self._learner).div_(scale_left)
        if config.loss is not None:
            grad_LP = self._gradient_at(mean_LP, config.loss, random)[0]
        elif self._left_LP is not None and bool(self._left_LP.any()):
            scale = scale_of(config.scaler, own_LP.device)
            grad_LP = torch.where(own_LP.isnan(), own_LP, self._left_LP / (scale_left if scale is None else scale))
        average_LP = self._learner.average_of(grad_LP)
        squares = self._squares(grad_LP), self._squares(average_LP[:1])[0]
        if config.full_loss is None:
            return squares
        if config.max_grad_norm is not None and config.loss is not None:
            average_LP = self._learner.average_of(self._clipped(grad_LP))
        full_P = self._full_gradient(mean_LP, config.full_loss, result)
        self._add_products(result, self._learner.average_of(own_LP)[0], average_LP[0], full_P)
        if config.hessian:
            result.hessian = self._hessian_squares(mean_LP, config.full_loss)
        return squares

    def _clipped(self, rows_LP: Tensor) -> Tensor:
        """The rows, each clipped as ``clip_grad_norm_`` clips a whole gradient. Collective over a learner."""
        if self._config.max_grad_norm is None:
            return rows_LP
        norms_L1 = self._of_learners(self._squares(rows_LP)).sum(1, keepdim=True).sqrt().to(rows_LP)
        return rows_LP * (self._config.max_grad_norm / (norms_L1 + 1e-6)).clamp(max=1.0)

    def _hessian_squares(self, mean_LP: Tensor, loss: Loss) -> Tensor:
        """``1/n sum_j |H (w_j - w_a)|^2``, float64, with the Hessian H of the full loss over all learners' shares."""
        flat, comm = self._learner.flat, self._learner.comm
        n, deviation_LP = comm.num_learners, flat.param_LP - mean_LP
        result = torch.zeros((), dtype=torch.float64, device=deviation_LP.device)
        scale = scale_of(self._config.scaler, deviation_LP.device)
        for share_n in dynamics.mixtures(n, self._learner.step):
            shares = share_n[list(comm.learners)].tolist()  # Python numbers: no synchronization with the device
            mixed_LP = torch.stack([n * share * row_P for share, row_P in zip(shares, deviation_LP, strict=True)])
            vector_LP = self._learner.average_of(mixed_LP)
            product_LP = passes.hessian_product(self._handle.model, self._learner, loss, mean_LP, vector_LP, scale)
            result += noise_sums([product_LP[0]], [0, flat.numel])[0, 0, 0] / n
        return result

    def _add_products(self, result: Measured, own_P: Tensor, at_mean_P: Tensor, full_P: Tensor) -> None:
        bounds, numbers = self._part(0, self._learner.flat.numel)
        products = torch.zeros(3, 3, len(self._names), dtype=torch.float64, device=own_P.device)
        products[:, :, numbers] = noise_sums([own_P, at_mean_P, full_P], bounds).movedim(0, 2)
        result.products = self._of_learners(products).sum(2)
        rates = {float(group["lr"]) for group in self._optimizer.param_groups}
        result.lr = rates.pop() if len(rates) == 1 else float("nan")

    def _gradient_at(self, weights_LP: Tensor, loss: Loss, random: RandomState | None = None) -> tuple[Tensor, Tensor]:
        with passes.at_weights(self._handle.model, self._learner, weights_LP, random):
            return passes.gradient(self._learner, loss, scale_of(self._config.scaler, weights_LP.device))

    def _full_gradient(self, weights_LP: Tensor, loss: Loss, result: Measured) -> Tensor:
        """g ``[P]``, the mean over all learners; the mean of the full loss is stored in the result."""
        with nullcontext() if self._learner.flat.shards else passes.without_hooks(self._handle.model):
            grad_LP, total = self._gradient_at(weights_LP, loss)
        loss_L1 = total.repeat(len(grad_LP), 1)
        result.full_loss = self._learner.average_of(loss_L1)[0, 0]
        return self._learner.average_of(grad_LP)[0]

    def _of_learners(self, squares_XS: Tensor) -> Tensor:
        """The squared norms of whole segments, from squared norms of this rank's shards. Collective over a learner."""
        shards, flat = self._learner.flat.shards, self._learner.flat
        if shards is None:
            return squares_XS
        owners = dict(zip(flat.names, flat.parameters, strict=True))
        return shards.whole(squares_XS, [owners[name] for name in self._names])

    def _squares(self, rows_LP: Tensor, origin_P: Tensor | None = None) -> Tensor:
        """Squared norms float64 ``[L, S]`` of the segments of each row, or of its difference to an origin."""
        bounds, numbers = self._part(0, self._learner.flat.numel)
        result = torch.zeros(len(rows_LP), len(self._names), dtype=torch.float64, device=rows_LP.device)
        for row, squares in zip(rows_LP, result, strict=True):
            squares[numbers] = noise_sums([row], bounds, origin_P)[:, 0, 0]
        return result

    def _part(self, begin: int, end: int) -> tuple[list[int], Tensor]:
        """Bounds of the segments in columns ``begin`` to ``end``, relative to ``begin``, and the segments' numbers.

        A segment keeps its number, the place of its name in the series; the order of segments in a row may change.
        """
        flat = self._learner.flat
        if self._segments is not flat.segments:
            self._segments, self._parts = flat.segments, {}
        if (begin, end) not in self._parts:
            inside = [segment for segment in flat.segments if segment.offset < end and segment.end > begin]
            numbers = [self._names.index(segment.name) for segment in inside]
            bounds = [0, *(min(segment.end, end) - begin for segment in inside)]
            self._parts[begin, end] = bounds, torch.tensor(numbers, device=flat.param_LP.device)
        return self._parts[begin, end]


@torch.no_grad()
def _copy(view: Tensor, parameter: Tensor, _: object = None) -> None:
    if parameter.grad is not None:
        view.copy_(laid_out(parameter, parameter.grad))


class PassStatistics(Source):
    """On one device: in a measured step each backward pass counts as a learner.

    Gradients accumulate in ``.grad``, so the gradient of a pass is the difference to a copy from before it; only
    measured steps make the copy, and compare it with the gradients that the previous pass left. If something else has
    written them since (``zero_grad()`` before the batch is repeated), earlier passes are discarded.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, config: MeasurementConfig, record_buffer: RecordBuffer
    ) -> None:
        super().__init__(config, record_buffer)
        self._model, self._parameters = model, (parameters := passes.trained(model))
        self._bounds = [0, *accumulate(parameter.numel() for parameter in parameters)]
        self._step, self._pass = 0, -1
        self._handles = [p.register_hook(partial(self._before_gradient, p)) for p in parameters]
        self._handles += [p.register_post_accumulate_grad_hook(self._after_gradient) for p in parameters]
        self._hook = optimizer.register_step_pre_hook(self._before_call)
        self._begin_step()

    def close(self) -> None:
        """Stop measuring."""
        for handle in (self._hook, *self._handles):
            handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any], order: Sequence[int]) -> None:
        """Restore :meth:`state_dict`; there are no sums of single segments."""
        self._step = state["step"]
        self._begin_step()

    def _begin_step(self) -> None:
        """Discard the passes so far."""
        self._num_passes = 0
        self._disjoint = False  # whether two consecutive passes had no parameter in common
        self._reached, self._reached_before = set[int](), set[int]()  # ids of parameters, by this pass and the previous
        self._old: dict[int, Tensor | None] = {}  # by parameter: its gradient before this pass
        self._first_P: Tensor | None = None  # all gradients before the first pass
        self._last_P: Tensor | None = None  # all gradients after the previous pass
        self._squares: Tensor | None = None

    def _before_call(self, _: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if (closure := closure_of(args, kwargs)) is not None:
            return with_closure(args, kwargs, partial(self._evaluate, closure, self._step))
        self._before_optimizer()
        return None

    def _evaluate(self, closure: Callable[[], Any], step: int) -> Any:
        """The result of a closure, whose first call in a step has the passes of this step."""
        result = closure()
        if self._step == step:
            self._before_optimizer()
        return result

    @torch.no_grad()
    def _before_optimizer(self) -> None:
        if self._is_measured(self._step):
            is_late = {one for one in self._model.parameters() if one.requires_grad}.difference(self._parameters)
            reason = DISJOINT if self._disjoint else LATE if is_late else ""
            measured = Measured(self._step + 1, self._num_passes, MEASURED, reason=reason)
            with self._record_buffer.measuring(measured) as result:
                if self._num_passes > 1:
                    assert self._last_P is not None and self._squares is not None
                    mean = noise_sums([self._last_P], self._bounds, self._first_P)[:, 0, 0] / self._num_passes**2
                    sums = self._unscaled(self._squares / self._num_passes, mean, self._config.loss_divisor)
                    result.own_TS, result.mean_TS = sums[0][None], sums[1][None]
        self._step += 1
        self._begin_step()

    def _before_gradient(self, parameter: Tensor, _: Tensor) -> None:
        """Keep the gradient that a pass is about to add to."""
        if self._is_measured(self._step):
            self._old[id(parameter)] = None if parameter.grad is None else parameter.grad.detach().clone()

    def _after_gradient(self, parameter: Tensor) -> None:
        if not self._is_measured(self._step):
            return
        current = torch._C._current_graph_task_id()
        if current != self._pass:
            self._pass = current
            torch.autograd.Variable._execution_engine.queue_callback(self._after_pass)
        self._reached.add(id(parameter))

    @torch.no_grad()
    def _after_pass(self) -> None:
        old, reached = self._old, self._reached  # autograd.grad() calls the hooks before gradients, too
        old_P = self._row([old[id(p)] if id(p) in reached else p.grad for p in self._parameters])
        self._old, self._reached = {}, set()
        if self._last_P is None or not torch.allclose(old_P, self._last_P.to(old_P), 0.0, 0.0, equal_nan=True):
            self._begin_step()
            self._first_P = old_P
        self._disjoint |= self._num_passes > 0 and reached.isdisjoint(self._reached_before)
        self._reached_before = reached
        self._last_P = self._row([p.grad for p in self._parameters])
        squares = noise_sums([self._last_P], self._bounds, old_P.to(self._last_P))[:, 0, 0]
        self._squares = squares if self._squares is None else self._squares + squares
        self._num_passes += 1

    def _row(self, grads: Sequence[Tensor | None]) -> Tensor:
        """These gradients ``[P]``; zeros for parameters that have none or are frozen."""
        pairs = [(p, grad if p.requires_grad else None) for p, grad in zip(self._parameters, grads, strict=True)]
        return torch.cat([p.new_zeros(p.numel()) if g is None else g.to_dense().reshape(-1) for p, g in pairs])
