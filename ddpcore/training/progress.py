"""Progress of a run: its losses, times and evaluations so far.

Shapes: L learners of this process, n learners in all.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ddpcore.comm.base import Communicator
from ddpcore.storage.serialization import copy_of

_BYTES = 4096  # of the message to a rank that joins


@dataclass
class Progress:
    """Progress of a run. The sums of losses stay on the device, so that no step waits for it."""

    epoch_loss_L: Tensor  # sum of the losses of the steps of this epoch
    window_loss_L: Tensor  # sum of the losses since the last check
    epoch_lost_L: Tensor  # steps of this epoch whose loss is not in the sum, because it was not finite
    window_lost_L: Tensor  # the same since the last check
    epoch_steps: int = 0
    window_steps: int = 0
    first_loss: float | None = None  # of the first step, mean over all samples
    accuracy: float | None = None  # of the last evaluation
    best: dict[str, Any] | None = None  # accuracy, epoch and step of the best evaluation
    epoch_seconds: float = 0.0  # of training
    seconds: float = 0.0  # total_seconds when this object was made: 0, or the value of a checkpoint
    diverged: bool = False
    reason: str | None = None  # of the divergence, if it is a number that is not finite

    def __post_init__(self) -> None:
        self._started = time.perf_counter() - self.seconds

    @classmethod
    def start(cls, num_learners: int, device: torch.device) -> "Progress":
        """The progress before the first step, for L = ``num_learners``."""
        zeros_L = torch.zeros(num_learners, dtype=torch.float64, device=device)
        return cls(zeros_L, zeros_L.clone(), zeros_L.clone(), zeros_L.clone())

    @property
    def total_seconds(self) -> float:
        """Seconds of the whole run, with evaluations and checkpoints, and without the time between two processes."""
        return time.perf_counter() - self._started

    def add(self, losses_L: Tensor, *, only_finite: bool = False, shares_L: Tensor | float = 1.0) -> None:
        """Add losses of a step, each times its batch size relative to the mean; ``only_finite`` leaves others out."""
        if only_finite:
            is_lost_L = ~losses_L.isfinite()
            losses_L = losses_L.masked_fill(is_lost_L, 0)
            self.epoch_lost_L += is_lost_L * shares_L
            self.window_lost_L += is_lost_L * shares_L
        losses_L = losses_L * shares_L
        self.epoch_loss_L += losses_L
        self.window_loss_L += losses_L
        self.epoch_steps += 1
        self.window_steps += 1

    def check(
        self, comm: Communicator, stop: bool, diverged_above: float | None, num_found: int = 0
    ) -> tuple[float, bool, int]:
        """The mean loss since the last check, whether any rank must stop, and the largest ``num_found``. Collective.

        A loss that is not finite, or more than ``diverged_above`` times the first one, is a divergence.
        """
        numbers = (torch.full_like(self.window_loss_L, number) for number in (stop, num_found))
        mine_L4 = torch.stack([self.window_loss_L, self.window_lost_L, *numbers], dim=1)
        losses_n, lost_n, stops_n, found_n = comm.gather(mine_L4).cpu().unbind(dim=1)
        loss = _mean(losses_n, lost_n, self.window_steps)
        if self.first_loss is None:
            self.first_loss = loss
        too_high = diverged_above is not None and loss > diverged_above * self.first_loss
        self.diverged = too_high or not math.isfinite(loss)
        self.window_loss_L.zero_()
        self.window_lost_L.zero_()
        self.window_steps = 0
        return loss, bool(stops_n.any()), int(found_n.max())

    def end_epoch(self, comm: Communicator) -> float:
        """The mean training loss of the epoch over steps and samples; sets the sums of the epoch to 0. Collective."""
        both_n2 = comm.gather(torch.stack([self.epoch_loss_L, self.epoch_lost_L], dim=1))
        loss = _mean(both_n2[:, 0], both_n2[:, 1], self.epoch_steps)
        self.epoch_loss_L.zero_()
        self.epoch_lost_L.zero_()
        self.epoch_steps, self.epoch_seconds = 0, 0.0
        return loss

    def evaluated(self, accuracy: float, loss: float, epoch: int, step: int) -> bool:
        """Store an evaluation and return whether it is the best so far. A loss that is not finite is a divergence."""
        self.accuracy = accuracy
        if not math.isfinite(loss):
            self.diverged = True
            return False
        if self.best is not None and accuracy <= self.best["accuracy"]:
            return False
        self.best = {"accuracy": accuracy, "epoch": epoch, "step": step}
        return True

    def share(self, comm: Communicator, record: Sequence[int], new: int) -> Sequence[int]:
        """In the step in which the rank ``new`` joins: give it the progress and the ``record`` of the others.

        ``record`` is the id of the writer and the number of changes that are written; the new rank's own is not used.
        For it, steps before joining count as lost. Returns the ``record`` of the others. Collective over all members.
        """
        names = ("epoch_steps", "window_steps", "first_loss", "accuracy", "best", "epoch_seconds", "diverged", "reason")
        mine = {name: getattr(self, name) for name in names} | {"seconds": self.total_seconds}
        text = json.dumps([record, mine]).encode()
        rows = comm.gather(torch.tensor([list(text[:_BYTES].ljust(_BYTES))], dtype=torch.uint8, device="cpu"))
        if comm.member != new:
            return record
        row = next(row for one, row in zip(comm.members, rows, strict=True) if one != new)
        record, given = json.loads(bytes(row.tolist()))
        vars(self).update(given)
        self.epoch_lost_L.fill_(self.epoch_steps)
        self.window_lost_L.fill_(self.window_steps)
        self._started = time.perf_counter() - self.seconds
        return record

    def state_dict(self) -> dict[str, Any]:
        """The arguments that make an equal object."""
        return copy_of({item.name: getattr(self, item.name) for item in fields(self)}) | {"seconds": self.total_seconds}


def _mean(losses_n: Tensor, lost_n: Tensor, num_steps: int) -> float:
    """The mean loss over steps and samples, of which each learner has lost some; NaN if all are lost."""
    counted = num_steps - float(lost_n.mean())
    return float(losses_n.mean()) / counted if counted > 1e-9 * num_steps else math.nan  # shares are rounded
