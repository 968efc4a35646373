"""Parts of a user, right and wrong ones, which ranks import by name."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ddpcore import ALL, DPSGD, SSGD, LocalSGD, Plan, Ring, Round, Strategy, Topology, Traits
from ddpcore.comm.process import ProcessGroupCommunicator
from ddpcore.comm.virtual import VirtualCommunicator
from ddpcore.strategies.base import Baseline
from ddpcore.strategies.learner import Learner


class MeanOfWeights(Strategy):
    """All learners average their weights after every step."""

    name: ClassVar[str] = "mean_of_weights"

    def after_step(self, learner: Learner) -> None:
        learner.check_sent()
        learner.comm.average_(learner.flat.param_LP, learner.step - 1).wait()


class ChecksNothing(Strategy):
    """Wrong: it sends weights that are not finite."""

    name: ClassVar[str] = "checks_nothing"

    def after_step(self, learner: Learner) -> None:
        learner.comm.average_(learner.flat.param_LP, learner.step - 1).wait()


class ScalesByNorm(MeanOfWeights):
    """Wrong on shards: the norm is of the gradients of one rank."""

    name: ClassVar[str] = "scales_by_norm"

    def before_step(self, learner: Learner) -> None:
        learner.flat.gather_grads()
        learner.flat.grad_LP.div_(1 + learner.flat.grad_LP.norm(dim=1, keepdim=True))


class Alternating(SSGD):
    """All average their gradients in even steps, and neighbours their weights in odd steps; right."""

    name: ClassVar[str] = "alternating"

    def __init__(self, topology: Topology | None = None) -> None:
        super().__init__()
        self.topology = topology or Ring()

    @property
    def traits(self) -> Traits:
        return Traits(averages_gradients=True)

    def plan(self, step: int) -> Plan:
        return Plan(1 if step % 2 else ALL)

    def bucket_ready(self, learner: Learner, columns: Tensor) -> None:
        if learner.step % 2 == 0:
            super().bucket_ready(learner, columns)

    def after_step(self, learner: Learner) -> None:
        if learner.step % 2 == 0:
            learner.check_sent()
            learner.comm.mix_(learner.flat.param_LP, self.topology, learner.step - 1)


class Quiet(Baseline):
    """It says that it averages gradients, and has no buckets."""

    name: ClassVar[str] = "quiet"
    traits: ClassVar[Traits] = Traits(averages_gradients=True)

    def connect(self, group: Any) -> Any:
        return ProcessGroupCommunicator(group)

    def wrap(self, model: Any, group: Any) -> Any:
        return model


class Lone(Quiet):
    """One learner with the whole batch, as ``single``; right."""

    name: ClassVar[str] = "lone"
    traits: ClassVar[Traits] = Traits(transports=("virtual",), most_learners=1)

    def connect(self, group: Any) -> Any:
        return VirtualCommunicator(1)


class Unknown(Quiet):
    """It averages something else, of unknown size."""

    name: ClassVar[str] = "unknown"
    traits: ClassVar[Traits] = Traits()


class SaysNoPeriod(MeanOfWeights):
    """Wrong: it averages in every third step, and the plan says in every step."""

    name: ClassVar[str] = "says_no_period"

    def after_step(self, learner: Learner) -> None:
        if learner.step % 3 == 0:
            super().after_step(learner)


class AveragesGradientsAnyway(MeanOfWeights):
    """Wrong: the plan says that each learner keeps its own gradient."""

    name: ClassVar[str] = "averages_anyway"

    def before_step(self, learner: Learner) -> None:
        learner.flat.gather_grads()
        learner.comm.average_(learner.flat.grad_LP, learner.step).wait()


class AveragesNoGradients(MeanOfWeights):
    """Wrong: the plan says that gradients are averaged."""

    name: ClassVar[str] = "averages_none"
    traits: ClassVar[Traits] = Traits(averages_gradients=True)


class SaysLargerGroups(LocalSGD):
    """Wrong: groups of two average their gradients, and the plan says groups of four."""

    def __init__(self) -> None:
        super().__init__(period=2, group=2)

    def plan(self, step: int) -> Plan:
        return replace(super().plan(step), gradients=4)

    def bucket_ready(self, learner: Learner, columns: Tensor) -> None:
        self._works.append(learner.comm.average_(columns, learner.step, 2))


class KnowsItsRank(MeanOfWeights):
    """Wrong: the first row of a process is not always learner 0."""

    def after_step(self, learner: Learner) -> None:
        super().after_step(learner)
        learner.flat.param_LP[0] *= 1.001


class ForgetsItsState(Strategy):
    """Wrong: the momentum of the weights is not in the state."""

    name: ClassVar[str] = "forgets"

    def __init__(self) -> None:
        self._before: Tensor | None = None

    def after_step(self, learner: Learner) -> None:
        weights_LP = learner.flat.param_LP
        learner.check_sent()
        learner.comm.average_(weights_LP, learner.step - 1).wait()
        now = weights_LP.clone()
        if self._before is not None:
            weights_LP += 0.5 * (weights_LP - self._before)
        self._before = now


class SaysIdentical(LocalSGD):
    """Wrong: learners take local steps."""

    @property
    def traits(self) -> Traits:
        return replace(super().traits, stays_identical=True)


def slow_local_sgd() -> SaysIdentical:
    return SaysIdentical(period=100)


_SHARED = DPSGD(Ring())


def always_the_same() -> Strategy:
    return _SHARED


@dataclass(frozen=True)
class Shift(Topology):
    """Learner j reads from j - 1 - step % 2; right."""

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        hop = 1 + step % 2
        if num_learners < 4:
            raise ValueError("Shift: at least 4 learners")
        source, destination = (rank - hop) % num_learners, (rank + hop) % num_learners
        return Round(0.5, (source,), (0.5,), (destination,))

    def period(self, num_learners: int) -> int | None:
        return 2


class WrongPeriod(Shift):
    def period(self, num_learners: int) -> int | None:
        return 1


class Unbalanced(Shift):
    def round(self, step: int, rank: int, num_learners: int) -> Round:
        right = super().round(step, rank, num_learners)
        return Round(0.75 if rank == 0 else 0.5, right.sources, (0.25,) if rank == 0 else (0.5,), right.destinations)


class Impure(Shift):
    def round(self, step: int, rank: int, num_learners: int) -> Round:
        right = super().round(step, rank, num_learners)
        share = 0.5 + 0.1 * random.random()
        return Round(share, right.sources, (1 - share,), right.destinations)


class WrongShape(Shift):
    def period(self, num_learners: int) -> int | None:
        return 1

    def round(self, step: int, rank: int, num_learners: int) -> Round:
        return super().round(0, rank, num_learners)

    def spectral_gap(self, num_learners: int) -> float:
        return 0.5


class SignSGD(torch.optim.Optimizer):
    """w <- w - lr sign(g); right."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * self.direction(parameter))
        return loss

    def direction(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad.sign()


class WithoutLoss(SignSGD):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)


class HiddenState(SignSGD):
    """Wrong: the count of steps is no part of the state."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)

    def direction(self, parameter: Tensor) -> Tensor:
        return super().direction(parameter) / self.steps


class NormOfAll(SignSGD):
    """Wrong for virtual learners: the norm is that of the gradients of all learners."""

    def direction(self, parameter: Tensor) -> Tensor:
        assert parameter.grad is not None
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return parameter.grad / torch.nn.utils.get_total_norm(gradients)
