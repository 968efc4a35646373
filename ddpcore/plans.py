"""Bucket plans from ``ddpcore._C``. Without it everything imports; only what needs a plan says what to build."""

from __future__ import annotations

from typing import Any, NoReturn

try:
    from ddpcore._C import BucketTracker, plan_buckets
except ImportError as error:
    _WHY = f"ddpcore._C cannot be loaded ({error}): run 'pip install -e .' or 'make build'; distribute() needs it"

    def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise ImportError(_WHY)

    BucketTracker = plan_buckets = _refuse

__all__ = ["BucketTracker", "plan_buckets"]
