"""NoLoCo: local steps, then an outer step towards the average of a random pair."""

from functools import partial
from typing import ClassVar

import torch
from typing_extensions import override

from ddpcore.options.typed import check_range
from ddpcore.strategies.base import warn_of_growth
from ddpcore.strategies.local_sgd import LocalSGD
from ddpcore.topology.base import Topology
from ddpcore.topology.pairs import RandomPair
from ddpcore.topology.schedule import Varying


class NoLoCo(LocalSGD):
    r"""NoLoCo (2506.10911): H local steps, then an outer step with momentum that averages with one neighbour.

    A round begins at phi_j, and H local steps take learner j from there to theta_j. Then

    ``m_j <- mu m_j + b (sum_k W_jk theta_k - phi_j)``;  ``phi_j <- phi_j + m_j``.

    The momentum m_j is never sent, only theta_j. In one group of all, a complete graph, it is DiLoCo with heavy-ball
    momentum. Learners stay apart if their data differ: take ``handle.evaluation_model()``.

    The rule is from the authors' code (github.com/jkolehm/noloco), and the defaults are from its configurations.
    The paper, which was not read, gives the part ``mean phi - phi_j`` of the bracket a factor of its own.

    With random partners a large momentum makes the differences d between learners grow without any gradient: E[d^2]
    grows if ``b (1 - 2 e + s) (1 + mu) > 2 (1 - e) (1 - mu^2) + 2 mu b (1 - e)^2``, with e and s of
    :meth:`~ddpcore.RandomPair.kept`. For many learners and b = 0.7, mu must be at most 0.806. This bound is derived
    here, and a larger mu is a warning.

    Args:
        topology: W(r), of each round r; None is ``RandomPair()``.
        period: H, or a schedule of it: see :class:`~ddpcore.LocalSGD`.
        outer_lr: b.
        outer_momentum: mu, 0 <= mu < 1.
        group: k, see :class:`~ddpcore.LocalSGD`: k learners are one, and sum over groups.

    ValueError: a number is out of its range.
    """

    name: ClassVar[str] = "noloco"

    def __init__(
        self,
        topology: Topology | None = None,
        *,
        period: Varying = 50,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.5,
        group: int = 1,
    ) -> None:
        check_range("noloco: outer_lr", outer_lr, above=0)
        check_range("noloco: outer_momentum", outer_momentum, least=0, below=1)
        outer = partial(torch.optim.SGD, lr=outer_lr, momentum=outer_momentum)
        self._given = RandomPair() if topology is None else topology
        super().__init__(period, outer=outer, topology=self._given, group=group)
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum

    @override
    def setup(self, num_learners: int, dtype: torch.dtype) -> None:
        super().setup(num_learners, dtype)
        warn_of_growth(self, num_learners)

    def differences_grow(self, num_learners: int) -> bool:
        """Whether differences between learners grow by themselves (see the class). False for other topologies."""
        num = num_learners // self.group
        if type(self._given) is not RandomPair or num == 1:  # a subclass may draw others
            return False
        (e, s), b, mu = self._given.kept(num), self.outer_lr, self.outer_momentum
        return b * (1 - 2 * e + s) * (1 + mu) > 2 * (1 - e) * (1 - mu**2) + 2 * mu * b * (1 - e) ** 2

    def __repr__(self) -> str:
        return f"NoLoCo({self.topology!r}, {self._shown('period', 'outer_lr', 'outer_momentum')})"
