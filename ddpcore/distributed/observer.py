"""What may watch a training loop: it is told of gradients and steps, reads the learner, and changes nothing."""

from __future__ import annotations

from torch import Tensor

from ddpcore.strategies.learner import Learner


class Observer:
    """Base of diagnostics that follow a loop. Called on every rank alike.

    ``bucket_ready`` and ``gradients_averaged`` are called only in steps in which gradients are averaged.
    """

    def before_forward(self, learner: Learner) -> None:
        """Before a forward pass that trains."""

    def bucket_ready(self, learner: Learner, columns: Tensor) -> None:
        """During backward: columns ``[L, n]`` of ``grad_LP`` hold the learners' own gradients, not yet averaged."""

    def gradients_averaged(self, learner: Learner) -> None:
        """At the end of such a backward pass: all rows of ``grad_LP`` hold the average."""

    def before_step(self, learner: Learner) -> None:
        """Before the optimizer's step, weights and gradients as the backward pass left them."""
