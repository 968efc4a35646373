"""The interface of the algorithms: what a strategy does before, during and after a step of the training loop."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcore.comm.base import Communicator
from ddpcore.ops import WeightAverage
from ddpcore.ops.dtypes import KERNEL_DTYPES
from ddpcore.options.typed import check_choice
from ddpcore.strategies.learner import Learner
from ddpcore.strategies.nonfinite import ON_NONFINITE
from ddpcore.topology.base import Topology

_PLACES = {
    "virtual": "virtual learners of one process", "shm": "ranks of one host with transport='shm'",
    "pg": "one learner on each rank with transport='pg'",
}  # fmt: skip


class Strategy:
    """One algorithm that averages gradients or weights of the learners. One object serves one ``distribute`` call.

    Every rank calls the methods from :meth:`setup` to :meth:`after_step` in the order in which they are defined here.

    A strategy does not step the weights. :meth:`before_step` returns the average that belongs to the step, and
    :class:`ddpcore.optim.weight_step.WeightStep` applies it: in one kernel with the optimizer's rule if possible.
    """

    name: ClassVar[str]
    averages_gradients: bool = False  # whether gradients are averaged in some steps
    in_use: bool = False  # whether a distribute() call owns the object
    takes_closure: bool = True  # whether step(closure) may compute the gradient inside the step
    topology: Topology | None = None  # which learners average with which; None for a strategy without neighbours
    waits: bool = True  # whether learners meet in each step that averages, where policies can average, too
    transports: ClassVar[tuple[str, ...]] = ("virtual", "shm", "ipc", "symmetric", "pg", "grid", "link")  # it runs over
    group: int = 1  # so many consecutive learners average their gradients in every step; see group_at
    # Options that version 0.1.0 lacked, with the values that change nothing.
    _added_options: ClassVar[Mapping[str, Any]] = {}
    can_quarantine: bool = False  # whether a learner can take the average of its neighbours, without its own weights

    def __repr__(self) -> str:
        """The class and its public attributes: a checkpoint is loaded into a strategy with the same text."""
        settings = {name: value for name, value in vars(self).items() if not name.startswith("_") and name != "in_use"}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in settings.items())})"

    @property
    def fixed_layout(self) -> bool:
        """Whether the parameters must keep their order in the flat buffer, instead of the order of their gradients."""
        return False

    def setup(self, num_learners: int, dtype: torch.dtype) -> None:
        """Check the number of learners and the dtype of the parameters, before ``distribute`` changes the model.

        Raises:
            ValueError: the strategy does not support them.
        """

    def before_forward(self, learner: Learner) -> None:
        """Called before each forward pass that records gradients: several times a step if gradients accumulate."""

    def bucket_ready(self, learner: Learner, columns: Tensor) -> None:
        """Called during backward if ``averages_gradients``: the columns ``[L, n]`` of ``grad_LP`` are complete."""

    def after_backward(self, learner: Learner) -> None:
        """Called at the end of a backward pass if ``averages_gradients``."""

    def before_step(self, learner: Learner) -> WeightAverage | None:
        """Called before the optimizer's step. ``gather_grads`` of the flat buffer collects the gradients if needed.

        Returns:
            The average of weights that this step applies before the optimizer's rule; None if there is none.
        """
        return None

    def after_step(self, learner: Learner) -> None:
        """Called after the optimizer's step. ``learner.step`` includes that step.

        Call ``learner.check_sent()`` before weights are sent, here or in another method.
        """

    def quarantine(self, learners: Set[int]) -> None:
        """Called before :meth:`before_step` if ``can_quarantine``: some learners take no step, and in the next average
        that of their neighbours without their own weights.

        Args:
            learners: some of those held here. None of them: the call before training, if a learner may be quarantined.
        """

    @property
    def learners_stay_identical(self) -> bool:
        """Whether all learners hold the same weights after every step."""
        return self.averages_gradients

    def averages_gradients_at(self, step: int) -> bool:
        """Whether the gradients of step t are averaged: those of all learners, or those of each group."""
        return self.averages_gradients

    def group_at(self, step: int) -> int | None:
        """The size of the groups of consecutive learners in which gradients of step t are averaged; None for all."""
        return None

    def gradients_at_mean(self, step: int) -> bool:
        """Whether every learner computes its gradient of step t at the mean weights."""
        return self.averages_gradients_at(step) and self.group_at(step) is None

    def gradient_weights(self, learner: Learner) -> Tensor:
        """The weights ``[L, P]`` at which learners computed the gradients of this step, between backward and step."""
        return learner.flat.param_LP

    def restore_weights(self, learner: Learner) -> None:
        """Undo a temporary change of the weights. It is called before the weights are read in the middle of a step."""

    def averages_weights_at(self, step: int) -> bool:
        """Whether the step that sets ``learner.step`` to ``step`` averages weights or gradients. Policies act then."""
        return True

    def check_transport(self, transport: str) -> None:
        """Raise ValueError if the strategy does not run over ``Communicator.transport`` of several learners.

        Over ``mixed`` it runs if it does over ``shm`` and ``pg``, of which that consists.
        """
        runs_mixed = transport == "mixed" and {"shm", "pg"}.issubset(self.transports)
        if transport not in self.transports and not runs_mixed:
            places = " or ".join(_PLACES.get(name, f"transport={name!r}") for name in self.transports)
            found = "several learners on each rank" if transport == "grid" else f"transport={transport!r}"
            raise ValueError(f"{self.name} does not run over {found}: take {places}, or dpsgd")

    def check_shrink(self) -> None:
        """Raise ValueError if the strategy cannot go on when a learner dies."""

    def members_changed(self, learner: Learner, before: Sequence[int | None]) -> None:
        """Called when learners are gone, in the middle of the operation that finds it out, or when one has joined.

        Args:
            learner: its connection has the new number of learners already.
            before: the number that each learner had until now; None for one that is new.
        """

    def state_dict(self) -> dict[str, Any]:
        """The state of a checkpoint, without weights, optimizer and step count: tensors, numbers, and dicts of them."""
        return {}

    def load_state_dict(self, learner: Learner, state: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, between two steps."""


