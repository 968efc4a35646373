"""Predictions as text, from plain records."""

from __future__ import annotations

from typing import Any

from ddpcore.bench.predict import accuracy, verdict


def row(strategy: str, predicted: float, measured: float, error: float, **more: Any) -> dict[str, Any]:
    return {
        "strategy": strategy, "topology": None, "bucket_mb": None, "num_buckets": None, "transport": "pg",
        "comm_ms": 1.0, "predicted_ms": predicted, "measured_ms": {"p20": 0.0, "p50": measured, "p80": 0.0},
        "error_pct": error,
    } | more  # fmt: skip


SSGD = [
    row("ssgd", 10.0, 12.0, -16.0, bucket_mb=1.0, num_buckets=3),
    row("ssgd", 8.0, 20.0, 7.0, bucket_mb=25.0, num_buckets=1),
]
RING = row("dpsgd", 4.0, 9.0, -2.0, topology="ring")
LOCAL = row("local_sgd", 5.0, 6.0, 1.0)


def test_accuracy() -> None:
    assert accuracy([*SSGD, RING]) == "prediction error: median 7.0 %, worst 16.0 % (ssgd 1 MiB pg)"


def test_verdict_compares_the_same_cases() -> None:
    """Both ratios are of one pair. The pair that was measured as fastest is named if it is another."""
    assert verdict([*SSGD, RING, LOCAL]) == (
        "will it pay: yes: a step of dpsgd ring pg takes 0.50 of the time of ssgd 25 MiB pg as predicted, and 0.45 as "
        "measured; the fastest as measured are local_sgd pg and ssgd 1 MiB pg: 0.50"
    )
    assert verdict([SSGD[1], RING]) == (
        "will it pay: yes: a step of dpsgd ring pg takes 0.50 of the time of ssgd 25 MiB pg as predicted, and 0.45 as "
        "measured"
    )
    for rows in (SSGD, [RING, LOCAL]):
        assert verdict(rows) == "will it pay: name ssgd and another strategy to compare"
