"""Strategies by name, from values that a file or a command line can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import torch

from ddpcore.options.registry import Registry
from ddpcore.options.suggest import suggest
from ddpcore.options.typed import check_choice, check_keys
from ddpcore.strategies.adpsgd import ADPSGD
from ddpcore.strategies.anchor import MakeOptimizer
from ddpcore.strategies.base import Baseline, Strategy
from ddpcore.strategies.baselines import DDP, Single
from ddpcore.strategies.compression import CODECS, Codec
from ddpcore.strategies.consensus import AdaptiveConsensus
from ddpcore.strategies.dpsgd import DPSGD, ORDERS
from ddpcore.strategies.exact_diffusion import ExactDiffusion
from ddpcore.strategies.fragments import Fragments
from ddpcore.strategies.gasloc import GASLoC
from ddpcore.strategies.gradient_tracking import GradientTracking
from ddpcore.strategies.local_sgd import LocalSGD
from ddpcore.strategies.noisy_ssgd import NoisySSGD
from ddpcore.strategies.noloco import NoLoCo
from ddpcore.strategies.push_sum import PushSum
from ddpcore.strategies.slowmo import SlowMo
from ddpcore.strategies.ssgd import SSGD
from ddpcore.topology.base import Topology


def _dpsgd(
    topology: Topology | None = None,
    *,
    order: str = ORDERS[0],
    staleness: int = 0,
    compression: str | Mapping[str, Any] = "none",
    consensus: Mapping[str, Any] | None = None,
) -> DPSGD:
    """``compression`` is ``"none"``, a name of ``CODECS``, or ``{"name": ..., **settings}``.

    ``consensus`` has the settings of ``AdaptiveConsensus``, such as ``{"power": 3, "start": 500}``.
    """
    adaptive = None if consensus is None else _consensus(consensus)
    return DPSGD(topology, order=order, staleness=staleness, compression=_codec(compression), consensus=adaptive)


def _local_sgd(
    period: int = 8,
    *,
    warmup_steps: int = 0,
    switch_step: int = 0,
    outer: Mapping[str, Any] | None = None,
    fragments: Fragments = 1,
    overlap: int = 0,
    alpha: float = 0.0,
    compression: str | Mapping[str, Any] = "none",
    error_decay: float = 1.0,
    group: int = 1,
) -> LocalSGD:
    """``outer`` has the settings of ``torch.optim.SGD``, such as ``{"lr": 0.7, "momentum": 0.9, "nesterov": True}``."""
    return LocalSGD(
        period,
        warmup_steps=warmup_steps,
        switch_step=switch_step,
        outer=None if outer is None else _outer(outer),
        fragments=fragments,
        overlap=overlap,
        alpha=alpha,
        compression=_codec(compression),
        error_decay=error_decay,
        group=group,
    )


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
        DPSGD.name: _dpsgd,
        LocalSGD.name: _local_sgd,
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


def _outer(settings: Mapping[str, Any]) -> MakeOptimizer:
    if not isinstance(settings, Mapping):
        raise ValueError(f"local_sgd: outer is {settings!r}: it must be a mapping, settings of an SGD")
    make: MakeOptimizer = partial(torch.optim.SGD, **settings)
    try:
        make([torch.zeros(1)])
    except (TypeError, ValueError) as error:
        raise ValueError(f"local_sgd: outer: {error}") from error
    return make


def _consensus(settings: Mapping[str, Any]) -> AdaptiveConsensus:
    if not isinstance(settings, Mapping):
        raise ValueError(f"dpsgd: consensus is {settings!r}: it must be a mapping, settings of an AdaptiveConsensus")
    check_keys("dpsgd: consensus", settings, (item.name for item in fields(AdaptiveConsensus)))
    return AdaptiveConsensus(**settings)


def _codec(wanted: str | Mapping[str, Any]) -> Codec | None:
    if not isinstance(wanted, str | Mapping):
        raise ValueError(f"compression is {wanted!r}: it must be a name, or a mapping of a name and its settings")
    settings = {"name": wanted} if isinstance(wanted, str) else dict(wanted)
    name = settings.pop("name", None)
    if name == "none":
        return None
    if not isinstance(name, str) or name not in CODECS:
        raise ValueError(f"unknown compression {name!r}: {suggest(name, ('none', *CODECS))}")
    try:
        return CODECS[name](**settings)
    except TypeError as error:
        raise ValueError(f"compression {name}: {error}") from error
