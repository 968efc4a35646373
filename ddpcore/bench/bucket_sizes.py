"""Sizes of gradient buckets: from the command line, and as options of a strategy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ddpcore.parameters.flat import MiB

DEFAULT_BUCKET_MB = 25.0  # of distribute() and of DistributedDataParallel, both with a first bucket of 1 MiB
LARGEST_BUCKET_MB = 2.0**20  # larger than any model


def parse_sizes(names: Sequence[str]) -> list[float]:
    """Bucket sizes in MiB from the command line; ``one``, a single bucket for all gradients, is infinity.

    Raises:
        ValueError: a text is not a size, or a size occurs twice.
    """
    sizes = [_parse_size(name) for name in names]
    if len(set(sizes)) != len(sizes):
        raise ValueError("--bucket-mb has a size twice: give each once")
    return sizes


def _parse_size(name: str) -> float:
    try:
        size = math.inf if name == "one" else float(name)
    except ValueError:
        size = math.nan
    if not size > 0 or (math.isinf(size) and name != "one"):
        raise ValueError(f"--bucket-mb: {name!r} is not a size above 0 in MiB: give sizes such as 1,25,one")
    return size


def ddp_options(bucket_mb: float) -> dict[str, Any]:
    """Options of the strategy ``ddp``; none for the default size, because a cap also limits DDP's first bucket."""
    return {} if bucket_mb == DEFAULT_BUCKET_MB else {"bucket_cap_mb": min(bucket_mb, LARGEST_BUCKET_MB)}


def bucket_options(bucket_mb: float) -> dict[str, Any]:
    """Arguments of :func:`ddpcore.distribute`."""
    bucket_bytes = int(min(bucket_mb, LARGEST_BUCKET_MB) * MiB)
    first = bucket_bytes if bucket_mb == math.inf else min(bucket_bytes, MiB)
    return {"bucket_bytes": bucket_bytes, "first_bucket_bytes": first}
