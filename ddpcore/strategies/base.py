"""What an algorithm may do around the user's loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcore.comm.base import Communicator
from ddpcore.ops import WeightAverage
from ddpcore.ops.dtypes import KERNEL_DTYPES
from ddpcore.strategies.learner import Learner
from ddpcore.topology.base import Topology


class Strategy(ABC):
    """One algorithm that keeps the learners together. One object serves one ``distribute`` call.

    The methods that are told of events stand in the order in which they are called, once a step, on every rank alike.
    """

    name: ClassVar[str]
    averages_gradients: bool = False
    in_use: bool = False  # set by distribute()
    takes_closure: bool = True  # whether step(closure) may compute the gradient inside the step
    topology: Topology | None = None  # who averages with whom, where a strategy has neighbours

    @property
    def fixed_layout(self) -> bool:
        """Whether the flat buffer may not be laid out in the order in which gradients come, which vmap changes."""
        return False

    def setup(self, num_learners: int, dtype: torch.dtype) -> None:
        """Before anything moves: check that the number of learners and the dtype of the parameters fit.

        Raises:
            ValueError: it does not.
        """

    def before_forward(self, learner: Learner) -> None:
        """Before a forward pass that records gradients; before each one when gradients are accumulated."""

    def bucket_ready(self, learner: Learner, columns: Tensor) -> None:
        """During backward, where ``averages_gradients``: columns ``[L, n]`` of ``grad_LP`` are complete."""

    def after_backward(self, learner: Learner) -> None:
        """At the end of a backward pass, where ``averages_gradients``."""

    def before_step(self, learner: Learner) -> WeightAverage | None:
        """Before the optimizer's step. ``grad_LP`` holds the gradients if ``gather_grads`` is called.

        Returns:
            What is averaged in this step, before the optimizer's rule acts, in the same pass if it can.
        """
        return None

    @abstractmethod
    def after_step(self, learner: Learner) -> None:
        """After the optimizer's step; ``learner.step`` counts it already."""

    @property
    def learners_stay_identical(self) -> bool:
        """Whether all learners hold the same weights after every step."""
        return self.averages_gradients

    def averages_gradients_at(self, step: int) -> bool:
        """Whether the gradients of step t are averaged."""
        return self.averages_gradients

    def gradients_at_mean(self, step: int) -> bool:
        """Whether every learner takes its gradient of step t at the mean weights."""
        return self.averages_gradients_at(step)

    def restore_weights(self, learner: Learner) -> None:
        """Bring the weights to what they are between two steps, before somebody reads them in the middle of one."""

    def averages_weights_at(self, step: int) -> bool:
        """Whether learners averaged weights in the step that made ``learner.step`` this number; policies act then."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside weights, optimizer and step count: tensors, numbers, and dicts of them."""
        return {}

    def load_state_dict(self, learner: Learner, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave, between two steps."""


def check_mixable(name: str, dtype: torch.dtype) -> None:
    """That the kernels which mix weights, or add noise to them, take the parameters of a strategy of this name.

    Raises:
        ValueError: they do not.
    """
    if dtype not in KERNEL_DTYPES:
        raise ValueError(
            f"{name} mixes float32, bfloat16 and float16 and parameters are {str(dtype)[6:]}: call model.float(), or "
            "take ssgd or local_sgd"
        )


def check_topology(name: str, topology: object) -> None:
    """That a strategy of this name is given a topology, not the name of one.

    Raises:
        ValueError: it is not.
    """
    if topology is not None and not isinstance(topology, Topology):
        raise ValueError(f"{name}: topology is {topology!r}: pass an instance, such as ddpcore.Ring()")


class Baseline(ABC):
    """What a user would run without ddpcore, for comparison: nothing is flattened and no hook is set."""

    name: ClassVar[str]

    @abstractmethod
    def connect(self, group: dist.ProcessGroup | None) -> Communicator:
        """The learners among which consensus is measured.

        Raises:
            ValueError: the world does not fit.
        """

    @abstractmethod
    def wrap(self, model: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
        """The module to train."""
