"""``--set``: fields of all rows from the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpcore.experiments import study
from ddpcore.experiments.__main__ import main
from ddpcore.experiments.study import find_study
from ddpcore.options.fields import parse_settings

FIELDS: dict[str, dict[str, Any]] = {
    "optimizer.lr=0.5": {"optimizer": {"lr": 0.5}},
    "optimizer.lr=0.5 optimizer.lr=0.25": {"optimizer": {"lr": 0.25}},
    "model=lenet5": {"model": "lenet5"},
    "optimizer.milestones=[1,2]": {"optimizer": {"milestones": [1, 2]}},
    "optimizer=lars optimizer.momentum=0.5": {"optimizer": {"name": "lars", "momentum": 0.5}},
    "optimizer.momentum=0.5 optimizer=lars": {"optimizer": {"name": "lars", "momentum": 0.5}},
    "optimizer.nesterov=true optimizer={momentum=0.5}": {"optimizer": {"nesterov": True, "momentum": 0.5}},
    "optimizer={momentum=0.5} optimizer.momentum=0.25": {"optimizer": {"momentum": 0.25}},
    "strategy.topology=ring strategy.topology.degree=4": {"strategy": {"topology": {"name": "ring", "degree": 4}}},
    "strategy.outer.lr=1": {"strategy": {"outer": {"lr": 1}}},
    "strategy.compression=topk strategy.compression.ratio=0.1": {
        "strategy": {"compression": {"name": "topk", "ratio": 0.1}}
    },
}
REFUSED = {
    "optimizer=3": "--set: optimizer is 3: it must be text",
    "strategy.policies=3": "--set: strategy.policies is 3: it must be a mapping",
    "optimizer.lr.x=2": "--set: optimizer.lr is {'x': 2}: it must be a finite number",
    "run=3": "--set: run is 3: it must be a table",
    "lr=0.1": "--set has no 'lr': write optimizer.lr",
    "strategy_options.period=4": "--set has no 'strategy_options': write strategy",
    "optimizer.lr": "--set optimizer.lr: write KEY=VALUE, such as optimizer.lr=0.1",
    "run.seed=3": "--set run.seed: use --seed and --seeds",
}


@pytest.mark.parametrize("words", FIELDS)
def test_fields(words: str) -> None:
    assert parse_settings(words.split()) == FIELDS[words]


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words: str, main: Callable[..., tuple[int, str, str]], tiny: Path) -> None:
    given = [part for text in words.split() for part in ("--set", text)]
    code, out, error = main("run", tiny, *given)
    assert (code, out) == (2, "")
    assert REFUSED[words] in error and len(error.splitlines()) == 1


def test_an_optimizer_that_is_the_same_keeps_its_options(tiny: Path) -> None:
    tiny.write_text(tiny.read_text().replace("steps = 4", "steps = 4\noptimizer.momentum = 0.9", 1))
    row = study.find_study(str(tiny)).rows["a"]
    assert row.config("full", parse_settings(["optimizer=sgd"])).optimizer.options == {"momentum": 0.9}
    assert row.config("full", parse_settings(["optimizer=lars"])).optimizer.options == {}


def test_a_pipe_gets_whole_names(capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe has no width, so nothing is wrapped or cut."""
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) > 80
    for name in ("digits-large-rate", "disagreement-eigenspace", "ssgd-vs-dpsgd-cifar10"):
        assert f"│ {name} " in out and find_study(name).question.strip() in out
