"""What an idiom must do in a world: the weights of the plain loop, or an error that names the cause."""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch

from helpers.each import each
from helpers.idioms.run import execute
from helpers.idioms.table import IDIOMS, worlds


def check_worlds(name: str, strategy: str, seen: list[dict[Any, Any]]) -> None:
    """Where it runs with the strategy: what fails is named together."""
    each("world", worlds(name, strategy))(check)(name=name, strategy=strategy, seen=seen)


def check(name: str, strategy: str, world: str, seen: list[dict[Any, Any]]) -> None:
    """The weights of the plain loop, or the error that names the cause."""
    one = IDIOMS[name]
    plain = [rank[name, strategy, "plain"] for rank in seen]
    if world in ("ranks", "pg"):
        results = [rank[name, strategy, world] for rank in seen]
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = [execute(one, strategy, world)]
    message = one.message(strategy)
    if message is not None and (len(seen) > 1 or "error" in results[0]):  # one rank differs from nobody
        for result in results:
            assert re.search(message, result.get("error", "no error")), result.get("error", "no error")
            assert len(result["error"]) < 300
        return
    for result in (*plain, *results):
        assert "error" not in result, result["error"]
    if world == "virtual":
        rows = [[stack[j] for stack in results[0]["weights"]] for j in range(2)]
        results = [{"weights": row, "mean": results[0]["mean"]} for row in rows]
    for result, expected in zip(results, plain, strict=True):
        for kind in ("weights", "mean"):
            assert len(result[kind]) == len(expected[kind])
            for ours, theirs in zip(result[kind], expected[kind], strict=True):
                size = max(1.0, float(theirs.abs().max())) if theirs.numel() else 1.0
                torch.testing.assert_close(ours, theirs, rtol=0, atol=size * 10.0**-one.digits, msg=f"{kind} of {name}")
