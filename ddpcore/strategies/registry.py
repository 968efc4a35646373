"""Strategies by name, from values that a file or a command line can hold."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from ddpcore.options.registry import Registry
from ddpcore.options.typed import check_choice
from ddpcore.strategies.adpsgd import ADPSGD
from ddpcore.strategies.base import Baseline, Strategy
from ddpcore.strategies.baselines import DDP, Single
from ddpcore.strategies.dpsgd import DPSGD
from ddpcore.strategies.exact_diffusion import ExactDiffusion
from ddpcore.strategies.gasloc import GASLoC
from ddpcore.strategies.gradient_tracking import GradientTracking
from ddpcore.strategies.local_sgd import LocalSGD
from ddpcore.strategies.noisy_ssgd import NoisySSGD
from ddpcore.strategies.noloco import NoLoCo
from ddpcore.strategies.push_sum import PushSum
from ddpcore.strategies.slowmo import SlowMo
from ddpcore.strategies.ssgd import SSGD
from ddpcore.topology.base import Topology


def _without_topology(strategy: type[Strategy]) -> Callable[..., Strategy]:
    """The strategy without neighbours: a run always has a topology, and this strategy would use it."""
    signature = inspect.signature(strategy)

    @wraps(strategy.__init__)
    def make(*args: Any, **options: Any) -> Strategy:
        return strategy(*args, **options)

    kept = [parameter for name, parameter in signature.parameters.items() if name != "topology"]
    make.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return make


def _slowmo(
    topology: Topology | None = None,
    *,
    base: str = DPSGD.name,
    period: int = 8,
    slow_momentum: float = 0.5,
    slow_lr: float = 1.0,
) -> SlowMo:
    """``base`` is ``"dpsgd"``, for gossip between the slow steps, or ``"none"``, for local steps."""
    check_choice("slowmo: base", base, (DPSGD.name, "none"))
    gossip = None if base == "none" else DPSGD(topology)
    return SlowMo(gossip, period=period, slow_momentum=slow_momentum, slow_lr=slow_lr)


STRATEGIES: Registry[Strategy | Baseline] = Registry(
    "strategy",
    "ddpcore.strategies",
    (Strategy, Baseline),
    {
        SSGD.name: SSGD,
        DPSGD.name: DPSGD,
        LocalSGD.name: _without_topology(LocalSGD),
        NoLoCo.name: NoLoCo,
        GASLoC.name: GASLoC,
        NoisySSGD.name: NoisySSGD,
        SlowMo.name: _slowmo,
        PushSum.name: PushSum,
        ExactDiffusion.name: ExactDiffusion,
        GradientTracking.name: GradientTracking,
        ADPSGD.name: ADPSGD,
        Single.name: Single,
        DDP.name: DDP,
    },
    reserved=("topology",),
)


def is_baseline(name: str) -> bool:
    """Whether the strategy of this name is a :class:`Baseline`, which trains without ddpcore.

    Raises:
        ValueError: there is no such strategy.
    """
    made = STRATEGIES.find(name)
    return inspect.isclass(made) and issubclass(made, Baseline)
