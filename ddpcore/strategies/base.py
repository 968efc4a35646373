"""The interface of the algorithms: what a strategy does before, during and after a step of the training loop."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcore.comm.agreement import describe
from ddpcore.comm.base import Communicator
from ddpcore.ops import WeightAverage
from ddpcore.ops.library import KERNEL_DTYPES, is_narrow
from ddpcore.options.typed import check_choice
from ddpcore.strategies.learner import ON_NONFINITE, Learner
from ddpcore.topology.base import Topology

_PLACES = {
    "virtual": "virtual learners of one process", "shm": "ranks of one host with transport='shm'",
    "pg": "one learner on each rank with transport='pg'",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a strategy is like, for all who ask before training: ``distribute``, policies, diagnostics, commands."""

    #: gradients are averaged in some steps. Only then :meth:`~Strategy.bucket_ready` and
    #: :meth:`~Strategy.after_backward` are called.
    averages_gradients: bool = False
    stays_identical: bool = False  #: all learners hold the same weights after every step
    group: int = 1  #: so many consecutive learners average their gradients in every step; 1: there are no groups
    takes_closure: bool = True  #: ``step(closure)`` may compute the gradient inside the step
    #: ``before_forward`` changes something, so each step needs a forward pass that the hook sees
    acts_in_forward: bool = False
    #: the parameters keep their order in the flat buffer, instead of the order of their gradients
    fixed_layout: bool = False
    waits: bool = True  #: learners meet in each step that averages, so policies can average there, too
    overlaps: bool = False  #: weights are sent while the gradient is computed, so their exchange may cost no time
    #: values of ``Communicator.transport`` over which several learners may run. ``mixed`` needs ``shm`` and ``pg``, of
    #: which it consists. Without ``virtual`` the strategy needs real ranks.
    transports: tuple[str, ...] = ("virtual", "shm", "ipc", "pg", "grid", "link")
    transports_because: str = ""  #: why an option leaves these transports only, as a clause with what to do
    most_learners: int | None = None  #: the largest number of learners; None: any number
    quarantines: bool = False  #: a learner can take the average of its neighbours, without its own weights
    #: how much each learner counts in averages of all, or of a group: numbers, or what is counted for them
    weights: Sequence[float] | str | None = None
    #: options that change over a run. Each has a method ``check_run`` as a topology has.
    schedules: tuple[Any, ...] = ()
    #: the first column and the end of each part of the weights, from the first step on, if the state has rows of parts,
    #: ``[L, X]``. A part is a number in the path of such a row, like 1 in ``{"errors": {1: row}}``. So a sharded
    #: learner can be saved for another number of shards. Rows of all columns need no number.
    columns: tuple[tuple[int, int], ...] = ()
    #: paths in its state of what is one for all learners, so that another number of learners goes on with it
    shared_state: tuple[str, ...] = ()
    no_mean: str = ""  #: why the mean of the learners' weights is not what they train, as a clause; empty if it is
    no_deaths: str = ""  #: why no learner may die or join, as a clause with what to do; empty if learners may
    no_shards: str = ""  #: why a learner may not be sharded over ranks, as a clause with what to do; empty if it may


ALL = 0
"""Value of ``Plan.gradients``: the gradients of all learners are averaged."""


@dataclass(frozen=True)
class Plan:
    """What is averaged in one step."""

    gradients: int = 1  #: so many consecutive learners average their gradients; ``ALL`` for all of them, 1 for none
    weights: bool = True  #: the step averages weights or gradients, so policies average in it, too
    #: with ``gradients=ALL``, learners compute them at weights of their own instead of the mean weights
    shifted: bool = False

    @property
    def averages_gradients(self) -> bool:
        """Whether gradients are averaged, of all learners or of each group."""
        return self.gradients != 1

    @property
    def averages_weights(self) -> bool:
        """Whether weights are averaged, of all learners or with neighbours."""
        return self.weights and not self.covers_all_learners

    @property
    def covers_all_learners(self) -> bool:
        """Whether gradients of all learners are averaged."""
        return self.gradients == ALL

    @property
    def gradients_at_mean(self) -> bool:
        """Whether every learner computes its gradient at the mean weights."""
        return self.covers_all_learners and not self.shifted


