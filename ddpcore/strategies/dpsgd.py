"""Decentralized parallel SGD."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ddpcore.comm.base import Decode, Exchange
from ddpcore.ops import WeightAverage
from ddpcore.ops.dtypes import is_narrow
from ddpcore.strategies.base import Strategy, check_mixable, check_topology
from ddpcore.strategies.compression import Codec, Published
from ddpcore.strategies.learner import Learner
from ddpcore.topology.base import Topology
from ddpcore.topology.pairs import RandomPair
from ddpcore.topology.stale import check_stale

ORDERS = ("average_while_computing", "adapt_then_combine", "combine_then_adapt")
"""Values of ``DPSGD(order=)``; the first is the default."""


@dataclass(frozen=True)
class _Pending:
    """An exchange under way: the rows that were sent, and, unless they were the weights themselves, what they say."""

    exchange: Exchange
    sent: Tensor
    published_LP: Tensor | None


@dataclass
class _NarrowAverage(WeightAverage):
    """An average of 16-bit weights in fp32. What rounding takes from a weight is given to its next average.

    Otherwise the mean over learners would move with every rounding, though no gradient moves it.

    Attributes:
        average: of the same weights in fp32.
        strategy: keeps what rounding took, its ``_remainder_LP``.
    """

    average: WeightAverage
    strategy: DPSGD

    def apply_(self, weights_LP: Tensor) -> None:
        """Average in fp32, round once, and keep the rest."""
        wide_LP = weights_LP.float()
        if self.strategy._remainder_LP is not None:
            wide_LP += self.strategy._remainder_LP
        self.average.apply_(wide_LP)
        weights_LP.copy_(wide_LP)
        self.strategy._remainder_LP = wide_LP - weights_LP.float()


def _widened(decode: Decode | None, source: int, row: Tensor) -> Tensor:
    return (row if decode is None else decode(source, row)).float()


class DPSGD(Strategy):
    r"""Decentralized parallel SGD: learners average with neighbours, in one of three orders.

    - ``average_while_computing`` (Lian et al. 2017, algorithm 1): ``w_j(t+1) = sum_k W_jk(t) w_k(t) - a g_j(w_j(t))``.
      The exchange needs w(t) only, so it runs during the whole forward and backward pass. With FusedSGD mix,
      momentum and step are one pass over the weights. Stable on a quadratic of curvature h where
      ``a h < 1 + lambda_min(W)``.
    - ``adapt_then_combine``: ``w_j(t+1) = sum_k W_jk(t) (w_k(t) - a g_k(w_k(t)))``. Stable where ``a h < 2``; the
      exchange hides behind nothing.
    - ``combine_then_adapt``: ``w_j(t+1) = v_j - a g_j(v_j)`` with ``v_j = sum_k W_jk(t) w_k(t)``. As stable, as slow.

    With ``staleness`` 1 neighbours have a whole further step to answer:
    ``w_j(t+1) = w_j(t) + 1/2 sum_k W_jk(t-1) (w_k(t-1) - w_j(t-1)) - a g_j(w_j(t))``. The mean over learners moves as
    without delay, and half the way keeps every symmetric W stable: of eigenvalue l, the error goes as the roots of
    ``z^2 - z + (1-l)/2``, whose magnitude is below one for all l in (-1, 1).

    Of a W that is not symmetric it is checked.

    With ``compression`` learners move by differences of what was published, q:
    ``sum_k W_jk w_k`` becomes ``w_j + gamma sum_k W_jk (q_k - q_j)``, which never moves the mean over learners.

    Momentum stays local, unless a policy says otherwise.

    Args:
        topology: W(t), who averages with whom at step t; None is ``RandomPair()``.
        order: one of ``ORDERS``.
        staleness: 0, or 1 for ``average_while_computing``.
        compression: None, or a codec of :mod:`ddpcore.strategies.compression`.

    Raises:
        ValueError: the options do not go together.
    """

    name: ClassVar[str] = "dpsgd"
    takes_closure: bool = False  # the gradient must be the one at the unmixed weights
    topology: Topology

    def __init__(
        self,
        topology: Topology | None = None,
        *,
        order: str = ORDERS[0],
        staleness: int = 0,
        compression: Codec | None = None,
    ) -> None:
        check_topology(self.name, topology)
        if order not in ORDERS:
            raise ValueError(f"dpsgd: unknown order {order!r}: choose from {', '.join(ORDERS)}")
        if staleness not in (0, 1):
            raise ValueError(f"dpsgd: staleness is {staleness}: it must be 0 or 1 step")
        if staleness and order != ORDERS[0]:
            raise ValueError(f"dpsgd: staleness 1 is for {ORDERS[0]}: {order} waits for its neighbours by definition")
        if staleness and compression is not None and compression.differences:
            raise ValueError(f"dpsgd: {compression.name} sends differences, which need staleness 0")
        self.topology = RandomPair() if topology is None else topology
        self.order = order
        self.staleness = staleness
        self.compression = compression
        self._published = None if compression is None else Published(compression)
        self._versions: list[int] = []  # of the weights that are in flight as they are
        self._under_way: list[_Pending] = []  # oldest first
        self._begun = False  # whether a forward pass of this step has been seen
        self._remainder_LP: Tensor | None = None  # of 16-bit weights: what rounding took from them

    def __repr__(self) -> str:
        options = f"order={self.order!r}, staleness={self.staleness}, compression={self.compression}"
        return f"DPSGD({self.topology!r}, {options})"

    def setup(self, num_learners: int, dtype: torch.dtype) -> None:
        """Check W, and what the codec needs of it, against the number of learners, and the dtype."""
        check_mixable(self.name, dtype)
        self.topology.validate(num_learners)
        self._check_codec(num_learners)
        if self.staleness:
            check_stale(self.topology, num_learners)

    def _check_codec(self, num_learners: int) -> None:
        codec = self.compression
        if codec is not None and codec.differences and self.topology.period(num_learners) != 1:
            raise ValueError(
                f"dpsgd: {codec.name} keeps an estimate of each neighbour and {self.topology!r} changes them: take a "
                "fixed topology (ring), or bf16 or int8 without error feedback"
            )

    def before_forward(self, learner: Learner) -> None:
        """Start the exchange of w(t), or combine first and compute then. The first forward pass of a step does so."""
        if self._begun:
            return
        self._begun = True
        if self._published is not None:
            self._published.begin(learner.flat.param_LP, self._neighbors(learner))
        if self.order == ORDERS[0]:
            self._start(learner, learner.step)
        elif self.order == ORDERS[2]:
            self._combine(learner, learner.step)
            torch.autograd.graph.increment_version(learner.flat.parameters)

    def before_step(self, learner: Learner) -> WeightAverage | None:
        """Average while computing: w <- W w."""
        if self.order == ORDERS[2] and not self._begun:
            raise RuntimeError(f"{self.order} combines in the forward pass and there was none: call the model first")
        self.before_forward(learner)  # made up for where gradients came from elsewhere
        self._begun = False
        if self.order == ORDERS[0] and len(self._under_way) > self.staleness:
            return self._finish(learner)
        return None

    def after_step(self, learner: Learner) -> None:
        """Adapted: combine. The other orders exchange with the next forward pass."""
        if self.order == ORDERS[1]:
            self._combine(learner, learner.step - 1)

    def averages_weights_at(self, step: int) -> bool:
        """At every step."""
        return True

    def _combine(self, learner: Learner, step: int) -> None:
        """At once."""
        if self._published is None and not is_narrow(learner.flat.param_LP.dtype):
            learner.comm.mix_(learner.flat.param_LP, self.topology, step)
        else:
            self._start(learner, step)
            learner.flat.average_(self._finish(learner))

    def _start(self, learner: Learner, step: int) -> None:
        weights_LP = learner.flat.param_LP
        rows, published = weights_LP, None
        if self._published is not None:
            rows = self._published.encode(weights_LP)
            published = self._published.rows_LP
        elif self.staleness:
            rows = published = weights_LP.clone()
        else:
            self._versions = [parameter._version for parameter in learner.flat.parameters]
        is_lent = published is None and self.order == ORDERS[0] and not is_narrow(weights_LP.dtype)
        exchange = (learner.comm.exchange_in_place if is_lent else learner.comm.exchange)(rows, self.topology, step)
        self._under_way.append(_Pending(exchange, rows, published))

    def _neighbors(self, learner: Learner) -> set[int]:
        """Of the learners held here, those that are held elsewhere, where they are always the same."""
        comm = learner.comm
        rounds = (self.topology.round(0, rank, comm.num_learners) for rank in comm.learners)
        return {source for plan in rounds for source in plan.sources}.difference(comm.learners)

    def _finish(self, learner: Learner) -> WeightAverage:
        """Wait for the oldest exchange, and return its average."""
        pending, weights_LP = self._under_way.pop(0), learner.flat.param_LP
        exchange, published = pending.exchange, pending.published_LP
        if published is None and self._versions != [parameter._version for parameter in learner.flat.parameters]:
            raise RuntimeError(
                "weights were changed between a forward pass and the step that follows, while neighbours read them: "
                "change them after a step, or evaluate under torch.no_grad()"
            )
        decode = None if self._published is None else partial(self._published.decode, like_LP=weights_LP)
        factor = 0.5 if self.staleness else 1.0
        factor *= 1.0 if self.compression is None else self.compression.consensus_step
        if is_narrow(weights_LP.dtype):
            published = weights_LP if published is None else published
            average = exchange.correction(published.float(), factor, partial(_widened, decode))
            return _NarrowAverage(average, self)
        return exchange.mixture() if published is None else exchange.correction(published, factor, decode)

    def state_dict(self) -> dict[str, Any]:
        """What was published, and for staleness 1 the rows whose exchange is not over."""
        published = None if self._published is None else self._published.state_dict()
        stale = [(pending.sent, pending.published_LP) for pending in self._under_way if self.staleness]
        return {"published": published, "stale": stale, "remainder": self._remainder_LP}

    def load_state_dict(self, learner: Learner, state: dict[str, Any]) -> None:
        """An exchange that was under way is started once more."""
        if self._published is not None:
            self._published.load_state_dict(state["published"])
        for pending in self._under_way:
            pending.exchange.abandon()
        self._under_way, self._begun = [], False
        self._remainder_LP = None if state["remainder"] is None else state["remainder"].clone()
        for sent, published in state["stale"]:
            rows = sent.clone()
            exchange = learner.comm.exchange(rows, self.topology, learner.step - 1)
            self._under_way.append(_Pending(exchange, rows, published.clone()))
