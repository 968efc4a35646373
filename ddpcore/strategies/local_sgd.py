"""Local SGD, post-local SGD, DiLoCo and streaming DiLoCo."""

from collections.abc import Callable, Mapping
from functools import cache, partial, reduce
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from ddpcore.comm.agreement import describe
from ddpcore.comm.base import Exchange, exchange_columns
from ddpcore.options.typed import check_range, typed
from ddpcore.strategies.base import ALL, NO_DEATHS_IN_GROUPS, Plan, Traits, check_mixable, topology_of
from ddpcore.strategies.compression import Codec, CodecLike, ErrorFeedback, codec_of
from ddpcore.strategies.learner import Learner
from ddpcore.strategies.outer import Anchor, Fragments, MakeOptimizer, Part, Start, check_fragments, outer_of, parts_of
from ddpcore.strategies.ssgd import GradientAverages, Weights, own_samples, scale_, shares_of
from ddpcore.topology.base import Topology
from ddpcore.topology.regular import Complete
from ddpcore.topology.schedule import Rounds, Setting, Varying
from ddpcore.topology.wrapped import BetweenGroups, Slowed


def _filled(rows: Tensor, fill: Callable[[], object]) -> Tensor:
    fill()
    return rows


def _check_rounds(topology: object, then: object, outer: object, restart: int, codec: Codec | None) -> None:
    """Check what a round sends, and what it does after its first average."""
    if codec is not None and (outer is None or topology is not None):
        what = f"local_sgd: compression is {codec.name}: it sends changes of an anchor that all learners share"
        raise ValueError(f"{what}: pass outer, such as lambda p: torch.optim.SGD(p, lr=1.0), and no topology")
    check_range("local_sgd: restart", typed("local_sgd: restart", restart, int), least=0)
    topology_of("local_sgd: then", then)
    if then is not None and topology is None:
        raise ValueError("local_sgd: then averages once more what topology has averaged: pass topology, too")
    if restart and outer is None:
        raise ValueError(f"local_sgd: restart is {restart} and there is no outer optimizer: pass outer")


