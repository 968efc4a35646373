"""The algorithms, one a file, by name; and the baselines single and ddp."""

from __future__ import annotations

from collections.abc import Callable

from ddpcore.compression import CODECS
from ddpcore.topology import Topology

from .base import Baseline, Strategy
from .baselines import DDP, Single
from .dpsgd import DPSGD, ORDERS
from .local_sgd import LocalSGD
from .noisy_ssgd import NoisySSGD
from .push_sum import PushSum
from .slowmo import SlowMo
from .ssgd import SSGD

__all__ = [
    "Baseline",
    "DDP",
    "DPSGD",
    "LocalSGD",
    "NoisySSGD",
    "ORDERS",
    "PushSum",
    "SSGD",
    "Single",
    "SlowMo",
    "Strategy",
    "build",
    "names",
]

_ALL: tuple[type[Strategy] | type[Baseline], ...] = (SSGD, DPSGD, LocalSGD, NoisySSGD, SlowMo, PushSum, Single, DDP)


def names() -> list[str]:
    """The names that :func:`build` knows."""
    return [cls.name for cls in _ALL]


def build(
    name: str,
    *,
    topology: Topology,
    period: int = 8,
    order: str = ORDERS[0],
    staleness: int = 0,
    compression: str = "none",
    noise_std: float = 0.01,
    seed: int = 0,
) -> Strategy | Baseline:
    """A strategy by name; each takes of the options what it knows.

    Args:
        name: one of :func:`names`.
        topology: for dpsgd, push_sum and slowmo.
        period: for local_sgd and slowmo, steps between averages.
        order: for dpsgd, one of ``ORDERS``.
        staleness: for dpsgd, 0 or 1.
        compression: for dpsgd, ``none`` or a name of :data:`ddpcore.compression.CODECS`.
        noise_std: for noisy_ssgd.
        seed: of the noise.

    Raises:
        ValueError: no such strategy, or its options do not go together.
    """
    if compression not in ("none", *CODECS):
        raise ValueError(f"unknown compression {compression!r}: choose from none, {', '.join(CODECS)}")

    def dpsgd() -> DPSGD:
        codec = None if compression == "none" else CODECS[compression]()
        return DPSGD(topology, order=order, staleness=staleness, compression=codec)

    makers: dict[str, Callable[[], Strategy | Baseline]] = {
        DPSGD.name: dpsgd,
        LocalSGD.name: lambda: LocalSGD(period),
        NoisySSGD.name: lambda: NoisySSGD(noise_std, seed=seed),
        SlowMo.name: lambda: SlowMo(DPSGD(topology), period=period),
        PushSum.name: lambda: PushSum(topology),
        **{cls.name: cls for cls in (SSGD, Single, DDP)},
    }
    if name not in makers:
        raise ValueError(f"unknown strategy {name!r}: choose from {', '.join(names())}")
    return makers[name]()