class Strategy:
    """One algorithm that averages gradients or weights of the learners. One object serves one ``distribute`` call.

    Every rank calls the methods from :meth:`setup` to :meth:`after_step` in the order in which they are defined here.

    A strategy does not step the weights. :meth:`before_step` returns the average that belongs to the step, and
    :class:`ddpcore.optim.weight_step.WeightStep` applies it: in one kernel with the optimizer's rule if possible.
    """

    name: ClassVar[str]
    topology: Topology | None = None  # which learners average with which; None for a strategy without neighbours
    _mixing: Topology | None = None  # W of the last step, by which policies mix too, if it is not that of ``topology``
    _in_use: bool = False  # whether a distribute() call owns the object

    def __repr__(self) -> str:
        """The class and its public attributes: a checkpoint is loaded into a strategy with the same text."""
        own = [name for name, value in vars(self).items() if name[0] != "_" and (name, value) != ("group", 1)]
        return f"{type(self).__name__}({self._shown(*own)})"

    def _shown(self, *names: str) -> str:
        values = [(name, getattr(self, name)) for name in names]
        return ", ".join(f"{name}={describe(value) if callable(value) else repr(value)}" for name, value in values)

    @property
    def traits(self) -> Traits:
        """What the strategy is like with its options. A class attribute ``traits = Traits(...)`` serves as well."""
        return Traits()

    def plan(self, step: int) -> Plan:
        """What is averaged in the step that begins with ``learner.step == step``: pure, and equal on all ranks."""
        return Plan(gradients=ALL if self.traits.averages_gradients else 1)

    def setup(self, num_learners: int, dtype: torch.dtype) -> None:
        """Raise ValueError unless learners and dtype are supported, before ``distribute`` changes the model."""

    def before_forward(self, learner: Learner) -> None:
        """Called before each forward pass that records gradients: several times a step if gradients accumulate."""

    def bucket_ready(self, learner: Learner, columns: Tensor) -> None:
        """Called in a backward pass if ``traits.averages_gradients``: columns ``[L, n]`` of ``grad_LP`` are ready.

        A method with the attribute ``only_averages`` does no more than average them as the plan says. For virtual
        learners it need not be called: large gradients are then averaged where they lie.
        """

    def after_backward(self, learner: Learner) -> None:
        """Called at the end of a backward pass if ``traits.averages_gradients``."""

    def before_step(self, learner: Learner) -> WeightAverage | None:
        """Called before the optimizer's step. ``gather_grads`` of the flat buffer collects the gradients if needed.

        Returns the average of weights that this step applies before the optimizer's rule; None if there is none.
        """
        return None

    def after_step(self, learner: Learner) -> None:
        """Called after the optimizer's step. ``learner.step`` includes that step.

        Call ``learner.check_sent()`` before weights are sent, here or in another method.
        """

    def quarantine(self, learners: Set[int]) -> None:
        """Called before :meth:`before_step` if ``traits.quarantines``: some of the learners held here take no step.

        In the next average they take the average of their neighbours, without their own weights. A call with no learner
        comes before training, if one may be quarantined.
        """

    def gradient_weights(self, learner: Learner) -> Tensor:
        """The weights ``[L, P]`` at which learners computed the gradients of this step, between backward and step."""
        return learner.flat.param_LP

    def restore_weights(self, learner: Learner) -> None:
        """Undo a temporary change of the weights. It is called before the weights are read in the middle of a step."""

    def members_changed(self, learner: Learner, before: Sequence[int | None]) -> None:
        """Called when learners are gone, in the middle of the operation that finds it out, or when one has joined.

        The connection has the new number of learners. ``before``: each learner's old number, None for a new one.
        """

    def state_dict(self) -> dict[str, Any]:
        """The state of a checkpoint, without weights, optimizer and step count: tensors, numbers, and dicts of them."""
        return {}

    def load_state_dict(self, learner: Learner, state: dict[str, Any]) -> None:
        """Load a copy of the result of :meth:`state_dict`, between two steps. The strategy may keep its tensors."""


NO_DEATHS_IN_GROUPS = "on_failure='shrink' leaves a group with fewer learners than the others: leave group out"


def check_run(strategy: Strategy, num_steps: int) -> None:
    """Raise ValueError if a schedule leaves its limits in a run of so many steps, or goes past its end."""
    for one in (strategy.topology, *strategy.traits.schedules):
        if one is not None:
            one.check_run(num_steps)


def check_transport(strategy: Strategy, transport: str) -> None:
    """Raise ValueError if the strategy does not run over ``Communicator.transport`` of several learners."""
    allowed = strategy.traits.transports
    if transport in allowed or (transport == "mixed" and {"shm", "pg"}.issubset(allowed)):
        return
    places = " or ".join(_PLACES.get(name, f"transport={name!r}") for name in allowed)
    found = "several learners on each rank" if transport == "grid" else f"transport={transport!r}"
    remedy = strategy.traits.transports_because or f"take {places}, or dpsgd"
    raise ValueError(f"{strategy.name} does not run over {found}: {remedy}")


