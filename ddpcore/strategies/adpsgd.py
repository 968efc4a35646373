"""Asynchronous decentralized parallel SGD: a learner averages with one peer as it is now, and waits for nobody."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from ddpcore.comm.base import Job, LiveWeights
from ddpcore.options.typed import check_range, typed
from ddpcore.strategies.a2cid2 import A2CiD2, Acceleration, acceleration_of
from ddpcore.strategies.base import Strategy, Traits, check_mixable, check_unweighted, topology_of
from ddpcore.strategies.learner import Learner
from ddpcore.topology.base import Topology
from ddpcore.topology.regular import Complete


class Event(NamedTuple):
    """The end of a job: the learner averages with its peer, and then adds the step of its optimizer."""

    time: Fraction  #: in jobs of the fastest learner
    learner: int  #: whose job has ended
    peer: int  #: with whom it averages; itself if the topology gives it no neighbour at this step


class ADPSGD(Strategy):
    r"""Asynchronous decentralized parallel SGD (AD-PSGD; Lian et al. 2018, arXiv:1710.06952).

    Each learner does one job after the other. It begins a job with a copy v_i of its weights w_i, and computes the
    gradient there. When the job ends, at once and whatever the others do:

    ``w_i, w_j <- (w_i + w_j) / 2`` with one peer j;  ``w_i <- w_i - a g_i(v_i)``;  ``v_i <- w_i``.

    During a job peers change w_i, so the gradient belongs to older weights. Averages in pairs do not move the mean over
    learners, so the mean moves by the gradients alone. ``- a g_i(v_i)`` stands for the change of v_i by the optimizer,
    whose state moves once a job. The equation is second-hand (the paper was not read), in the paper's order.

    On **ranks** only the two rows are locked during an average, and no rank waits for the step of another: no run can
    be repeated. On **virtual learners** it is a simulation of time, which can be repeated bit for bit. A job of the
    fastest learner takes one step of the training loop. A learner with speed 0.5 begins a job in every second step, and
    its gradients of the batches between are removed.

    The models hold v, and after the optimizer's step v plus that step until the job ends. A change of the models'
    weights by the program is added to w then. A learner keeps two more copies of the weights, and over a process group
    five. If an average fails, the model of that learner holds v again, and its step is lost.

    **Accelerated** learners (A2CiD2; Nabli, Belilovsky and Oyallon 2023, arXiv:2306.08289) agree faster where a
    topology is large and sparse, such as a ring. A learner has a double y_i of its weights, which begins as a copy. At
    an event, after a time t without one, with ``d = (1 - exp(-2 eta t)) / 2``:

    ``w_i, y_i <- w_i + d (y_i - w_i), y_i + d (w_i - y_i)``, and j likewise;
    ``y_i <- y_i + alpha (w_j - w_i)``, ``y_j <- y_j + alpha (w_i - w_j)``;  ``w_i, w_j <- (w_i + w_j) / 2``;
    ``w_i <- w_i - a g_i(v_i)``, ``y_i <- y_i - a g_i(v_i)``;  ``v_i <- w_i``.

    The mean of all w and y moves by the gradients alone. Eta and alpha follow from how often two learners meet
    (:func:`ddpcore.strategies.a2cid2.acceleration_of`): in a unit of time a learner takes ``speed`` peers, each of its
    neighbours equally often. On a complete graph of equal speeds alpha is 1/2, so y is w, and nothing changes.

    A change of a model by the program, such as ``load_state_dict``, is part of its next step: w takes the difference.
    On virtual learners time is simulated. On ranks a unit of time passes for a learner at the end of each
    of its jobs, and eta assumes equal speeds; then only the mean of w and y together moves by the gradients alone.

    The equations follow the authors' code (github AdelNabli/ACiD); the paper was not read. That code sends w of
    before the first line, which moves the mean a little, and measures time by the clock of each rank. Its eta is for
    one meeting of a learner in a unit of time; here there are two: it takes a peer, and it is taken by one.

    Args:
        topology: of which a learner takes one of its neighbours of the step at random; None is ``Complete()``.
        speeds: of each virtual learner, relative to the fastest: from 0.001 to 1, rounded to fractions with a
            denominator of at most 1000. None: all are equally fast.
        seed: of the random order and the peers.
        accelerated: whether learners have doubles. It needs a topology that is the same at every step.
        eta: if accelerated: above 0, per job of the fastest learner. None computes it.
        alpha: if accelerated: at least 0. None computes it.

    ValueError: an option has another type, or is out of its range.
    """

    name: ClassVar[str] = "adpsgd"
    topology: Topology

    def __init__(
        self,
        topology: Topology | None = None,
        *,
        speeds: Sequence[float] | None = None,
        seed: int = 0,
        accelerated: bool = False,
        eta: float | None = None,
        alpha: float | None = None,
    ) -> None:
        self.topology = topology_of(self.name, topology, Complete)
        self.speeds: tuple[float, ...] | None = typed("adpsgd: speeds", speeds, tuple[float, ...] | None)
        self.seed = typed("adpsgd: seed", seed, int)
        self.accelerated = typed("adpsgd: accelerated", accelerated, bool)
        self.eta = typed("adpsgd: eta", eta, float | None)
        self.alpha = typed("adpsgd: alpha", alpha, float | None)
        check_range("adpsgd: seed", self.seed, least=0)
        check_range("adpsgd: eta", self.eta, above=0)
        check_range("adpsgd: alpha", self.alpha, least=0)
        for name, value in (("eta", self.eta), ("alpha", self.alpha)):
            if value is not None and not self.accelerated:
                raise ValueError(f"adpsgd: {name} is {value}: take accelerated=True, or leave it out")
        for learner, speed in enumerate(self.speeds or ()):
            check_range(f"adpsgd: speeds[{learner}]", speed, least=1e-3, most=1)
        if self.speeds is not None and max(self.speeds, default=0) != 1:
            raise ValueError(f"adpsgd: speeds is {self.speeds}: the fastest learner must have 1, divide by its speed")
        self._fractions = [Fraction(speed).limit_denominator(1000) for speed in self.speeds or ()]
        self._acceleration: Acceleration | None = None
        self._learner: Learner | None = None  # it has w, and y
        self._read_LP: Tensor | None = None  # v; the models hold it, too, and the optimizer changes it there

    def __repr__(self) -> str:
        more = ("accelerated", "eta", "alpha") if self.accelerated else ()
        return f"ADPSGD({self.topology!r}, {self._shown('speeds', 'seed', *more)})"

    @property
    @override
    def traits(self) -> Traits:
        of_ranks = self.speeds is None
        return Traits(
            takes_closure=False,  # the gradient must be the one at v
            acts_in_forward=True,
            waits=False,
            transports=("virtual", "shm", "pg") if of_ranks else ("virtual",),
            transports_because="" if of_ranks else "speeds is for virtual learners, and ranks are as fast as they are",
            no_mean="adpsgd computes gradients at older weights than those that it averages",
            no_shards="the ranks of a learner would average with others at different times: take dpsgd",
            no_deaths="learners that die or join are not supported: take on_failure='raise', or dpsgd",
        )

    @override
    def setup(self, num_learners: int, dtype: torch.dtype) -> None:
        check_mixable(self.name, dtype, "averages in pairs are")
        if self.speeds is not None and len(self.speeds) != num_learners:
            what = f"adpsgd: speeds has {len(self.speeds)} numbers and there are {num_learners} learners"
            raise ValueError(f"{what}: give {num_learners} numbers")
        self.topology.validate(num_learners)
        check_unweighted(self, num_learners)
        self._acceleration = self.acceleration(num_learners)

    def acceleration(self, num_learners: int) -> Acceleration | None:
        """Eta and alpha; None if learners are not accelerated. ValueError: neighbours change from step to step."""
        if not self.accelerated:
            return None
        if self.topology.period(num_learners) != 1:
            what = f"adpsgd: accelerated needs the same neighbours at every step, {self.topology!r} changes them"
            raise ValueError(f"{what}: take ddpcore.Ring(), or leave it out")
        rates_NN = np.zeros((num_learners, num_learners))
        for learner in range(num_learners):
            peers = list(self.topology.round(0, learner, num_learners).sources)
            rates_NN[learner, peers] = float(self._speed(learner)) / max(1, len(peers))
        eta, alpha = acceleration_of(rates_NN + rates_NN.T)
        return Acceleration(eta if self.eta is None else self.eta, alpha if self.alpha is None else self.alpha)

    def events(self, step: int, num_learners: int) -> list[Event]:
        """The events of a step in their order: all ends of jobs after time ``step`` and up to time ``step + 1``."""
        bits = np.random.Philox(np.random.SeedSequence(self.seed, spawn_key=(step, 0))).random_raw(2 * num_learners)
        order, choices = bits.reshape(2, num_learners).tolist()
        events = []
        for learner in range(num_learners):
            if self._ends(step + 1, learner):
                peers = self.topology.round(step, learner, num_learners).sources or (learner,)
                speed = self._speed(learner)
                events.append(Event(int(speed * (step + 1)) / speed, learner, peers[choices[learner] % len(peers)]))
        return sorted(events, key=lambda event: (event.time, order[event.learner]))

    def begins(self, step: int, learner: int) -> bool:
        """Whether the learner's gradient of a step belongs to a new job."""
        return step == 0 or self._ends(step, learner)

    def _ends(self, step: int, learner: int) -> bool:
        """Whether a job of the learner ends between time ``step - 1`` and time ``step``."""
        speed = self._speed(learner)
        return int(speed * step) > int(speed * (step - 1))  # numbers of jobs that have ended

    def _speed(self, learner: int) -> Fraction:
        return self._fractions[learner] if self._fractions else Fraction(1)

    @override
    def before_forward(self, learner: Learner) -> None:
        """Before the first step: begin with w = v, the weights of the models. Collective."""
        self._learner = learner
        if learner.live is None:
            self._read_LP = learner.flat.param_LP.clone()
            rule = None if self._acceleration is None else A2CiD2(self._acceleration)
            learner.live = learner.comm.live(learner.flat.param_LP, rule)
            learner.left = self._read_LP if self.speeds is None else self._read_LP.clone()

    @override
    def before_step(self, learner: Learner) -> None:
        """Let the optimizer step v, of the learners that have begun a job."""
        self.before_forward(learner)
        for number, model in zip(learner.comm.learners, learner.models, strict=True):
            if not self.begins(learner.step, number):
                for parameter in model.parameters():
                    parameter.grad = None  # so any optimizer leaves the parameter and its state alone

    @override
    def after_step(self, learner: Learner) -> None:
        """End jobs: let the events of the learners held here happen."""
        live, first = learner.live, learner.comm.learners[0]
        assert live is not None and self._read_LP is not None
        learner.check_sent()
        flown = dict.fromkeys(learner.comm.learners, Fraction(learner.step - 1))  # the time that rows are of
        for time, i, j in self.events(learner.step - 1, learner.comm.num_learners):
            if i not in learner.comm.learners:
                continue
            job = Job(self._read_LP[i - first], learner.flat.param_LP[i - first])
            try:
                self._flow(live, flown, (i, j), time)
                live.meet(i, j, job)
            except BaseException:
                job.model.copy_(job.read)
                raise
            if i == first and i != j:
                learner.comm.bytes_sent += 2 * job.model.nbytes  # to the peer and back
        self._flow(live, flown, learner.comm.learners, Fraction(learner.step))
        learner.loaded.clear()
        # Slow learners hold steps that have not ended.
        learner.left = self._read_LP if self.speeds is None else learner.flat.param_LP.clone()

    def _flow(self, live: LiveWeights, flown: dict[int, Fraction], learners: Iterable[int], time: Fraction) -> None:
        """Move the rows of those learners that are held here to a time."""
        if self._acceleration is None:
            return
        for learner in learners:
            if learner in flown and flown[learner] < time:
                live.drift(learner, float(time - flown[learner]))
                flown[learner] = time

    @override
    def state_dict(self) -> dict[str, Any]:
        learner = self._learner
        if learner is None or learner.live is None:
            return {"live": None, "read": None, "left": None, "loaded": []}
        left_LP = None if self.speeds is None else learner.left
        loaded = [index for one, index in learner.flat.index.items() if one in learner.loaded]
        return {"live": learner.live.rows(), "read": self._read_LP, "left": left_LP, "loaded": loaded}

    @override
    def load_state_dict(self, learner: Learner, state: dict[str, Any]) -> None:
        learner.loaded.clear()  # to resume brings the weights of each model, which is no state that a program loads
        learner.loaded.update(id(learner.flat.parameters[index]) for index in state.get("loaded", ()))
        if state["live"] is None:  # saved before the first step
            if learner.live is not None:
                learner.live.settle()  # others may still average with these weights
            learner.live = learner.left = self._read_LP = None
            return
        self.before_forward(learner)
        assert learner.live is not None
        learner.live.load(state["live"])
        self._read_LP = state["read"]
        learner.left = self._read_LP if self.speeds is None else state.get("left")
