"""What a process does in which the packages of the extras cannot be imported; it prints JSON.

Usage: ``python without_packages.py scipy,rich,...`` with the package on the path.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from importlib.abc import MetaPathFinder
from typing import Any


class Blocked(MetaPathFinder):
    """Finds none of these packages, before other finders are asked."""

    def __init__(self, packages: frozenset[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in self.packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def trained() -> dict[str, list[int]]:
    """The number of steps of each strategy, and of learners that it has trained."""
    import torch
    from torch import nn

    import ddpcore
    from ddpcore.optim import FusedSGD

    found = {}
    strategies = (
        ddpcore.SSGD(),
        *(ddpcore.DPSGD(topology) for topology in (ddpcore.RandomPair(seed=0), ddpcore.Ring(), ddpcore.Star())),
        ddpcore.DPSGD(ddpcore.FromMatrix([[0.5, 0.5, 0], [0.5, 0.25, 0.25], [0, 0.25, 0.75]]), staleness=1),
        ddpcore.PushSum(ddpcore.OnePeerExponential()),
    )
    for strategy in strategies:
        model = nn.Linear(5, 1)
        optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
        handle = ddpcore.distribute(model, optimizer, strategy, learners=3)
        handle.model(torch.randn(3, 8, 5)).square().mean().backward()
        optimizer.step()
        found[repr(strategy)] = [handle.learner.step, len(handle.models)]
    return found


def refusal(call: Any) -> str:
    """The message of the error that the call raises."""
    from ddpcore.options.extras import MissingPackage

    try:
        call()
    except MissingPackage as error:
        return str(error)
    return "no error"


def command(module: str, *words: str) -> list[Any]:
    """Exit code and standard error of ``python -m module words``."""
    import runpy

    error, before = io.StringIO(), sys.argv
    sys.argv = [module, *words]
    try:
        with contextlib.redirect_stderr(error):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return [end.code, error.getvalue()]
    finally:
        sys.argv = before
    return [0, error.getvalue()]


def main() -> dict[str, Any]:
    import torch  # noqa: F401

    before = set(sys.modules)
    import ddpcore
    import ddpcore.optim

    imported = sorted(set(sys.modules) - before)
    import ddpcore.diagnostics
    from ddpcore.training import TrainConfig, train

    gap = ddpcore.Ring().spectral_gap(8), ddpcore.Star().spectral_gap(8)
    return {
        "imported": imported,
        "trained": trained(),
        "gap": gap,
        "training": refusal(lambda: train(TrainConfig.from_dict({"run": {"steps": 1}}), out="nowhere")),
        "bench": command("ddpcore.bench"),
        "bench comm": command("ddpcore.bench", "comm", "--world-size", "2"),
        "experiments": command("ddpcore.experiments", "list"),
        "demo": command("ddpcore", "demo"),
        "train": command("ddpcore", "train", "--out", "nowhere", "run.steps=1"),
        "training command": command("ddpcore.training", "--out", "nowhere", "run.steps=1"),
        "report": command("ddpcore", "report", "nowhere"),
        "report command": command("ddpcore.report", "nowhere"),
    }


if __name__ == "__main__":
    sys.meta_path.insert(0, Blocked(frozenset(sys.argv[1].split(","))))
    print(json.dumps(main()))
