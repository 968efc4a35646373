"""``NoiseStatistics``: why decentralized training wins, as numbers, on any loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ddpcore.diagnostics.accumulation import PassStatistics
from ddpcore.diagnostics.learners import LearnerStatistics, MeasurementConfig
from ddpcore.diagnostics.passes import Loss
from ddpcore.diagnostics.record import NoiseRecord
from ddpcore.diagnostics.record_buffer import RecordBuffer
from ddpcore.diagnostics.series import Series
from ddpcore.distributed.hooks import Distributed, HookedDistributed
from ddpcore.strategies.push_sum import PushSum

MOST_DIRECTIONS = 256  # learners whose inner products one kernel forms


class NoiseStatistics:
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
            the sum over learners; called with the model at the mean weights, and with the random numbers of the step's
            own forward pass. It must cut the batch as the step did: where that accumulates, yield the same parts. The
            noise scale is then that of the mean weights in every strategy.
        full_loss: the same on all data or on a large held batch, each rank its share. Turns on :class:`Dynamics`.
        full_loss_of: what that is, for the record.
        hessian: also equation 4, by n - 1 Hessian-vector products of ``full_loss`` a measured step, eight at most: it
            is exact up to nine learners, and an estimate without bias beyond.
        directions: how many eigenvalues of the weight covariance a record holds; every rank then receives all weights.
        per_segment: also the noise scale of each parameter.
        scaler: of mixed precision: gradients are unscaled in the statistics, and further passes are scaled alike.
        full_batch: whether the batch in hand has ``batch_size`` samples a learner; steps where it says no, as with the
            last samples of an epoch, are left out of the noise scale.
        population: samples, counted as in ``batch_size``, that batches are drawn from without replacement (an epoch's
            permutation); None: with replacement, or of so many that it does not matter.
        max_grad_norm: of a loop that clips each learner's gradient before the step: gradients at the mean are clipped
            alike before they are compared. Not for optimizers that clip inside of the step.
        loss_divisor: of one device: what each pass's loss was divided by, usually the number of passes.

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
        full_batch: Callable[[], bool] | None = None,
        population: int | None = None,
        max_grad_norm: float | None = None,
        loss_divisor: float = 1.0,
    ) -> None:
        whole = {"every": every, "batch_size": batch_size, "directions": directions, "population": population}
        for name, value in whole.items():
            if value is None and name == "population":
                continue
            least = {"directions": 0, "population": 2}.get(name, 1)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} is {value!r}: it must be a whole number of at least {least}")
        if hessian and full_loss is None:
            raise ValueError("hessian=True takes the curvature of the full loss: pass full_loss=")
        if not loss_divisor > 0 or not (max_grad_norm is None or max_grad_norm > 0):
            raise ValueError("loss_divisor and max_grad_norm must be above zero")
        self.every, self.batch_size = every, batch_size
        config = MeasurementConfig(
            every=every,
            loss=loss,
            full_loss=full_loss,
            hessian=hessian,
            directions=directions,
            full_batch=full_batch,
            max_grad_norm=max_grad_norm,
            scaler=scaler,
        )
        hooked = _hooked(handle, optimizer, config)
        model = handle.model if isinstance(handle, Distributed) else handle
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise ValueError("the model has no parameter that needs a gradient: there is nothing to measure")
        names = [name for name, _ in named] if hooked is None else hooked.learner.flat.names
        self._record_buffer = RecordBuffer(
            named[0][1].device, Series(batch_size, names, per_segment, population), full_loss_of
        )
        self._source: LearnerStatistics | PassStatistics
        if hooked is None:
            parameters = [parameter for _, parameter in named]
            self._source = PassStatistics(parameters, optimizer, self._record_buffer, every, scaler, loss_divisor)
        else:
            self._source = LearnerStatistics(hooked, config, self._record_buffer)

    @property
    def records(self) -> list[NoiseRecord]:
        """All so far. Reading them waits for the device."""
        return self._record_buffer.records

    @torch.no_grad()
    def directions(self, num: int = 2) -> tuple[Tensor, Tensor]:
        """Largest eigenvalues ``[K]`` of the weight covariance now, and their directions ``[K, P]``, rows like those of
        ``learner.flat.param_LP``. Every rank must call this between two steps.

        Raises:
            ValueError: there is one learner alone.
        """
        if isinstance(self._source, PassStatistics):
            raise ValueError("one learner alone has no covariance: take more learners")
        return self._source.directions(num)

    def state_dict(self) -> dict[str, Any]:
        """What later records depend on: sums of steps that later noise scales are averages over. Reads the records."""
        _ = self.records
        series = self._record_buffer.series
        return {"names": list(series.names), "series": series.state_dict(), **self._source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave, between two steps; records begin anew.

        Raises:
            ValueError: it is of a model with other parameters.
        """
        saved, series = list(state["names"]), self._record_buffer.series
        if sorted(saved) != sorted(series.names):
            raise ValueError("the statistics are of a model with other parameters: load those of this one")
        order = [saved.index(name) for name in series.names]
        series.load_state_dict(state["series"], order)
        self._source.load_state_dict(state, order)
        self._record_buffer.start_anew()

    def close(self) -> None:
        """Watch no longer."""
        self._source.close()


def _hooked(
    handle: Distributed | nn.Module, optimizer: torch.optim.Optimizer, config: MeasurementConfig
) -> HookedDistributed | None:
    """The hooked whose learners are compared; None where one device accumulates.

    Raises:
        ValueError: this loop cannot be watched.
    """
    model = handle.model if isinstance(handle, Distributed) else handle
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError("torch's DistributedDataParallel averages out of sight: take ddpcore.SSGD()")
    if not isinstance(model, nn.Module):
        raise ValueError(f"a {type(handle).__name__} is no loop: pass what distribute() returned, or the model")
    if not isinstance(handle, HookedDistributed) or handle.learner.comm.num_learners == 1:
        if isinstance(handle, HookedDistributed) and handle.learner.optimizer is not optimizer:
            raise ValueError("the optimizer is not the one of this handle: pass the one that distribute() was given")
        if config.loss is not None or config.full_loss is not None:
            raise ValueError("one learner alone has no mean model: leave loss= and full_loss= out")
        return None
    if handle.learner.optimizer is not optimizer:
        raise ValueError("the optimizer is not the one of this handle: pass the one that distribute() was given")
    if isinstance(handle.strategy, PushSum):
        raise ValueError("the mean of push_sum's weights is no model that it trains: take dpsgd")
    if config.directions and handle.learner.comm.num_learners > MOST_DIRECTIONS:
        raise ValueError(f"directions compares {MOST_DIRECTIONS} learners at most: leave it out")
    if config.full_loss is not None:
        strategy = handle.strategy
        if config.loss is None and not (strategy.learners_stay_identical and strategy.gradients_at_mean(0)):
            raise ValueError(f"learners of {strategy.name} differ: pass loss= beside full_loss=")
        if len({float(group["lr"]) for group in optimizer.param_groups}) > 1:
            raise ValueError("an effective learning rate is one number: give all parameter groups one learning rate")
    return handle
