"""The interface of diagnostics that follow a training loop."""

from __future__ import annotations

from torch import Tensor

from ddpcore.strategies.learner import Learner


class Observer:
    """Its methods are called on every rank in the order of this class. They read the learner and change nothing.

    ``bucket_ready`` and ``gradients_averaged`` are called only in steps that average gradients.
    """

    def before_forward(self, learner: Learner) -> None:
        """Called before a forward pass that records gradients."""

    def bucket_ready(self, learner: Learner, columns: Tensor) -> None:
        """Called during backward: columns ``[L, n]`` of ``grad_LP`` hold each learner's own gradients."""

    def gradients_averaged(self, learner: Learner) -> None:
        """Called at the end of a backward pass: all rows of ``grad_LP`` hold the average."""

    def before_step(self, learner: Learner) -> None:
        """Called before the optimizer's step, with the weights and gradients that the backward pass left."""
