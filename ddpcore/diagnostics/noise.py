"""``NoiseStatistics``: gradient noise and learner statistics for any training loop."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from ddpcore.diagnostics import dynamics
from ddpcore.diagnostics.passes import Loss, check_equal_weights, model_of, trained
from ddpcore.diagnostics.record import NoiseRecord, RecordBuffer, Series
from ddpcore.diagnostics.sources import LearnerStatistics, MeasurementConfig, PassStatistics
from ddpcore.distributed.handle import Distributed
from ddpcore.distributed.hooks import HookedDistributed
from ddpcore.options.typed import check_range, typed
from ddpcore.parameters.shards import is_dtensor

MOST_DIRECTIONS = 256  # most learners whose inner products one kernel computes


class NoiseStatistics:
    r"""Measures gradient noise scale, effective learning rate, noise and spread of the learners every few steps.

    Create it after ``distribute``; it does not change one bit of the training. See docs/noise_statistics.md.

    - If gradients are averaged (ssgd), every step contributes to the noise scale: two reads of the gradients, no host
      synchronization, and one all-reduce of a few numbers a record.
    - If learners differ (dpsgd, local_sgd, slowmo), measured steps average a copy of gradients and weights.
    - On one device, measured steps copy the gradients of each backward pass; a step needs at least two passes.

    Args:
        handle: what ``distribute`` returned, or the model of a loop on one device.
        every: steps from one record to the next.
        batch_size: b, samples of one learner's gradient (on one device: of one backward pass). 1 gives noise scales in
            units of such batches. Gradients do not show a wrong number: noise scales are then wrong by its factor.
        loss: recomputes the loss of the current batch, ``lambda: loss_fn(handle.model(x), y)``; with virtual learners
            the sum over learners. It is called at the mean weights, with the random state of the step's own forward
            pass. If the step accumulates gradients, it must yield the same parts. With it the noise scale of every
            strategy is that at the mean weights.
        full_loss: the same loss on all data or on a large fixed batch, each rank its share. Enables :class:`Dynamics`.
            Hooks that change gradients do not run in its passes, because its gradient is that of the loss.
        full_loss_of: description of these data for the record.
        hessian: also equation 4, by n - 1 (at most eight) Hessian-vector products of ``full_loss`` a measured step: it
            is exact up to nine learners, and an unbiased estimate beyond.
        directions: number of eigenvalues of the weight covariance in a record; every rank then receives all weights.
        per_segment: also the noise scale of each parameter.
        scaler: of mixed precision: statistics use unscaled gradients, and the additional passes scale their losses.
        full_batch: returns whether the current batch has ``batch_size`` samples a learner. Steps for which it returns
            False, such as the last one of an epoch, are left out of the noise scale.
        population: number of samples, in units of ``batch_size``, that batches are drawn from without replacement (an
            epoch's permutation). None: with replacement, or so many that it does not matter.
        max_grad_norm: for a loop that clips each learner's gradient, or their average, before the step: gradients at
            the mean weights are clipped in the same way. Not for optimizers that clip inside the step.
        loss_divisor: on one device: the divisor of each pass's loss, usually the number of passes.

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
        full_batch: Callable[[], bool] | None = None,
        population: int | None = None,
        max_grad_norm: float | None = None,
        loss_divisor: float = 1.0,
    ) -> None:
        given = locals()
        for name, value, least in (("every", every, 1), ("batch_size", batch_size, 1), ("directions", directions, 0)):
            check_range(name, typed(name, value, int), least=least)
        check_range("population", typed("population", population, int | None), least=2)
        check_range("loss_divisor", loss_divisor, above=0)
        check_range("max_grad_norm", max_grad_norm, above=0)
        if hessian and full_loss is None:
            raise ValueError("hessian=True takes the curvature of the full loss: pass full_loss=")
        self.every, self.batch_size = every, batch_size
        config = MeasurementConfig(**{option.name: given[option.name] for option in fields(MeasurementConfig)})
        model = model_of(handle)
        hooked, first = _hooked(handle, optimizer, config), trained(model)[0]
        if hooked is None and is_dtensor(first):
            raise ValueError("one learner that is sharded: take several, or measure a model that is whole")
        own = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        names = own if hooked is None else hooked.learner.flat.names
        series = Series(batch_size, names, per_segment, population)
        buffer = self._record_buffer = RecordBuffer(first.device, series, full_loss_of)
        self._learner = None if hooked is None else hooked.learner
        if hooked is None:
            self._source: LearnerStatistics | PassStatistics = PassStatistics(model, optimizer, config, buffer)
        else:
            self._source = LearnerStatistics(hooked, config, buffer)

    @property
    def records(self) -> list[NoiseRecord]:
        """All records so far. Reading them waits for the device."""
        return self._record_buffer.records

    @torch.no_grad()
    def directions(self, num: int = 2) -> tuple[Tensor, Tensor]:
        """The largest eigenvalues ``[K]`` of the current weight covariance, and their unit eigenvectors ``[K, P]``.

        Collective: all ranks must call it between two steps. The columns are the columns of ``learner.flat.param_LP``.
        ValueError: there is only one learner, or learners are sharded.
        """
        if self._learner is None:
            raise ValueError("one learner has no covariance: take more learners")
        weights_LP = self._learner.flat.param_LP
        if self._learner.flat.shards is not None:
            raise ValueError("learners are sharded, and no rank holds a whole vector: measure models that are whole")
        return dynamics.directions(weights_LP, self._learner.average_of(weights_LP)[0], self._learner.comm, num)

    def state_dict(self) -> dict[str, Any]:
        """The sums of past steps, which later noise scales average. Waits for the device."""
        _ = self.records  # adds pending steps to the series
        series = self._record_buffer.series
        return {"names": list(series.names), "series": series.state_dict(), **self._source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict` between two steps; the list of records becomes empty.

        ValueError: the state belongs to a model with other parameters.
        """
        saved, series = list(state["names"]), self._record_buffer.series
        if sorted(saved) != sorted(series.names):
            raise ValueError("the statistics are of a model with other parameters: load the statistics of this one")
        order = [saved.index(name) for name in series.names]
        series.load_state_dict(state["series"], order)
        self._source.load_state_dict(state, order)
        self._record_buffer.clear()

    def close(self) -> None:
        """Stop measuring and remove all hooks."""
        self._source.close()


def _hooked(
    handle: Distributed | nn.Module, optimizer: torch.optim.Optimizer, config: MeasurementConfig
) -> HookedDistributed | None:
    """The handle whose learners are compared; None for one device. ValueError: this loop cannot be measured."""
    if isinstance(handle, HookedDistributed) and handle.learner.optimizer is not optimizer:
        raise ValueError("the optimizer is not the one of this handle: pass the one that distribute() was given")
    if not isinstance(handle, HookedDistributed) or handle.learner.comm.num_learners == 1:
        if config.loss is not None or config.full_loss is not None:
            raise ValueError("one learner has no mean model: leave loss= and full_loss= out")
        return None
    traits = handle.strategy.traits
    if traits.no_mean:
        raise ValueError(f"{traits.no_mean}: take dpsgd")
    check_equal_weights(handle, config.loss, config.full_loss)
    if (size := traits.group) > 1:
        averages = f"{handle.strategy.name} averages gradients in groups of {size}"
        raise ValueError(f"{averages}, which leaves no learner's own to compare: leave group out")
    if handle.learner.flat.shards is not None and (config.hessian or config.directions):
        raise ValueError("learners are sharded: leave hessian= and directions out, which need whole models")
    if config.directions and handle.learner.comm.num_learners > MOST_DIRECTIONS:
        raise ValueError(f"directions compares {MOST_DIRECTIONS} learners at most: leave it out")
    if config.full_loss is not None:
        strategy = handle.strategy
        if config.loss is None and not (traits.stays_identical and strategy.plan(0).gradients_at_mean):
            raise ValueError(f"learners of {strategy.name} differ: pass loss= and full_loss=")
        if len({float(group["lr"]) for group in optimizer.param_groups}) > 1:
            raise ValueError("an effective learning rate is one number: give all parameter groups one learning rate")
    return handle
