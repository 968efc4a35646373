"""GASLoC: local steps, then a step of gossip with momentum."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from ddpcore.comm.base import exchange_columns
from ddpcore.options.typed import check_range
from ddpcore.strategies.base import Plan, Traits, check_mixable, topology_of, warn_of_growth
from ddpcore.strategies.learner import Learner
from ddpcore.strategies.outer import Start
from ddpcore.strategies.ssgd import GradientAverages
from ddpcore.topology.base import Topology
from ddpcore.topology.pairs import RandomPair
from ddpcore.topology.schedule import Rounds, Varying
from ddpcore.topology.wrapped import Slowed


class GASLoC(GradientAverages):
    r"""GASLoC (Cagnasso et al. 2026, 2606.11081): H local steps, then an outer step that averages with neighbours.

    A round begins at phi_j(r), and H local steps take learner j from there to v_j. Then

    ``z_j(r) = phi_j(r) + b (v_j - phi_j(r))``;
    ``phi_j(r+1) = sum_k W_jk(r) z_k(r) + gamma (z_j(r) - z_j(r-1))``, with ``z_j(-1) = phi_j(0)``.

    The mean over learners moves as the anchor of DiLoCo with Nesterov momentum gamma and rate b. The learners differ,
    because the momentum is not averaged: on a complete graph it is DiLoCo only if gamma is 0.

    With random partners a large momentum makes the differences d between learners grow without any gradient, because
    ``d(r+1) = W(r) d(r) + gamma (d(r) - d(r-1))``. E[d^2] grows if ``2 (1 - e) gamma^2 > (1 - s - 2 e + 2 e^2) gamma +
    1 - s``, with e and s of :meth:`~ddpcore.RandomPair.kept`. For many learners and one partner gamma must be at most
    0.707; with two partners at most 0.795. This bound is derived here, and a larger gamma is a warning.

    The equation is second-hand, from a transcription of the paper: neither the paper nor its code was read. There W is
    ``I - alpha Lambda``, with an alpha that is not known. :class:`~ddpcore.RandomPair` gives its randomized matchings
    of one peer with alpha 1, and of two peers (``num_partners=2``) with alpha 2/3. The value of z(-1) is not
    in the transcription; this one makes one learner alone equal to ``torch.optim.SGD`` with ``nesterov=True``.

    Args:
        topology: W(r), of each round r; None is ``RandomPair()``.
        period: H, or a schedule of it: see :class:`~ddpcore.LocalSGD`.
        outer_lr: b.
        outer_momentum: gamma, 0 <= gamma < 1. The paper's is not known.
        group: k, see :class:`~ddpcore.LocalSGD`: k learners are one, and j and k count groups.

    ValueError: a number is out of its range.
    """

    name: ClassVar[str] = "gasloc"
    topology: Topology
    _mixing: Topology

    def __init__(
        self,
        topology: Topology | None = None,
        *,
        period: Varying = 8,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.5,
        group: int = 1,
    ) -> None:
        super().__init__(group)
        check_range("gasloc: outer_lr", outer_lr, above=0)
        check_range("gasloc: outer_momentum", outer_momentum, least=0, below=1)
        self._given = topology_of(self.name, topology, RandomPair)
        self.topology = self._between(self._given)
        self._rounds = Rounds(self.name, period)
        self.period, self.outer_lr, self.outer_momentum = self._rounds.value, outer_lr, outer_momentum
        self._mixing = Slowed(self.topology, self._rounds.number)  # one round of the topology a period
        self._begun = Start()  # its rows are phi(r)
        self._before_LP: Tensor | None = None  # z(r-1)

    @property
    @override
    def traits(self) -> Traits:
        return Traits(
            averages_gradients=self.group > 1,
            group=self.group,
            fixed_layout=self.group > 1,  # phi(0) is copied before the first backward pass, which orders the buffer
            schedules=(self._rounds,),
            no_deaths="each learner keeps the weights of its last round, which nobody has for a new learner: take "
            "on_failure='raise', or dpsgd",
        )

    @override
    def setup(self, num_learners: int, dtype: torch.dtype) -> None:
        check_mixable(self.name, dtype, "differences of weights are")
        self.topology.validate(num_learners)
        warn_of_growth(self, num_learners)

    def differences_grow(self, num_learners: int) -> bool:
        """Whether differences between learners grow by themselves (see the class). False for other topologies."""
        num = num_learners // self.group
        if type(self._given) is not RandomPair or num == 1:  # a subclass may draw others
            return False
        (e, s), gamma = self._given.kept(num), self.outer_momentum
        return 2 * (1 - e) * gamma**2 > (1 - s - 2 * e + 2 * e**2) * gamma + 1 - s

    @override
    def before_forward(self, learner: Learner) -> None:
        super().before_forward(learner)
        if self._before_LP is None:
            self._begun.note(learner)

    @override
    def before_step(self, learner: Learner) -> None:
        if self._before_LP is None:
            self._before_LP = self._begun.note(learner).clone()

    @override
    def after_step(self, learner: Learner) -> None:
        """At the end of a round: take the outer step, and begin the next round there."""
        if not self._rounds.ends(learner.step):
            return
        weights_LP, start_LP = learner.flat.param_LP, self._begun.rows_LP
        assert start_LP is not None and self._before_LP is not None
        weights_LP.sub_(start_LP).mul_(self.outer_lr).add_(start_LP)  # z
        learner.check_sent()
        change_LP = weights_LP - self._before_LP
        self._before_LP.copy_(weights_LP)
        if self.group == 1:
            learner.comm.mix_(weights_LP, self._mixing, learner.step - 1)
        else:
            exchange = exchange_columns(learner.comm, weights_LP, self._mixing, self.group, learner.step - 1)
            exchange.mixture().apply_(weights_LP)
        weights_LP.add_(change_LP, alpha=self.outer_momentum)
        start_LP.copy_(weights_LP)

    @override
    def plan(self, step: int) -> Plan:
        return Plan(self.group, weights=self._rounds.ends(step + 1))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"start": self._begun.rows_LP, "before": self._before_LP}

    @override
    def load_state_dict(self, learner: Learner, state: dict[str, Any]) -> None:
        self._begun = Start(state["start"])
        self._before_LP = state["before"]
