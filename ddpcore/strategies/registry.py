"""Strategies by name, from values that a file or a command line can hold."""

import inspect
from collections.abc import Callable
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
from ddpcore.topology.registry import topology_named


def _adapted(strategy: type[Strategy], make: Callable[..., Strategy], *left_out: str) -> Callable[..., Strategy]:
    """Give ``make`` the strategy's parameters beside its own, some left out, and return it."""
    own, theirs = inspect.signature(make).parameters, inspect.signature(strategy).parameters
    kept = [p for p in own.values() if p.kind is not p.VAR_KEYWORD]
    kept += [p.replace(kind=p.KEYWORD_ONLY) for name, p in theirs.items() if name not in (*own, *left_out)]
    make.__annotations__ = strategy.__init__.__annotations__ | make.__annotations__
    make.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
    return make


def _local_sgd(*, gossip: Any = None, then: Any = None, seed: int = 0, **options: Any) -> LocalSGD:
    """``gossip`` is its topology, by name as ``then``: a run always has a topology, which local SGD seldom wants."""
    if then is not None and gossip is None:
        raise ValueError("local_sgd: then averages once more what gossip has averaged: name its topology, too")
    topology, then = (None if one is None else topology_named(one, seed) for one in (gossip, then))
    return LocalSGD(topology=topology, then=then, **options)


def _slowmo(topology: Topology | None = None, *, base: str = DPSGD.name, **options: Any) -> SlowMo:
    """``base`` is ``"dpsgd"``, for gossip between the slow steps, or ``"none"``, for local steps."""
    check_choice("slowmo: base", base, (DPSGD.name, "none"))
    return SlowMo(None if base == "none" else DPSGD(topology), **options)


_ADAPTED = {LocalSGD.name: _adapted(LocalSGD, _local_sgd, "topology"), SlowMo.name: _adapted(SlowMo, _slowmo)}
_CLASSES: tuple[type[Strategy | Baseline], ...] = (
    *(SSGD, DPSGD, LocalSGD, NoLoCo, GASLoC, NoisySSGD, SlowMo),
    *(PushSum, ExactDiffusion, GradientTracking, ADPSGD, Single, DDP),
)
STRATEGIES: Registry[Strategy | Baseline] = Registry(
    "strategy",
    "ddpcore.strategies",
    (Strategy, Baseline),
    {one.name: _ADAPTED.get(one.name, one) for one in _CLASSES},
    reserved=("topology",),
)


def is_baseline(name: str) -> bool:
    """Whether the strategy of this name is a :class:`Baseline`. ValueError: there is no such strategy."""
    made = STRATEGIES.find(name)
    return inspect.isclass(made) and issubclass(made, Baseline)
