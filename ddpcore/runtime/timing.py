"""Quantiles of measured times."""

from collections.abc import Iterable

import numpy as np


def quantiles(values: Iterable[float]) -> dict[str, float]:
    """The 20th, 50th and 80th percentile, with linear interpolation. ValueError if there are no values."""
    samples = np.fromiter(values, dtype=np.float64)
    if samples.size == 0:
        raise ValueError("quantiles: there are no values, give at least one")
    low, middle, high = np.quantile(samples, (0.2, 0.5, 0.8)).tolist()
    return {"p20": low, "p50": middle, "p80": high}
