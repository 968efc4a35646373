"""Decentralized parallel SGD."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from ddpcore.comm.base import Decode, Exchange, exchange_columns
from ddpcore.ops import WeightAverage
from ddpcore.ops.library import is_narrow
from ddpcore.options.typed import check_choice, check_keys, check_range, typed
from ddpcore.strategies.base import NO_DEATHS_IN_GROUPS, Plan, Traits, check_mixable, topology_of
from ddpcore.strategies.compression import CodecLike, Published, codec_of
from ddpcore.strategies.learner import Learner
from ddpcore.strategies.ssgd import GradientAverages
from ddpcore.topology.base import Topology
from ddpcore.topology.describe import check_stale
from ddpcore.topology.pairs import RandomPair
from ddpcore.topology.schedule import Setting
from ddpcore.topology.wrapped import Damped

ORDERS = ("average_while_computing", "adapt_then_combine", "combine_then_adapt")
"""Values of ``DPSGD(order=)``; the first is the default."""


@dataclass(frozen=True, kw_only=True)
class AdaptiveConsensus:
    r"""The share c_t of an average in DSGD-AC (2602.02899), which falls with the learning rate a_t.

    ``c_t = (1 - least) (a_t / a_s)^power + least`` from step s = ``start`` on, and 1 before. ``w <- W w`` becomes
    ``w <- (1 - c_t) w + c_t W w``, so learners stay further apart at a small rate than with DPSGD. c_t is 1 where the
    rate is above a_s. The first parameter group gives the rate when the exchange starts.

    It rests on the code of the paper's author (github WangZesen/decent-sam-grc); the paper was not read. The defaults
    are from that code, except its ``start``, the end of the warm-up. ValueError: a number is out of its range.
    """

    power: float = 3.0  #: not negative; 0 is DPSGD
    least: float = 0.0  #: c at rate 0, from 0 to 1
    start: int = 0  #: s, in steps. The rate must be above 0 there.

    def __post_init__(self) -> None:
        check_range("consensus: power", typed("consensus: power", self.power, float), least=0)
        check_range("consensus: least", typed("consensus: least", self.least, float), least=0, most=1)
        check_range("consensus: start", typed("consensus: start", self.start, int), least=0)

    def share(self, ratio: float) -> float:
        """c_t for ``a_t / a_s``."""
        return min(1.0, (1 - self.least) * float(ratio**self.power) + self.least)


Consensus = AdaptiveConsensus | Mapping[str, Any] | Callable[[int], float] | Sequence[tuple[int, float]] | None


def consensus_of(wanted: Consensus) -> AdaptiveConsensus | Setting | None:
    """Make the consensus from its settings, such as ``{"power": 3, "start": 500}``, or from a schedule."""
    if wanted is None or isinstance(wanted, AdaptiveConsensus):
        return wanted
    if callable(wanted) or isinstance(wanted, list | tuple):
        return Setting("dpsgd: consensus", wanted, above=0, most=1)
    if not isinstance(wanted, Mapping):
        raise ValueError(f"dpsgd: consensus is {wanted!r}: it must be a mapping, settings of an AdaptiveConsensus")
    check_keys("dpsgd: consensus", wanted, (item.name for item in fields(AdaptiveConsensus)))
    return AdaptiveConsensus(**wanted)


class _Pending(NamedTuple):
    exchange: Exchange
    sent: Tensor
    published_LP: Tensor | None  # the values of what was sent; None if the weights were


@dataclass
class _NarrowAverage(WeightAverage):
    """An average of 16-bit weights, computed in fp32. The rounding error is added to the next average.

    Without that, each rounding would move the mean over learners.
    """

    average: WeightAverage  # of the same weights in fp32
    strategy: "DPSGD"  # keeps the rounding error

    @override
    def apply_(self, weights_LP: Tensor) -> None:
        wide_LP = weights_LP.float()
        if self.strategy._remainder_LP is not None:
            wide_LP += self.strategy._remainder_LP
        self.average.apply_(wide_LP)
        weights_LP.copy_(wide_LP)
        self.strategy._remainder_LP = wide_LP - weights_LP.float()


class DPSGD(GradientAverages):
    r"""Decentralized parallel SGD: learners average with their neighbours, in one of three orders.

    - ``average_while_computing`` (Lian et al. 2017, algorithm 1): ``w_j(t+1) = sum_k W_jk(t) w_k(t) - a g_j(w_j(t))``.
      The exchange needs only w(t), so it overlaps the whole forward and backward pass. With FusedSGD, one kernel
      applies average, momentum and step. On a quadratic of curvature h it is stable if ``a h < 1 + lambda_min(W)``.
    - ``adapt_then_combine``: ``w_j(t+1) = sum_k W_jk(t) (w_k(t) - a g_k(w_k(t)))``. It is stable if ``a h < 2``, but
      the exchange does not overlap with any computation.
    - ``combine_then_adapt``: ``w_j(t+1) = v_j - a g_j(v_j)`` with ``v_j = sum_k W_jk(t) w_k(t)``. Its stability and its
      cost are as with ``adapt_then_combine``.

    With ``staleness`` 1 the exchange may take one more step:
    ``w_j(t+1) = w_j(t) + 1/2 sum_k W_jk(t-1) (w_k(t-1) - w_j(t-1)) - a g_j(w_j(t))``. The mean over learners moves as
    without the delay. The factor 1/2 keeps every symmetric W stable: for an eigenvalue l of W, the error decays as the
    roots of ``z^2 - z + (1-l)/2``, of magnitudes below one for all l in (-1, 1). :meth:`setup` checks other W.

    With ``consensus`` learners average less as the learning rate falls (:class:`AdaptiveConsensus`): W(t) becomes
    ``(1 - c_t) I + c_t W(t)``.

    With ``compression`` learners move by differences of published rows q: ``sum_k W_jk w_k`` becomes
    ``w_j + gamma sum_k W_jk (q_k - q_j)``, which does not move the mean over learners.

    Args:
        topology: W(t), which learners average with which at step t; None is ``RandomPair()``.
        order: one of ``ORDERS``.
        staleness: 0, or 1 for ``average_while_computing``.
        compression: None, or a codec of :mod:`ddpcore.strategies.compression`, also by name, or as a mapping of its
            name and settings.
        consensus: None, or an :class:`AdaptiveConsensus`, also as a mapping of its settings; or a schedule of
            c_t, above 0: a function from the step, or :class:`~ddpcore.Milestones`. It needs staleness 0.
        group: a divisor of the number of learners. So many consecutive learners are a group, and j and k of the
            equations count groups. A group averages its gradients in every step, as ssgd does, and each of its learners
            sends its part of the weights to its place in a neighbouring group. Without staleness and compression.

    ValueError: an unknown value, or a combination of options that is not supported.
    """

    name: ClassVar[str] = "dpsgd"
    topology: Topology

    def __init__(
        self,
        topology: Topology | None = None,
        *,
        order: str = ORDERS[0],
        staleness: int = 0,
        compression: CodecLike = None,
        consensus: Consensus = None,
        group: int = 1,
    ) -> None:
        super().__init__(group)
        compression, share = codec_of(compression), consensus_of(consensus)
        check_choice("dpsgd: order", order, ORDERS)
        if staleness not in (0, 1):
            raise ValueError(f"dpsgd: staleness is {staleness}: it must be 0 or 1 step")
        if staleness and order != ORDERS[0]:
            raise ValueError(f"dpsgd: staleness 1 is for {ORDERS[0]}: {order} waits for its neighbours in each step")
        if staleness and compression is not None and compression.differences:
            raise ValueError(f"dpsgd: {compression.name} sends differences, which need staleness 0")
        if staleness and share is not None:
            raise ValueError("dpsgd: consensus sets the share of an average in its own step: take staleness 0")
        if self.group > 1 and (staleness or compression is not None):
            raise ValueError(f"dpsgd: group is {group}: take staleness 0 and no compression, or leave group out")
        self.topology = self._between(topology_of(self.name, topology, RandomPair))
        self.order, self.staleness, self.compression = order, staleness, compression
        self.consensus = share.value if isinstance(share, Setting) else share
        self._share = share
        self._reference_lr: float | None = None  # of the consensus
        self._published = None if compression is None else Published(compression)
        self._under_way: list[_Pending] = []  # oldest first
        self._begun = False  # whether before_forward ran in this step
        self._loads: int | None = None  # of trained parameters, when it ran; None: a state had the weights
        self._remainder_LP: Tensor | None = None  # the rounding error of 16-bit weights
        self._quarantined: set[int] | None = None  # until the next average; None if no learner ever is

    def __repr__(self) -> str:
        more = ["consensus"] * (self.consensus is not None) + ["group"] * (self.group > 1)
        return f"DPSGD({self.topology!r}, {self._shown('order', 'staleness', 'compression', *more)})"

    @property
    @override
    def traits(self) -> Traits:
        codec, no_deaths = self.compression, NO_DEATHS_IN_GROUPS if self.group > 1 else ""
        if codec is not None and codec.differences:
            why = f"{codec.name} sends differences, which need fixed neighbours, and on_failure='shrink' changes them"
            no_deaths = f"{why}: take bf16 or int8 without error feedback"
        return Traits(
            averages_gradients=self.group > 1,
            group=self.group,
            takes_closure=False,  # the gradient must be computed before the average
            fixed_layout=self.group > 1,  # columns are sent before the first backward pass, which orders the buffer
            overlaps=self.order == ORDERS[0],
            quarantines=self.staleness == 0 and codec is None and self.consensus is None and self.group == 1,
            schedules=(self._share,) if isinstance(self._share, Setting) else (),
            shared_state=("reference_lr",),
            no_deaths=no_deaths,
        )

    @override
    def plan(self, step: int) -> Plan:
        return Plan(self.group)

    @override
    def setup(self, num_learners: int, dtype: torch.dtype) -> None:
        check_mixable(self.name, dtype, "averages between groups are" if self.group > 1 else "")
        self.topology.validate(num_learners)
        codec = self.compression
        if codec is not None and codec.differences and self.topology.period(num_learners) != 1:
            what = f"dpsgd: {codec.name} keeps an estimate of each neighbour and {self.topology!r} changes them"
            raise ValueError(f"{what}: take a fixed topology (ring), or bf16 or int8 without error feedback")
        if self.staleness:
            check_stale(self.topology, num_learners)

    @override
    def before_forward(self, learner: Learner) -> None:
        """Start the exchange of w(t), or combine, in the first forward pass of a step."""
        super().before_forward(learner)
        loads = sum(learner.loaded[key] for key in learner.flat.index)
        is_begun = self._begun and (self.order != ORDERS[2] or self._loads in (None, loads))
        self._begun, self._loads = True, loads  # a state that is loaded replaces what has been combined
        if is_begun:
            return
        if self._published is not None:
            self._published.begin(learner, self.topology)
        if self.order == ORDERS[0]:
            self._start(learner, learner.step)
        elif self.order == ORDERS[2]:
            self._combine(learner, learner.step)
            torch.autograd.graph.increment_version(learner.flat.parameters)

    @override
    def before_step(self, learner: Learner) -> WeightAverage | None:
        """Average while computing: return w <- W w. The other orders return None."""
        if self.order == ORDERS[2] and not self._begun:
            raise RuntimeError(f"{self.order} combines in the forward pass and there was none: call the model first")
        self.before_forward(learner)  # does nothing, unless the gradients were set without a forward pass
        self._begun = False
        if self.order == ORDERS[0] and len(self._under_way) > self.staleness:
            return self._finish(learner)
        return None

    @override
    def after_step(self, learner: Learner) -> None:
        if self.order == ORDERS[1]:
            self._combine(learner, learner.step - 1)

    @override
    def quarantine(self, learners: Set[int]) -> None:
        self._quarantined = (self._quarantined or set()) | learners

    def _combine(self, learner: Learner, step: int) -> None:
        """Exchange and average without overlap."""
        is_plain = self._published is None and not is_narrow(learner.flat.param_LP.dtype) and self.group == 1
        if is_plain and self._quarantined is None:  # an average in pairs is not of one learner alone
            learner.check_sent()
            learner.comm.mix_(learner.flat.param_LP, self._mix_at(learner, step), step)
        else:
            self._start(learner, step)
            learner.flat.average_(self._finish(learner))

    def _start(self, learner: Learner, step: int) -> None:
        learner.check_sent()
        weights_LP = learner.flat.param_LP
        rows, published = weights_LP, None
        if self._published is not None:
            rows = self._published.encode(weights_LP)
            published = self._published.rows_LP
        elif self.staleness:
            rows = published = weights_LP.clone()
        in_place = published is None and self.order == ORDERS[0] and not is_narrow(weights_LP.dtype)
        mixing = self._mix_at(learner, step)
        if in_place and self.group == 1:
            exchange = learner.comm.exchange(rows, mixing, step, in_place=True)
        else:
            exchange = exchange_columns(learner.comm, rows, mixing, self.group, step)
        self._under_way.append(_Pending(exchange, rows, published))

    def _mix_at(self, learner: Learner, step: int) -> Topology:
        """The topology, or the part of it that counts at the learning rate of the step."""
        share, wanted = 1.0, self._share
        if isinstance(wanted, Setting):
            share = wanted.at(step)
        elif wanted is not None:
            lr = float(learner.optimizer.param_groups[0]["lr"])
            if self._reference_lr is None and step >= wanted.start:
                if lr <= 0:
                    text = "let consensus start where the schedule is above 0"
                    raise ValueError(f"dpsgd: consensus compares with the rate of step {step}, which is {lr}: {text}")
                self._reference_lr = lr
            share = 1.0 if self._reference_lr is None else wanted.share(lr / self._reference_lr)
        self._mixing = self.topology if share == 1 else Damped(self.topology, share)
        return self._mixing

    def _finish(self, learner: Learner) -> WeightAverage:
        """Return the average of the oldest exchange, after waiting for it."""
        pending, weights_LP = self._under_way.pop(0), learner.flat.param_LP
        exchange, published = pending.exchange, pending.published_LP
        if self._published is not None:
            self._published.settle()
        if self._quarantined:
            exchange.quarantine(self._quarantined)
            self._quarantined = set()
        if published is None:
            learner.check_unchanged()
        decode = None if self._published is None else partial(self._published.decode, like_LP=weights_LP)
        factor = 0.5 if self.staleness else 1.0
        factor *= 1.0 if self.compression is None else self.compression.consensus_step
        if is_narrow(weights_LP.dtype):
            wide_LP = (weights_LP if published is None else published).float()
            read: Decode = (lambda _, row: row.float()) if decode is None else lambda *one: decode(*one).float()
            return _NarrowAverage(exchange.correction(wide_LP, factor, read), self)
        return exchange.mixture() if published is None else exchange.correction(published, factor, decode)

    @override
    def state_dict(self) -> dict[str, Any]:
        """The published rows, the rounding error and, for staleness 1, the rows of exchanges in progress."""
        combined = self._begun and self.order == ORDERS[2]  # the weights are an average already
        earlier = len(self._under_way) - self._begun  # the next forward pass begins the last one again
        return {
            "published": None if self._published is None else self._published.state_dict(),
            "stale": [(pending.sent, pending.published_LP) for pending in self._under_way[:earlier]],
            "remainder": self._remainder_LP,
            "quarantined": None if self._quarantined is None else sorted(self._quarantined),
            "reference_lr": self._reference_lr,
            **({"combined": True} if combined else {}),
        }

    @override
    def load_state_dict(self, learner: Learner, state: dict[str, Any]) -> None:
        """Load the state, and restart the exchanges that were in progress."""
        if self._published is not None:
            self._published.load_state_dict(state["published"])
        for pending in self._under_way:
            pending.exchange.abandon()
        self._under_way, self._begun, self._loads = [], state.get("combined", False), None
        self._reference_lr = state["reference_lr"]
        if self._quarantined is not None:
            self._quarantined = set(state["quarantined"] or ())
        if self._begun:
            self._mix_at(learner, learner.step)
        self._remainder_LP = state["remainder"]
        for sent, published in state["stale"]:
            exchange = learner.comm.exchange(sent, self.topology, learner.step - 1)
            self._under_way.append(_Pending(exchange, sent, published))