def check_deaths(strategy: "Strategy | Baseline", num_learners: int | None = None) -> None:
    """Raise ValueError if no learner of so many may die or join."""
    if strategy.traits.no_deaths:
        raise ValueError(f"{strategy.name}: {strategy.traits.no_deaths}")
    kept = None if num_learners is None or strategy.topology is None else strategy.topology.kept_weights(num_learners)
    if kept is not None or strategy.traits.weights is not None:
        raise ValueError(f"{strategy.name}: weights are of these learners; with on_failure='shrink' others take part")


def check_unweighted(strategy: Strategy, num_learners: int) -> None:
    """Raise ValueError if the topology has weights of learners, which the strategy does not know."""
    if strategy.topology is not None and strategy.topology.kept_weights(num_learners) is not None:
        what = f"{strategy.name} averages all learners alike and {strategy.topology!r} has weights"
        raise ValueError(f"{what}: take dpsgd, or leave the weights out")


def check_mixable(name: str, dtype: torch.dtype, inexact: str = "", remedy: str = "use autocast") -> None:
    """Raise ValueError unless the kernels that mix weights, or add noise, take the dtype of the parameters.

    ``inexact`` is what is too inexact in 16 bits, with its verb, and ``remedy`` helps there, beside float32.
    """
    if dtype not in KERNEL_DTYPES:
        what = f"{name} mixes float32, bfloat16 and float16 and parameters are {str(dtype)[6:]}"
        advice = "keep their real and imaginary parts apart" if dtype.is_complex else "call model.float()"
        raise ValueError(f"{what}: {advice}" + ("" if dtype.is_complex else ", or take ssgd or local_sgd"))
    if inexact and is_narrow(dtype):
        raise ValueError(f"{name}: {inexact} too inexact in 16 bits: keep parameters in float32, {remedy}")


def topology_of(name: str, topology: Any, default: Callable[[], Topology | None] = lambda: None) -> Any:
    """The topology, or the default for None. ValueError: it is anything else, such as the name of a topology."""
    if topology is not None and not isinstance(topology, Topology):
        raise ValueError(f"{name}: topology is {topology!r}: pass an instance, such as ddpcore.Ring()")
    return default() if topology is None else topology


def warn_of_growth(strategy: Any, num_learners: int) -> None:
    """Warn if the learners of an outer step with momentum move apart."""
    if strategy.differences_grow(num_learners):
        what = f"{strategy.name}: outer_momentum is {strategy.outer_momentum:g}"
        why = f"with {num_learners} learners and {strategy.topology!r} the differences between learners grow"
        warnings.warn(f"{what}: {why} without any gradient: take less", stacklevel=2)


def check_on_nonfinite(on_nonfinite: str, strategy: Strategy, num_learners: int | None = None) -> None:
    """Raise ValueError if there is no such value, or a learner has no neighbours whose average it could take."""
    check_choice("on_nonfinite", on_nonfinite, ON_NONFINITE)
    if on_nonfinite != "quarantine":
        return
    if strategy.topology is None:
        raise ValueError(f"on_nonfinite is 'quarantine': {strategy.name} has no neighbours: take 'skip'")
    if not strategy.traits.quarantines:
        what = f"on_nonfinite is 'quarantine': {strategy.name} averages no weights of neighbours alone"
        raise ValueError(f"{what}: take 'skip', or dpsgd without staleness and compression")
    if num_learners == 1:
        raise ValueError("on_nonfinite is 'quarantine': one learner has no neighbours: take 'skip', or more learners")


def check_group(strategy: Strategy, num_learners: int, num_rows: int = 1) -> None:
    """Raise ValueError if a group would lack learners, or hold a part of the ``num_rows`` learners of a rank."""
    name, size = strategy.name, strategy.traits.group
    if num_learners % size:
        raise ValueError(f"{name}: group is {size} of {num_learners} learners: take a divisor of {num_learners}")
    if num_rows % size and size % num_rows:
        what = f"{name}: group is {size} and a rank holds {num_rows} learners"
        raise ValueError(f"{what}: take a divisor or a multiple of {num_rows}")


class Baseline(ABC):
    """Training without ddpcore, for comparison: nothing is flattened and no hook is set."""

    name: ClassVar[str]
    traits: ClassVar[Traits]
    topology: ClassVar[Topology | None] = None

    @abstractmethod
    def connect(self, group: dist.ProcessGroup | None) -> Communicator:
        """The connection, for evaluation and the consensus distance. ValueError: it cannot run on these ranks."""

    @abstractmethod
    def wrap(self, model: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
        """Return the module to train."""