class LocalSGD(GradientAverages):
    r"""Local SGD (Stich 2019): learners step alone and average their weights every H steps.

    ``w_j(t+1) = v_j(t+1)`` or, where H divides t+1, ``1/n sum_k v_k(t+1)``, with ``v_j(t+1) = w_j(t) - a g_j(w_j(t))``.
    Each learner keeps its own momentum, unless a policy changes that. Before ``switch_step`` it is :class:`SSGD`.

    With ``outer``, the change of the average is a gradient. Let phi be the anchor, where the round of H steps began,
    and m the average. Then ``phi <- outer step of phi along phi - m``, and ``w_j <- phi``.

    - DiLoCo (Douillard et al. 2023): ``outer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)``.
    - Streaming DiLoCo (Douillard et al. 2025): with ``fragments``, ``overlap`` and ``alpha``.
    - With ``group``, k consecutive learners are one learner with k times the batch: ``g_j(w_j)`` is the mean of the
      gradients of j's group, whose learners hold the same weights.
    - With ``topology`` each learner steps an anchor of its own towards the average with its neighbours
      (:class:`~ddpcore.NoLoCo`). With ``group`` besides, W has a row for each group.

    Args:
        period: H, local steps between two averages; 1 averages after every step. A schedule (a function from the step,
            or :class:`~ddpcore.Milestones`) gives the length of the round that begins there: ``[[0, 64], [640, 1]]``
            averages ten times in 640 steps, and then in every step. It excludes fragments and ``warmup_steps``.
        warmup_steps: while t is below it, the period grows from 1 to H by doubling (Lin et al. 2020, "local step
            warm-up").
        switch_step: post-local SGD (Lin et al. 2020): this many first steps average gradients, as ssgd does. ``period``
            and ``warmup_steps`` count from there.
        outer: makes an optimizer of the anchor from the list of tensors that it steps. A mapping has the settings of
            ``torch.optim.SGD``. None takes the average itself.
        topology: which learners average with which in each round; None for all with all. Each learner then keeps an
            anchor and a state of the outer optimizer of its own. With random partners a large momentum of ``outer``
            moves the learners apart, see :class:`~ddpcore.NoLoCo`; no warning says so here.
        fragments: parts of the weights. Each is averaged at its own time, evenly over the period, so an average
            sends fewer bytes at once. A number divides the parameters by size, and lists of names by module:
            ``[["layer1"], ["layer2", "head"]]``. The last fragment comes first in the period.
        overlap: tau, steps between the start of an average and the step that uses it. The average is of the weights
            before these steps, so it travels meanwhile. Of what these steps change, also by your own code, only the
            share ``alpha`` stays.
        alpha: the share of a learner's own weights when it takes the result: ``w_j <- phi + alpha (w_j - phi)``. It may
            be a schedule, too.
        compression: a codec, its name, or a mapping of its name and settings, for the changes ``phi - w_j``, which all
            learners send to all. It needs ``outer``. With ``group`` a learner sends to one learner of each other group.
        group: k, a divisor of the number of learners. Learners 0 to k-1, k to 2k-1, and so on, are groups, and each of
            them averages its gradients in every step, as ssgd does. 1: each learner steps alone.
        then: a second topology W2: the result u of the outer step is averaged again, at once: ``phi_j <- sum_k W2_jk(r)
            u_k``. This is Factored Gossip DiLoCo (2606.22768) as its abstract has it; its appendix was not read.
        restart: R: the outer optimizer forgets its state after every R rounds, which widens the range of stable rates
            and momenta (2605.28585, abstract); 0: never.
        weights: p, how much each learner counts: ``m = sum_k p_k v_k / sum_k p_k``. Numbers; ``samples``, those since
            the last average, where the loop sets ``handle.num_samples`` in each step; or ``tokens``, samples x samples
            / steps (2604.21428). An evaluation between two averages takes the last one's. With ``topology`` take
            :class:`~ddpcore.Weighted`. In groups, and before ``switch_step``, gradients are weighted as in ssgd.
        error_decay: beta, the share of what a message lost that is added to the next one (error feedback; SparseLoCo,
            2508.15706, with ``SparseTopK()`` and beta 0.95).

    ValueError: a number is out of its range, or options exclude each other.
    """

    name: ClassVar[str] = "local_sgd"
    then: Topology | None = None
    restart: int = 0

    def __init__(
        self,
        period: Varying = 8,
        *,
        warmup_steps: int = 0,
        switch_step: int = 0,
        outer: MakeOptimizer | Mapping[str, Any] | None = None,
        topology: Topology | None = None,
        fragments: Fragments = 1,
        overlap: int = 0,
        alpha: Varying = 0.0,
        compression: CodecLike = None,
        error_decay: float = 1.0,
        group: int = 1,
        then: Topology | None = None,
        restart: int = 0,
        weights: Weights = None,
    ) -> None:
        super().__init__(group, weights)
        outer, compression = outer_of(self.name, outer), codec_of(compression)
        check_range("local_sgd: warmup_steps", warmup_steps, least=0)
        check_range("local_sgd: switch_step", switch_step, least=0)
        self._rounds = Rounds(self.name, period, switch_step, 1 if isinstance(period, int) else overlap + 1)
        changes = self._rounds.changes
        check_range("local_sgd: overlap", overlap, least=0, below=None if changes else self._rounds.value)
        self._alpha = Setting("local_sgd: alpha", alpha, least=0, most=1)
        check_range("local_sgd: error_decay", error_decay, least=0, most=1)
        _check_rounds(topology, then, outer, restart, compression)
        self._num_fragments = check_fragments(fragments, 1 if changes else self._rounds.value)
        for option, used in (
            ("fragments", self._num_fragments > 1), ("topology", topology), ("overlap", overlap), ("period", changes),
            ("then", then), ("restart", restart),
        ):  # fmt: skip
            if warmup_steps and used:
                raise ValueError(f"local_sgd: {option} needs a period that does not grow: leave warmup_steps out")
        self.period = self._rounds.value
        self.warmup_steps, self.switch_step = warmup_steps, switch_step
        self.outer = outer
        # All ranks must have the same: of a function only the name could be compared.
        probe = torch.zeros(1, requires_grad=True, dtype=torch.float32, device="cpu")
        self.outer_options = None if outer is None else describe(outer([probe]))
        self.topology = None if topology is None else self._between(topology_of(self.name, topology))
        self.fragments, self.overlap, self.alpha = fragments, overlap, self._alpha.value
        self.compression, self.error_decay = compression, error_decay
        vars(self).pop("group", None)  # the last one, as version 0.2 described a strategy, whose checkpoints go on
        self.group = group
        if then is not None or restart:
            self.then, self.restart = None if then is None else self._between(then), restart
        self._mixing = None if self.topology is None else Slowed(self.topology, self._rounds.number)  # once a round
        self._then = None if self.then is None else Slowed(self.then, self._rounds.number)
        self._begun = Start()
        self._anchor: Anchor | None = None
        self._parts: list[Part] = []
        self._copies: list[Tensor | None] = []  # of the weights of each part, if averages must not overwrite them
        self._under_way: dict[int, Callable[[], Tensor]] = {}  # by part: waits for the average, and returns it
        self._counts: list[Tensor] = []  # samples of the learners held here since the last average of each part, [L]
        self._kept: Tensor | None = None  # the shares of the last average
        self._feedback = None if compression is None else ErrorFeedback(compression, error_decay)

    def __repr__(self) -> str:
        names = ["period", "warmup_steps", "switch_step", "fragments", *["topology"] * (self.topology is not None)]
        names += ["overlap", "alpha"] if self.overlap or self.alpha else []
        names += ["compression", "error_decay"] if self.compression is not None else []
        more = ("group", "weights", "then", "restart")
        names += [name for name in more if getattr(self, name) != getattr(LocalSGD, name)]
        return f"LocalSGD({self._shown(*names)}, outer={'yes' if self.outer else None})"

    @property
    @override
    def traits(self) -> Traits:
        no_deaths = NO_DEATHS_IN_GROUPS if self.group > 1 else ""
        if not no_deaths and (self.overlap or self.compression is not None):
            no_deaths = "on_failure='shrink' needs averages that end in their step: leave overlap and compression out"
        elif not no_deaths and self.topology is not None and self.outer is not None:
            why = "which on_failure='shrink' cannot give to another one: leave topology or outer out"
            no_deaths = f"with topology each learner has an anchor of its own, {why}"
        return Traits(
            averages_gradients=self.switch_step > 0 or self.group > 1,
            group=self.group,
            # Fragments are ranges of the buffer, which the first averages of a group's gradients would order anew.
            fixed_layout=self._num_fragments > 1 or (self.outer is not None and self.group > 1),
            weights=self.weights,
            schedules=(self.then, self._rounds, self._alpha),
            columns=tuple((begin, end) for _, begin, end in self._parts),
            shared_state=("anchor",) if self.topology is None else (),
            no_deaths=no_deaths,
        )

    @override
    def plan(self, step: int) -> Plan:
        """Before the switch as SSGD. Policies act at the end of each period of fragment 0, when all learners meet."""
        return Plan(ALL) if step < self.switch_step else Plan(self.group, weights=self._is_due(step + 1, 0))

    @override
    def setup(self, num_learners: int, dtype: torch.dtype) -> None:
        super().setup(num_learners, dtype)
        if self.topology is not None:
            if self.weights is not None:
                raise ValueError("local_sgd: neighbours average by topology: take Weighted(topology, weights) instead")
            check_mixable(self.name, dtype, "averages with neighbours are", "use autocast, or leave topology out")
            self.topology.validate(num_learners)
        if self.then is not None and self.topology is not None:
            self.then.validate(num_learners)
            kept, more = self.topology.kept_weights(num_learners), self.then.kept_weights(num_learners)
            if (kept is None) != (more is None) or (kept is not None and bool((kept != more).any())):
                raise ValueError("local_sgd: topology and then keep different means: give both the same weights")

    @override
    def before_forward(self, learner: Learner) -> None:
        """Copy the weights from which the learners start, for the outer optimizer."""
        super().before_forward(learner)
        if self.outer is not None and self._anchor is None and learner.step >= self.switch_step:
            self._begun.note(learner)

    @override
    def before_step(self, learner: Learner) -> None:
        """Make the anchor, here, because all learners meet in a step: also one without a forward pass."""
        self._lay_out(learner)
        if self.outer is not None and self._anchor is None and learner.step >= self.switch_step:
            start_LP = self._begun.note(learner)
            weights_AP = learner.common_weights(start_LP) if self.topology is None else start_LP
            self._anchor = Anchor(weights_AP, self._parts, self.outer)
            self._begun = Start()

    @override
    def after_step(self, learner: Learner) -> None:
        """Start the averages that are due in ``overlap`` steps, and use those that are due now."""
        if isinstance(self.weights, str) and learner.step > self.switch_step:  # here, because a closure may set them
            self._counts = [count + own_samples(learner) for count in self._counts]
        if learner.step > self.switch_step:
            for index in self._due(learner.step + self.overlap):
                self._under_way[index] = cache(self._start(learner, index))
        for index in self._due(learner.step):
            if index in self._under_way:
                self._use(learner, index, self._under_way.pop(index)())
        is_last = self.restart and (self._rounds.number(learner.step - 1) + 1) % self.restart == 0
        if self._anchor is not None and is_last and self._is_due(learner.step, 0):
            self._anchor.restart()

    def _lay_out(self, learner: Learner) -> None:
        """Find the parts, once the layout of the buffer is final."""
        if self._parts:
            return
        flat, comm = learner.flat, learner.comm
        self._parts = [Part(0, 0, flat.numel)] if self.fragments == 1 else parts_of(flat, self.fragments)
        are_kept = (self.overlap or self.alpha) and self.compression is None
        shapes, like = [(len(flat.param_LP), end - begin) for _, begin, end in self._parts], flat.param_LP
        self._copies = [comm.allocate(shape, like.dtype, like.device) if are_kept else None for shape in shapes]
        self._counts = [torch.zeros(len(comm.learners), dtype=torch.float64, device="cpu") for _ in self._parts]
        if self.weights is not None and not isinstance(self.weights, str):
            learner.shares = shares_of(self.name, self.weights, learner, None)

    def _start(self, learner: Learner, index: int) -> Callable[[], Tensor]:
        """Send part ``index``. What it returns waits for the average, ``[L, X]``, or ``[1, X]`` of all learners."""
        _, begin, end = self._parts[index]
        weights_LX, copy_LX = learner.flat.param_LP[:, begin:end], self._copies[index]
        learner.check_sent(weights_LX)
        shares = shares_of(self.name, self.weights, learner, self._counts[index])
        if self.weights is not None:
            self._kept = learner.shares = shares
            self._counts[index] = torch.zeros_like(self._counts[index])
        if self._feedback is not None:
            assert self._anchor is not None
            message = self._feedback.encode(self._anchor.rows(index) - weights_LX, index)
            exchange = learner.comm.exchange(message, BetweenGroups(self.group, Complete()), learner.step - 1)
            return partial(self._decoded, exchange, message, weights_LX[:1], shares)
        rows_LX = weights_LX if copy_LX is None else copy_LX.copy_(weights_LX)
        if self._mixing is None:
            scale_(rows_LX, shares, learner)
            return partial(_filled, rows_LX, learner.comm.average_(rows_LX, learner.step - 1).wait)
        if self.overlap or self.group > 1:
            exchange = exchange_columns(learner.comm, rows_LX, self._mixing, self.group, learner.step - 1)
            return partial(_filled, rows_LX, lambda: exchange.mixture().apply_(rows_LX))
        learner.comm.mix_(rows_LX, self._mixing, learner.step - 1)
        return lambda: rows_LX

    def _decoded(self, exchange: Exchange, own_LY: Tensor, like_1X: Tensor, shares_n: Tensor | None) -> Tensor:
        """The average of what one learner of each group has sent."""
        assert self._feedback is not None
        sent = exchange.rows(own_LY)
        messages = {learner // self.group: sent[learner][None] for learner in sorted(sent)}
        rows = {number: self._feedback.codec.decode(message, like_1X) for number, message in messages.items()}
        if shares_n is not None:
            shares = shares_n.view(-1, self.group).mean(dim=1).tolist()
            rows = {number: row * shares[number] for number, row in rows.items()}
        return reduce(torch.add, rows.values()) / len(rows)  # in one order

    def _use(self, learner: Learner, index: int, result_AX: Tensor) -> None:
        """Step the anchor along the average, and take the result."""
        _, begin, end = self._parts[index]
        weights_LX = learner.flat.param_LP[:, begin:end]
        if self._anchor is not None:
            anchor_AX = self._anchor.rows(index)
            is_change = self._feedback is not None
            result_AX = self._anchor.step(result_AX if is_change else anchor_AX - result_AX[: len(anchor_AX)], index)
        if self._then is not None:
            learner.check_sent(result_AX)
            exchange = exchange_columns(learner.comm, result_AX, self._then, self.group, learner.step - 1)
            exchange.mixture().apply_(result_AX)
            if self._anchor is not None:
                self._anchor.set_(result_AX, index)
        if self._anchor is None and self._copies[index] is None:
            return  # the average is in place
        weights_LX.lerp_(result_AX.expand_as(weights_LX), 1 - self._alpha.at(learner.step - 1))

    def _due(self, step: int) -> list[int]:
        """The parts whose average is used in the step after which ``learner.step`` is ``step``."""
        return [index for index, part in enumerate(self._parts) if self._is_due(step, part.fragment)]

    def _is_due(self, step: int, fragment: int) -> bool:
        local = step - self.switch_step
        if local <= 0 or (fragment == 0 and not self.warmup_steps):
            return self._rounds.ends(step)
        if local <= self.warmup_steps:  # 1, 2, 4, ... up to H, in equal shares of the warm-up
            doublings = (self.period - 1).bit_length()
            return local % min(self.period, 2 ** ((local - 1) * doublings // self.warmup_steps)) == 0
        return (local + fragment * self.period // self._num_fragments) % self.period == 0

    @override
    def state_dict(self) -> dict[str, Any]:
        """The anchor with its optimizer, and the averages that are not used yet. It waits for these."""
        return {
            "start": self._begun.rows_LP,
            "anchor": None if self._anchor is None else self._anchor.state_dict(),
            "errors": {} if self._feedback is None else self._feedback.state_dict(),
            "counts": self._counts,
            "shares": self._kept,
            "averages": {index: wait() for index, wait in self._under_way.items()},
        }

    @override
    def load_state_dict(self, learner: Learner, state: dict[str, Any]) -> None:
        for wait in self._under_way.values():
            wait()
        self._lay_out(learner)
        if isinstance(self.weights, str):
            self._counts = [count.clone() for count in state["counts"]] or self._counts
            self._kept = learner.shares = state["shares"]
        self._begun = Start(state.get("start"))
        self._anchor = None
        if state["anchor"] is not None and self.outer is not None:
            weights_LP = learner.flat.param_LP  # only their shape
            self._anchor = Anchor(weights_LP[:1] if self.topology is None else weights_LP, self._parts, self.outer)
            self._anchor.load_state_dict(state["anchor"])
        self._under_way = {int(key): partial(_filled, rows, lambda: None) for key, rows in state["averages"].items()}
        if self._feedback is not None:
            self._feedback.load_state_dict(state["errors"])