def check_mixable(name: str, dtype: torch.dtype) -> None:
    """Check that the kernels which mix weights, or add noise to them, support the dtype of the parameters.

    Raises:
        ValueError: they do not. The message begins with ``name``, that of the strategy.
    """
    if dtype not in KERNEL_DTYPES:
        raise ValueError(
            f"{name} mixes float32, bfloat16 and float16 and parameters are {str(dtype)[6:]}: call model.float(), or "
            "take ssgd or local_sgd"
        )


def check_topology(name: str, topology: object) -> None:
    """Check that ``topology`` is None or an instance of :class:`Topology`.

    Raises:
        ValueError: it is not, such as the name of a topology. The message begins with ``name``, that of the strategy.
    """
    if topology is not None and not isinstance(topology, Topology):
        raise ValueError(f"{name}: topology is {topology!r}: pass an instance, such as ddpcore.Ring()")


def warn_of_growth(name: str, momentum: float, num_learners: int, topology: Topology) -> None:
    """Warn that the learners of an outer step with momentum move apart."""
    warnings.warn(
        f"{name}: outer_momentum is {momentum:g}: with {num_learners} learners and {topology!r} the differences "
        "between learners grow without any gradient: take less",
        stacklevel=2,
    )


def check_on_nonfinite(on_nonfinite: str, strategy: Strategy, num_learners: int | None = None) -> None:
    """Check the option ``on_nonfinite``, for a number of learners if it is known.

    Raises:
        ValueError: there is no such value, or a learner has no neighbours whose average it could take.
    """
    check_choice("on_nonfinite", on_nonfinite, ON_NONFINITE)
    if on_nonfinite != "quarantine":
        return
    if strategy.topology is None:
        raise ValueError(f"on_nonfinite is 'quarantine': {strategy.name} has no neighbours: take 'skip'")
    if not strategy.can_quarantine:
        raise ValueError(
            f"on_nonfinite is 'quarantine': {strategy.name} averages no weights of neighbours alone: take 'skip', or "
            "dpsgd without staleness and compression"
        )
    if num_learners == 1:
        raise ValueError("on_nonfinite is 'quarantine': one learner has no neighbours: take 'skip', or more learners")


def check_group(strategy: Strategy, num_learners: int, num_rows: int = 1) -> None:
    """Check that learners can average in the groups of a strategy.

    Args:
        strategy: its ``group`` is the size.
        num_learners: in all.
        num_rows: learners of each rank.

    Raises:
        ValueError: a group would lack learners, or hold a part of those of a rank.
    """
    name, size = strategy.name, strategy.group
    if num_learners % size:
        raise ValueError(
            f"{name}: group is {size} and there are {num_learners} learners: take a divisor of {num_learners}"
        )
    if num_rows % size and size % num_rows:
        raise ValueError(
            f"{name}: group is {size} and each rank holds {num_rows} learners: take a divisor or a multiple of "
            f"{num_rows}"
        )


class Baseline(ABC):
    """Training without ddpcore, for comparison: nothing is flattened and no hook is set."""

    name: ClassVar[str]

    @abstractmethod
    def connect(self, group: dist.ProcessGroup | None) -> Communicator:
        """Return the connection of the learners; evaluation and the consensus distance use it.

        Raises:
            ValueError: the baseline cannot run on these ranks.
        """

    @abstractmethod
    def wrap(self, model: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
        """Return the module to train."""
