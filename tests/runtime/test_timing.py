"""Quantiles of measured times."""

from __future__ import annotations

import numpy as np
import pytest

from ddpcore.runtime import timing


def test_quantiles() -> None:
    assert timing.quantiles([5, 1, 4, 2, 3, 6]) == {"p20": 2.0, "p50": 3.5, "p80": 5.0}
    assert timing.quantiles(iter([7.0])) == {"p20": 7.0, "p50": 7.0, "p80": 7.0}
    assert all(type(value) is float for value in timing.quantiles(np.arange(5)).values())
    with pytest.raises(ValueError, match="at least one"):
        timing.quantiles([])
