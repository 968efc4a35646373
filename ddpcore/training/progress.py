"""How far a run is: what a checkpoint keeps beside weights, optimizer, strategy and random numbers.

Shapes: L learners held by this process, n learners in all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ddpcore.comm.base import Communicator


@dataclass
class Progress:
    """Sums since the epoch began and since the loss was last looked at, on the device: no step waits for them.

    Attributes:
        epoch_loss_L: sum of the losses of this epoch's steps.
        epoch_steps: how many they are.
        window_loss_L: sum of the losses since the last check.
        window_steps: how many they are.
        first_loss: of the first step, mean over all learners.
        accuracy: of the last evaluation.
        best: accuracy, epoch and step of the best one.
        epoch_seconds: of training in this epoch.
        seconds: of the whole run, evaluation and checkpoints included.
        diverged: whether the run ended for that.
    """

    epoch_loss_L: Tensor
    window_loss_L: Tensor
    epoch_steps: int = 0
    window_steps: int = 0
    first_loss: float | None = None
    accuracy: float | None = None
    best: dict[str, Any] | None = None
    epoch_seconds: float = 0.0
    seconds: float = 0.0
    diverged: bool = False

    @classmethod
    def start(cls, num_learners: int, device: torch.device) -> Progress:
        """At the first step, for so many learners held here."""
        zeros_L = torch.zeros(num_learners, dtype=torch.float64, device=device)
        return cls(epoch_loss_L=zeros_L, window_loss_L=zeros_L.clone())

    def add(self, losses_L: Tensor) -> None:
        """A step was taken."""
        self.epoch_loss_L += losses_L
        self.window_loss_L += losses_L
        self.epoch_steps += 1
        self.window_steps += 1

    def check(self, comm: Communicator, stop: bool, diverged_above: float | None) -> tuple[float, bool]:
        """Look at the loss since the last check, and find out whether any rank was asked to stop. Collective.

        Args:
            comm: the learners.
            stop: whether this rank was.
            diverged_above: see ``TrainConfig``.

        Returns:
            The mean loss over steps and learners, and whether to stop.
        """
        mine_L2 = torch.stack([self.window_loss_L, torch.full_like(self.window_loss_L, stop)], dim=1)
        losses_n, stops_n = comm.gather(mine_L2).cpu().unbind(dim=1)
        loss = losses_n.mean().item() / self.window_steps
        if self.first_loss is None:
            self.first_loss = loss
        too_high = diverged_above is not None and loss > diverged_above * self.first_loss
        self.diverged = too_high or not math.isfinite(loss)
        self.window_loss_L.zero_()
        self.window_steps = 0
        return loss, bool(stops_n.any())

    def end_epoch(self, comm: Communicator) -> float:
        """The mean training loss of the epoch over steps and learners; the sums begin anew. Collective."""
        loss = comm.gather(self.epoch_loss_L).mean().item() / self.epoch_steps
        self.epoch_loss_L.zero_()
        self.epoch_steps, self.epoch_seconds = 0, 0.0
        return loss

    def evaluated(self, accuracy: float, loss: float, epoch: int, step: int) -> bool:
        """Take note of an evaluation; True where it is the best so far. A loss that is not finite is a divergence."""
        self.accuracy = accuracy
        if not math.isfinite(loss):
            self.diverged = True
            return False
        if self.best is not None and accuracy <= self.best["accuracy"]:
            return False
        self.best = {"accuracy": accuracy, "epoch": epoch, "step": step}
        return True

    def state_dict(self) -> dict[str, Any]:
        """Every field."""
        return {item.name: getattr(self, item.name) for item in fields(self)}
