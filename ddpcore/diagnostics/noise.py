"""``NoiseStatistics``: why decentralized training wins, as numbers, on any loop.

Shapes: L learners held by this process, n in all, P elements of a learner's row, S segments, T steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ddpcore.diagnostics import dynamics, passes
from ddpcore.diagnostics.accumulation import MicroBatches
from ddpcore.diagnostics.passes import Loss, noise_sums
from ddpcore.diagnostics.record import Clock, Layout, Measured, NoiseRecord, Series
from ddpcore.distributed import Distributed, Engine
from ddpcore.learner import Learner
from ddpcore.observer import Observer
from ddpcore.strategies import PushSum

MEASURED = 20  # steps that are averaged, where only measured ones count


class NoiseStatistics(Observer):
    r"""Gradient noise scale, effective learning rate, noise strength and spread of the learners, every so many steps.

    One line after ``distribute``; training has the same bits with and without it. See docs/noise_statistics.md.

    - Where gradients are averaged (ssgd), the noise scale comes from every step, of buckets before and after the
      average: two reads of the gradients, no host synchronisation, and one all-reduce of a few numbers a record.
    - Where learners differ (dpsgd, local_sgd, slowmo), measured steps average a copy of gradients and weights.
    - On one device, measured steps copy the gradients of each backward pass; a step must have two at least.

    Args:
        handle: what ``distribute`` returned, or the model of a loop on one device.
        optimizer: the loop's.
        every: steps from one record to the next.
        batch_size: b, samples behind one learner's gradient (of one device: behind one backward pass). 1 gives noise
            scales in such batches.
        loss: recomputes the loss of the batch in hand, ``lambda: loss_fn(handle.model(x), y)``, of virtual learners
            the sum over learners; called with the model at the mean weights. The noise scale is then that of the mean
            weights in every strategy.
        full_loss: the same on all data or on a large held batch, each rank its share. Turns on :class:`Dynamics`.
        full_loss_of: what that is, for the record.
        hessian: also equation 4, by one Hessian-vector product of ``full_loss`` a measured step.
        directions: how many eigenvalues of the weight covariance a record holds; every rank then receives all weights.
        per_segment: also the noise scale of each parameter.
        scaler: of mixed precision: gradients are unscaled in the statistics.

    Raises:
        ValueError: the arguments do not fit the loop; one line that says what to do.
    """

    def __init__(
        self,
        handle: Distributed | nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int = 50,
        *,
        batch_size: int = 1,
        loss: Loss | None = None,
        full_loss: Loss | None = None,
        full_loss_of: str = "a held batch",
        hessian: bool = False,
        directions: int = 0,
        per_segment: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        for name, value, least in (("every", every, 1), ("batch_size", batch_size, 1), ("directions", directions, 0)):
            if value < least:
                raise ValueError(f"{name} is {value}: it must be at least {least}")
        if hessian and full_loss is None:
            raise ValueError("hessian=True takes the curvature of the full loss: pass full_loss=")
        self.every, self.batch_size = every, batch_size
        self._optimizer, self._scaler = optimizer, scaler
        self._loss, self._full_loss, self._full_loss_of = loss, full_loss, full_loss_of
        self._hessian, self._num_directions = hessian, directions
        self._records: list[NoiseRecord] = []
        self._pending: list[Measured] = []
        self._own: Tensor | None = None  # [L, S], of this step
        self._mean: Tensor | None = None  # [S]
        self._num_passes = 0
        self._steps: list[tuple[Tensor, Tensor]] = []  # own and mean, since the last record
        self._num_skipped = 0
        self._layout: Layout | None = None
        self._remove: list[Callable[[], None]] = []
        engine = _engine_of(handle, optimizer, loss, full_loss)
        if engine is None:
            self._watch_passes(handle.model if isinstance(handle, Distributed) else handle, every, per_segment)
        else:
            self._watch_engine(engine, every, per_segment)
        self._last = self._clock.mark()

    @property
    def records(self) -> list[NoiseRecord]:
        """All so far. Reading them waits for the device."""
        while self._pending:
            self._records.append(self._pending.pop(0).record(self._series, self._full_loss_of))
        return self._records

    @torch.no_grad()
    def directions(self, num: int = 2) -> tuple[Tensor, Tensor]:
        """Largest eigenvalues ``[K]`` of the weight covariance now, and their directions ``[K, P]``, rows like those of
        ``learner.flat.param_LP``. Every rank must call this between two steps.

        Raises:
            ValueError: there is one learner alone.
        """
        if self._engine is None:
            raise ValueError("one learner alone has no covariance: take more learners")
        learner = self._engine.learner
        return dynamics.directions(
            learner.flat.param_LP, self._average(learner, learner.flat.param_LP)[0], learner.comm, num
        )

    def state_dict(self) -> dict[str, Any]:
        """What later records depend on: sums of steps that later noise scales are averages over. Reads the records."""
        _ = self.records
        return {"series": self._series.state_dict(), "steps": self._steps, "num_skipped": self._num_skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave, between two steps; records begin anew."""
        self._series.load_state_dict(state["series"])
        self._steps, self._num_skipped = list(state["steps"]), state["num_skipped"]
        self._records, self._pending = [], []
        self._last = self._clock.mark()

    def close(self) -> None:
        """Watch no longer."""
        while self._remove:
            self._remove.pop()()

    # ---- learners ----

    def _watch_engine(self, engine: Engine, every: int, per_segment: bool) -> None:
        self._engine: Engine | None = engine
        flat = engine.learner.flat
        self._names = flat.names
        self._clock = Clock(flat.param_LP.device)
        kept = every if engine.strategy.averages_gradients else MEASURED
        self._series = Series(kept, self.batch_size, self._names if per_segment else ())
        engine.observers.append(self)
        self._remove.append(lambda: engine.observers.remove(self))

    def bucket_ready(self, learner: Learner, columns: Tensor) -> None:
        """See :class:`Observer`."""
        flat = learner.flat
        begin = int(columns.storage_offset()) - int(flat.grad_LP.storage_offset())
        bounds, numbers = self._layout_of(learner).part(begin, begin + columns.shape[1])
        if begin == 0 or self._own is None:
            self._own = torch.zeros(len(columns), len(self._names), dtype=torch.float64, device=columns.device)
        sums = noise_sums(list(columns.unbind()), bounds)
        self._own.index_add_(1, numbers, sums.diagonal(dim1=1, dim2=2).T)

    def gradients_averaged(self, learner: Learner) -> None:
        """See :class:`Observer`."""
        self._mean = self._squares(learner, learner.flat.grad_LP[:1])[0]
        self._num_passes += 1

    def before_step(self, learner: Learner) -> None:
        """See :class:`Observer`."""
        if self._num_passes == 1 and self._own is not None and self._mean is not None:
            unscale = self._unscale_squared(self._own)
            self._steps.append((self._own * unscale, self._mean * unscale))
        else:
            self._num_skipped += self._num_passes > 1
        self._num_passes, self._own, self._mean = 0, None, None
        if (learner.step + 1) % self.every == 0:
            self._measure(learner)

    def _measure(self, learner: Learner) -> None:
        begin, sent = self._clock.mark(), learner.comm.bytes_sent
        assert self._engine is not None
        together = self._engine.strategy.averages_at(learner.step)
        result = Measured(learner.step + 1, learner.comm.num_learners, num_skipped=self._num_skipped)
        if not together:
            self._measure_apart(learner, result)
        elif self._full_loss is not None:
            mean_P = learner.flat.grad_LP[0] * self._unscale(learner.flat.grad_LP)
            full_P = self._full_gradient(learner, learner.flat.param_LP, self._full_loss, result)
            self._add_products(learner, result, mean_P, mean_P, full_P)
            result.hessian = torch.zeros(()) if self._hessian else None
        if self._steps:
            own_LTS = torch.stack([own for own, _ in self._steps], dim=1)
            rows = own_LTS.flatten(1)
            learner.comm.average_(rows).wait()
            result.own_TS = rows[0].view(own_LTS.shape[1:])
            result.mean_TS = torch.stack([mean for _, mean in self._steps])
        self._steps, self._num_skipped = [], 0
        learner.comm.bytes_sent = sent
        end = self._clock.mark()
        result.marks = (self._last, begin, end)
        self._last = end
        self._pending.append(result)

    def _measure_apart(self, learner: Learner, result: Measured) -> None:
        """Learners hold different weights: gradients here and at the mean, and how far apart they are."""
        flat, comm = learner.flat, learner.comm
        mean_LP = learner.average_of(flat.param_LP)
        distances = [noise_sums([row], [0, flat.numel], mean_LP[0])[0] for row in flat.param_LP]
        distance_L1 = torch.cat(distances)
        comm.average_(distance_L1).wait()
        result.distance = distance_L1[0, 0]
        if self._num_directions:
            products = dynamics.covariance_products(flat.param_LP, mean_LP[0], comm)
            result.eigenvalues = torch.linalg.eigvalsh(products).flip(0)[: self._num_directions] / comm.num_learners**2
        own_LP = self._local_gradients(learner)
        grad_LP = own_LP if self._loss is None else self._gradient_at(learner, mean_LP, self._loss)[0]
        average_LP = self._average(learner, grad_LP)
        self._steps.append((self._squares(learner, grad_LP), self._squares(learner, average_LP[:1])[0]))
        result.at_mean = self._loss is not None
        if self._full_loss is None:
            return
        full_P = self._full_gradient(learner, mean_LP, self._full_loss, result)
        self._add_products(learner, result, self._average(learner, own_LP)[0], average_LP[0], full_P)
        if self._hessian:
            with passes.at_weights(self._model, learner, mean_LP):
                product_LP = passes.hessian_product(learner, self._full_loss, flat.param_LP - mean_LP)
            square_L1 = self._squares(learner, product_LP).sum(dim=1, keepdim=True)
            comm.average_(square_L1).wait()
            result.hessian = square_L1[0, 0]

    def _add_products(
        self, learner: Learner, result: Measured, own_P: Tensor, at_mean_P: Tensor, full_P: Tensor
    ) -> None:
        result.products = noise_sums([own_P, at_mean_P, full_P], [0, learner.flat.numel])[0]
        result.lr = float(self._optimizer.param_groups[0]["lr"])

    @property
    def _model(self) -> nn.Module:
        assert self._engine is not None
        return self._engine.model

    def _gradient_at(self, learner: Learner, weights_LP: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
        with passes.at_weights(self._model, learner, weights_LP):
            return passes.gradient(learner, loss)

    def _full_gradient(self, learner: Learner, weights_LP: Tensor, loss: Loss, result: Measured) -> Tensor:
        """g ``[P]``, and into the result the full loss itself: means over all learners."""
        grad_LP, total = self._gradient_at(learner, weights_LP, loss)
        loss_L1 = (total / len(grad_LP)).repeat(len(grad_LP), 1)
        learner.comm.average_(loss_L1).wait()
        result.full_loss = loss_L1[0, 0]
        return self._average(learner, grad_LP)[0]

    @staticmethod
    def _average(learner: Learner, rows_LP: Tensor) -> Tensor:
        average_LP = rows_LP.clone()
        learner.comm.average_(average_LP).wait()
        return average_LP

    def _local_gradients(self, learner: Learner) -> Tensor:
        flat = learner.flat
        rows_LP = torch.zeros_like(flat.grad_LP)
        for view, parameter in zip(flat.views_of(rows_LP), flat.parameters, strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
        return rows_LP.mul_(self._unscale(rows_LP))

    def _squares(self, learner: Learner, rows_LP: Tensor) -> Tensor:
        """Squared norms float64 ``[L, S]`` of the segments of each row."""
        bounds, numbers = self._layout_of(learner).part(0, learner.flat.numel)
        result = torch.zeros(len(rows_LP), len(self._names), dtype=torch.float64, device=rows_LP.device)
        for row, squares in zip(rows_LP, result, strict=True):
            squares[numbers] = noise_sums([row], bounds)[:, 0, 0]
        return result

    def _layout_of(self, learner: Learner) -> Layout:
        flat = learner.flat
        if self._layout is None or self._layout.segments is not flat.segments:
            self._layout = Layout(flat.segments, flat.numel, self._names, flat.param_LP.device)
        return self._layout

    # ---- mixed precision ----

    def _unscale_squared(self, like: Tensor) -> Tensor | float:
        """What undoes the scale of squares of gradients as the backward pass leaves them."""
        if self._scaler is None or not self._scaler.is_enabled():
            return 1.0
        scale = self._scaler.scale(torch.ones((), dtype=torch.float32, device=like.device))
        assert isinstance(scale, Tensor)
        return scale.double().square().reciprocal()

    def _unscale(self, like: Tensor) -> Tensor | float:
        """The same of gradients at the optimizer's step: only those that it unscales itself are still scaled."""
        scale = getattr(self._optimizer, "grad_scale", None)
        return 1.0 if scale is None else scale.reciprocal().to(like)

    # ---- one device ----

    def _watch_passes(self, model: nn.Module, every: int, per_segment: bool) -> None:
        self._engine = None
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError("the model has no parameter that needs a gradient: there is nothing to measure")
        self._names = tuple(name for name, _ in named)
        self._clock = Clock(named[0][1].device)
        self._series = Series(MEASURED, self.batch_size, self._names if per_segment else ())
        self._step = 0
        self._passes = MicroBatches([p for _, p in named], lambda: (self._step + 1) % self.every == 0)
        hook = self._optimizer.register_step_pre_hook(lambda *_: self._measure_passes())
        self._remove += [self._passes.remove, hook.remove]

    @torch.no_grad()
    def _measure_passes(self) -> None:
        self._step += 1
        if self._step % self.every == 0:
            begin = self._clock.mark()
            result = Measured(self._step, self._passes.num_passes)
            if self._passes.num_passes > 1:
                own, mean = self._passes.sums()
                unscale = self._unscale_squared(own)
                result.own_TS, result.mean_TS = (own * unscale)[None], (mean * unscale)[None]
            end = self._clock.mark()
            result.marks = (self._last, begin, end)
            self._last = end
            self._pending.append(result)
        self._passes.begin_step()


def _engine_of(
    handle: Distributed | nn.Module, optimizer: torch.optim.Optimizer, loss: Loss | None, full_loss: Loss | None
) -> Engine | None:
    """The engine whose learners are compared; None where one device accumulates.

    Raises:
        ValueError: this loop cannot be watched.
    """
    model = handle.model if isinstance(handle, Distributed) else handle
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError("torch's DistributedDataParallel averages out of sight: take ddpcore.SSGD()")
    if not isinstance(model, nn.Module):
        raise ValueError(f"a {type(handle).__name__} is no loop: pass what distribute() returned, or the model")
    if not isinstance(handle, Engine) or handle.learner.comm.num_learners == 1:
        if isinstance(handle, Engine) and handle.learner.optimizer is not optimizer:
            raise ValueError("the optimizer is not the one of this handle: pass the one that distribute() was given")
        if loss is not None or full_loss is not None:
            raise ValueError("one learner alone has no mean model: leave loss= and full_loss= out")
        return None
    if handle.learner.optimizer is not optimizer:
        raise ValueError("the optimizer is not the one of this handle: pass the one that distribute() was given")
    if isinstance(handle.strategy, PushSum):
        raise ValueError("the mean of push_sum's weights is no model that it trains: take dpsgd")
    if full_loss is not None:
        if loss is None and not handle.strategy.averages_gradients:
            raise ValueError(f"learners of {handle.strategy.name} differ: pass loss= beside full_loss=")
        if len({float(group["lr"]) for group in optimizer.param_groups}) > 1:
            raise ValueError("an effective learning rate is one number: give all parameter groups one learning rate")
    return handle
